"""CPU manager: exclusive CPUs of Guaranteed containers, and the shared pool.

- `topology`: cores, caches, NUMA nodes and sockets of the host's CPUs
- `state`: allocated CPUs and their checkpoint file `cpu_manager_state`
- `policy`: static policy: which containers get exclusive CPUs, and which CPUs
- `manager`: the CPU manager and its metrics
"""
