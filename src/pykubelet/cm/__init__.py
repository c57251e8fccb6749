"""Container manager: QoS classes, cgroups, CPUs, memory, NUMA topology, devices and resource claims."""
