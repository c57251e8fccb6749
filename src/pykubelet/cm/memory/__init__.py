"""Memory manager: memory and huge pages of NUMA nodes for Guaranteed containers.

- `numa_nodes`: NUMA nodes of the host, and the memory reserved on each
- `numa_memory`: memory tables, allocation, hints and node selection
- `state`: checkpoint file `memory_manager_state`
- `manager`: the memory manager and its metrics
"""
