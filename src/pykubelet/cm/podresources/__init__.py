"""Pod-resources API: CPUs, memory and devices of containers, for monitoring agents."""
