"""Is this configuration one that the agent can run with?

Everything that the reference checks is checked here, at once and before anything starts: also what
it finds out only when a part comes up, such as a malformed threshold. Left out are the checks
behind gates that are locked on in v1.36. One rule is deliberately not kept: `runOnce` may be true.

Each theme is a module of its own with one function `problems`; checks that need the machine are in
`validate_machine`, because a configuration may be checked elsewhere than where it will run.
"""

from __future__ import annotations

from pykubelet.api import cpuset
from pykubelet.config.errors import Problem
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validate_eviction import problems as eviction_problems
from pykubelet.config.validate_managers import problems as manager_problems
from pykubelet.config.validate_pods import problems as pod_problems
from pykubelet.config.validate_reserved import problems as reserved_problems
from pykubelet.config.validate_rules import Gates
from pykubelet.config.validate_serving import problems as serving_problems
from pykubelet.config.validate_tls import problems as tls_problems

_CHECKS = (
    serving_problems,
    tls_problems,
    pod_problems,
    manager_problems,
    reserved_problems,
    eviction_problems,
)


def validate(config: KubeletConfiguration, gate_enabled: Gates) -> list[Problem]:
    """Give everything that is wrong; nothing, when the agent can run with it."""
    return [problem for check in _CHECKS for problem in check(config, gate_enabled)]


def validate_machine(
    config: KubeletConfiguration, *, cgroup_v2: bool, online_cpus: frozenset[int]
) -> list[Problem]:
    """Give what is wrong with a valid configuration on this machine."""
    problems = []
    if config.fail_cgroup_v1 and not cgroup_v2:
        problems.append(
            Problem(
                "failCgroupV1",
                "is true and this machine has cgroup v1: boot with cgroup v2 or set it to false",
            )
        )
    if config.single_process_oom_kill is False and not cgroup_v2:
        problems.append(Problem("singleProcessOOMKill", "cannot be false with cgroup v1: remove it"))
    if config.memory_swap.swap_behavior == "LimitedSwap" and not cgroup_v2:
        problems.append(Problem("memorySwap.swapBehavior", "LimitedSwap needs cgroup v2: use NoSwap"))
    if missing := cpuset.parse(config.reserved_system_cpus) - online_cpus:
        text = f"CPU {cpuset.format(missing)} is not there: this machine has {cpuset.format(online_cpus)}"
        problems.append(Problem("reservedSystemCPUs", text))
    return problems
