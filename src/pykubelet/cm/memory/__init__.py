"""Memory manager: memory and huge pages of NUMA nodes for Guaranteed containers."""
