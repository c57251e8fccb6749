"""Statistics: resource usage of the node, its pods and their containers."""
