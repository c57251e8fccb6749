"""What pods may use: QoS classes, cgroups, OOM scores."""
