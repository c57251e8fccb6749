"""Stages of a pod: one module per concern that a pod has on this node.

The order of the stages is the list in `agent/pod_engine.py`. To add a concern, add a module with a `Stage`
and an entry in that list; `base.py` describes its operations. `sandbox.py` and `containers.py` come after the
list: the executor pulls images while the sandbox is created.
"""
