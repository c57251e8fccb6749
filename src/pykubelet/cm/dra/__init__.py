"""Dynamic resource allocation: resource claims of pods and the drivers that prepare them."""
