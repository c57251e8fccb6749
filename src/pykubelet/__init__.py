"""pykubelet: a Kubernetes kubelet in Python.

`agent/kubelet.py` is the composition root: it builds every component in start-up order.
`docs/architecture.md` describes the packages and the path of a pod through them.
"""

__version__ = "0.1.0"

KUBERNETES_VERSION = "v1.36.0"
"""The Kubernetes release whose kubelet behaviour is reproduced."""
