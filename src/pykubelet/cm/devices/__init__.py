"""Device manager: device plugins, their devices, and the allocations to containers.

- `plugins`: registration of device plugins, calls to them, and their metrics
- `registry`: devices by resource, and their allocations, in memory
- `selection`: selection of devices, topology hints, and merging of Allocate responses
- `run_options`: device nodes, mounts and environment that devices add to a container
- `checkpoint`: checkpoint file `kubelet_internal_checkpoint`
- `manager`: the device manager
"""
