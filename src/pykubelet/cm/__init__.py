"""Container manager: node capacity, QoS classes, cgroups, and the resource managers.

- `capacity`: node capacity, allocatable resources and huge page sizes
- `qos`: QoS class, aggregated requests and limits, CPU shares and quota, oom_score_adj
- `resize`: in-place pod resize: checkpoints of allocated and actuated resources, resize plans
- `cgroups`: cgroups of the node, the QoS classes and the pods
- `cpu`, `memory`, `devices`: CPU, memory and device manager
- `topology`: topology manager, which aligns the three on NUMA nodes
- `dra`: dynamic resource allocation
- `podresources`: pod-resources API
"""
