"""Cgroups of the node, the QoS classes and the pods, through cgroupfs or systemd."""
