"""What a pod is promised and allowed as a whole, and what that means to the kernel.

Requests and limits are written per container; cgroups, admission, eviction and the OOM killer want
them per pod. The sums follow the API's own rules (`pods/defaults.py` adds up the containers), so
that the scheduler's account of a node and the node's own agree; values set for the whole pod
replace the sums. Everything here is a pure function of the pod.

`pod_level` says whether values of the whole pod (`spec.resources`) count: the gate
`PodLevelResources`.
"""

from __future__ import annotations

from typing import Literal

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Container, Pod
from pykubelet.api.quantity import Quantity
from pykubelet.podconfig.defaults import container_total
from pykubelet.podconfig.static_pods import is_critical_pod

QOSClass = Literal["Guaranteed", "Burstable", "BestEffort"]
HUGE_PAGES_PREFIX = "hugepages-"
MIN_SHARES = 2
MAX_SHARES = 262144
SHARES_PER_CPU = 1024
DEFAULT_PERIOD = 100_000
"""Microseconds over which a cpu quota is measured."""
MIN_QUOTA = 1_000
"""The kernel takes no quota below a millisecond."""
GUARANTEED_OOM_SCORE_ADJ = -997
BEST_EFFORT_OOM_SCORE_ADJ = 1000

# A burstable container stays above a guaranteed one that uses all of the machine's memory.
_LOWEST_BURSTABLE = 1000 + GUARANTEED_OOM_SCORE_ADJ
_COMPUTE = ("cpu", "memory")
_NOTHING = Quantity.of(0)


def qos_class(pod: Pod, *, pod_level: bool = True) -> QOSClass:
    """Give the pod's class: the one its status already has, for that never changes, or the computed one."""
    match pod.status.qos_class:
        case "Guaranteed" | "Burstable" | "BestEffort" as known:
            return known
    return compute_qos_class(pod, pod_level=pod_level)


def compute_qos_class(pod: Pod, *, pod_level: bool = True) -> QOSClass:
    """Derive the class from cpu and memory of the whole pod, or else of its containers.

    Ephemeral containers do not count: they have no resources.
    """
    if pod_level and pod.spec.resources is not None:
        parts = [pod.spec.resources]
    else:
        parts = [container.resources for container in (*pod.spec.containers, *pod.spec.init_containers)]
    requests = [_positive(part.requests) for part in parts]
    limits = [_positive(part.limits) for part in parts]
    if not any(requests) and not any(limits):
        return "BestEffort"
    bounded = all(len(limit) == len(_COMPUTE) for limit in limits)
    return "Guaranteed" if bounded and _totals(requests) == _totals(limits) else "Burstable"


def pod_requests(pod: Pod, *, overhead: bool = True, pod_level: bool = True) -> Resources:
    """Give what the pod is promised, with the runtime's overhead unless told otherwise."""
    total = container_total(pod.spec, "requests")
    if pod_level and pod.spec.resources is not None:
        total |= _pod_level(pod.spec.resources.requests)
    if overhead:
        for name, amount in pod.spec.overhead.items():
            total[name] = _plus(total.get(name, _NOTHING), amount)
    return total


def pod_limits(pod: Pod, *, overhead: bool = True, pod_level: bool = True) -> Resources:
    """Give the sum of what the pod's containers may use; what none of them bounds is absent.

    A container without a limit does not unbound the sum: where it matters, see whether each has one.
    """
    total = container_total(pod.spec, "limits")
    if pod_level and pod.spec.resources is not None:
        total |= _pod_level(pod.spec.resources.limits)
    if overhead:
        for name, amount in pod.spec.overhead.items():
            if total.get(name, _NOTHING).nanos:
                total[name] = _plus(total[name], amount)
    return total


def has_pod_level_resources(pod: Pod) -> bool:
    """Whether anything was written for the whole pod that the node knows how to enforce."""
    resources = pod.spec.resources
    return resources is not None and bool(_pod_level(resources.requests) or _pod_level(resources.limits))


def oom_score_adj(pod: Pod, container: Container, memory_capacity: int, *, pod_level: bool = True) -> int:
    """Say how soon the kernel shall kill a container's processes when memory (bytes) runs out.

    A burstable container that stays within its request is spared before others: the request, as
    thousandths of the machine's memory, lowers the score by what using it raises it.
    """
    if is_critical_pod(pod) and pod.spec.priority_class_name == "system-node-critical":
        return GUARANTEED_OOM_SCORE_ADJ
    match qos_class(pod, pod_level=pod_level):
        case "Guaranteed":
            return GUARANTEED_OOM_SCORE_ADJ
        case "BestEffort":
            return BEST_EFFORT_OOM_SCORE_ADJ
    request = _memory(container)
    if _is_sidecar_of(pod, container) and pod.spec.containers:
        # A sidecar must not die before the containers that it serves.
        request = max(request, min(_memory(served) for served in pod.spec.containers))
    if pod_level:
        request += _unassigned_memory(pod)
    score = 1000 - 1000 * request // max(memory_capacity, 1)
    return max(_LOWEST_BURSTABLE, min(score, BEST_EFFORT_OOM_SCORE_ADJ - 1))


def shares_of(milli_cpu: int) -> int:
    """Give the cpu shares of a request in thousandths of a cpu, within the kernel's bounds."""
    return max(MIN_SHARES, min(milli_cpu * SHARES_PER_CPU // 1000, MAX_SHARES))


def quota_of(milli_cpu: int, period: int = DEFAULT_PERIOD) -> int:
    """Give the microseconds of cpu per period of a limit in thousandths of a cpu; 0 means unbounded."""
    return max(MIN_QUOTA, milli_cpu * period // 1000) if milli_cpu else 0


def milli_cpu_of_shares(shares: int) -> int:
    """Give the request that these shares stand for, rounded up; shares below the minimum are none."""
    return -(-shares * 1000 // SHARES_PER_CPU) if shares >= MIN_SHARES else 0


def milli_cpu_of_quota(quota: int, period: int) -> int:
    """Give the limit that a quota and its period stand for; 0 when unbounded."""
    return quota * 1000 // period if quota > 0 and period > 0 else 0


def _positive(amounts: Resources) -> dict[str, int]:
    return {name: amounts[name].nanos for name in _COMPUTE if name in amounts and amounts[name].nanos > 0}


def _totals(parts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(part.get(name, 0) for part in parts) for name in _COMPUTE}


def _pod_level(amounts: Resources) -> Resources:
    """Keep what may be written for a whole pod."""
    return {
        name: amount
        for name, amount in amounts.items()
        if name in _COMPUTE or name.startswith(HUGE_PAGES_PREFIX)
    }


def _plus(one: Quantity, other: Quantity) -> Quantity:
    return Quantity(one.nanos + other.nanos, one.notation if one.nanos else other.notation)


def _is_sidecar_of(pod: Pod, container: Container) -> bool:
    return container.restart_policy == "Always" and any(
        init.name == container.name for init in pod.spec.init_containers
    )


def _memory(container: Container) -> int:
    return int(container.resources.requests.get("memory", _NOTHING))


def _unassigned_memory(pod: Pod) -> int:
    """Give each container's part of the memory that the pod asked for beyond its containers."""
    resources = pod.spec.resources
    whole = int(resources.requests.get("memory", _NOTHING)) if resources is not None else 0
    if not whole:
        return 0
    assigned = int(container_total(pod.spec, "requests").get("memory", _NOTHING))
    return max(0, whole - assigned) // max(1, len(pod.spec.containers) + len(pod.spec.init_containers))
