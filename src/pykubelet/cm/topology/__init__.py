"""Topology manager: hints of the resource managers and the NUMA nodes they agree on.

- `hints`: hint providers, hints, and their merging under a policy
- `manager`: the topology manager, and metrics of admission and alignment
"""
