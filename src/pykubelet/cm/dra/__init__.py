"""Dynamic resource allocation: resource claims of pods and the drivers that prepare them.

- `claims`: claims of a pod and its containers, and the checkpoint file `dra_manager_state`
- `plugins`: registered plugins of DRA drivers, and calls to them
- `manager`: the DRA manager, which prepares and unprepares claims
- `health`: health of prepared devices, and the file `dra_health_state`
- `slices`: deletion of the ResourceSlices of unavailable drivers
- `metrics`: metrics of operations, calls and claims in use
"""
