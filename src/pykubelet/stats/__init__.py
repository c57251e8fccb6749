"""Statistics: resource usage of the node, its pods and their containers.

- `collector`: what is sampled when; `sampler`: samples of one cgroup; `samples`: what they consist of.
- `cgroups`: readers of cgroup v1 and v2; `processes`, `network`: processes and interfaces of a cgroup.
- `storage`: file systems and ephemeral storage; `cri`: the runtime's own statistics; `machine`: the machine.
- `summary`: documents of `/stats/summary`; `exposition`: text of `/metrics/cadvisor` (`cadvisor`) and of
  `/metrics/resource` (`resource_metrics`).
- `cached_call`: results computed at most once per interval; `memory_curve`: memory of the last minutes.
"""
