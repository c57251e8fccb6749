"""Pod-resources API: CPUs, memory and devices of containers, for monitoring agents.

- `server`: the gRPC service on `pod-resources/kubelet.sock`, and its metrics
"""
