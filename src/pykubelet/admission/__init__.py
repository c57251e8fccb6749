"""Pod admission: a chain of handlers, the first rejection of which becomes the pod's final status.

- `handler.py`: the interface of an admission handler, its input and its results.
- `handler_chain.py`: the chain of built-in and installed handlers.
- `node_support.py`: handlers for features that the node, its kernel or its runtime may not support.
- `predicates.py`: resources, node affinity, host ports and taints, and preemption for critical pods.
"""
