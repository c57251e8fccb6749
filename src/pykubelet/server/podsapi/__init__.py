"""Pods API: pods and their statuses over gRPC, for clients on the node (feature gate PodsAPI)."""
