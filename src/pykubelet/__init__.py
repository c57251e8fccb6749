"""pykubelet: a complete Kubernetes node agent in Python.

Start reading at `kubelet.py`, which builds every part in the order it starts;
`docs/architecture.md` draws the rooms and a pod's walk through them.
"""

__version__ = "0.1.0"

KUBERNETES_VERSION = "v1.36.0"
"""The release whose behaviour this agent reproduces."""
