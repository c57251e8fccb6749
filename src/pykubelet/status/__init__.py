"""Pod status: computed from the runtime's state and the probes, merged with the API server's, and reported.

- `compute`: status of a pod, its phase and conditions, final and rejected statuses, and the status store.
- `containers`: statuses of containers, their resources, and the condition AllContainersRestarting.
- `patch`: merge with the status in the API server, and the strategic merge patch.
- `manager`: status manager, which sends the patches and deletes terminated pods.
- `mirror_pods`: mirror pods of static pods.
- `static_readiness`: readiness of static pods, kept across kubelet restarts.
"""
