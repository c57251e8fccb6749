"""Cgroups of the node, the QoS classes and the pods, through cgroupfs or systemd.

- `values`: settings of cgroups, computed from pods and the node, and names of cgroups
- `driver`: creates, sets, reads and removes cgroups; metrics
- `node_cgroups`: limits of all pods together and of system daemons; moving of daemons into cgroups
- `pod_cgroups`: the `kubepods` tree: QoS cgroups and pods' cgroups
"""
