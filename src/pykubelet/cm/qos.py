"""QoS class, aggregated requests and limits of a pod, and the kernel values derived from them.

Requests and limits are specified per container; cgroups, admission, eviction and the OOM killer need them per
pod. The sums follow the API's rules (`podconfig/defaults.py` sums the containers), so that the scheduler and
the node account for the same amounts; pod-level resources replace the sums. All functions are pure functions
of the pod.

`pod_level` is whether pod-level resources (`spec.resources`) count: feature gate `PodLevelResources`.
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
"""Microseconds over which a CPU quota is measured."""
MIN_QUOTA = 1_000
"""Microseconds; the kernel rejects a quota below one millisecond."""
GUARANTEED_OOM_SCORE_ADJ = -997
BEST_EFFORT_OOM_SCORE_ADJ = 1000

# A Burstable container never scores below a Guaranteed one that uses all memory of the host.
_LOWEST_BURSTABLE = 1000 + GUARANTEED_OOM_SCORE_ADJ
_COMPUTE = ("cpu", "memory")
_ZERO = Quantity.from_units(0)


def qos_class(pod: Pod, *, pod_level: bool = True) -> QOSClass:
    """Return the QoS class in the pod's status, which never changes, or else the computed one."""
    match pod.status.qos_class:
        case "Guaranteed" | "Burstable" | "BestEffort" as known:
            return known
    return compute_qos_class(pod, pod_level=pod_level)


def compute_qos_class(pod: Pod, *, pod_level: bool = True) -> QOSClass:
    """Compute the QoS class from pod-level CPU and memory, or else from those of the containers.

    Ephemeral containers do not count: they have no resources.
    """
    if pod_level and pod.spec.resources is not None:
        resources = [pod.spec.resources]
    else:
        resources = [container.resources for container in (*pod.spec.containers, *pod.spec.init_containers)]
    requests = [_positive(requirements.requests) for requirements in resources]
    limits = [_positive(requirements.limits) for requirements in resources]
    if not any(requests) and not any(limits):
        return "BestEffort"
    bounded = all(len(limit) == len(_COMPUTE) for limit in limits)
    return "Guaranteed" if bounded and _totals(requests) == _totals(limits) else "Burstable"


def pod_requests(
    pod: Pod, *, overhead: bool = True, pod_level: bool = True, claims: bool = False
) -> Resources:
    """Return the total requests of a pod, by default including the runtime's overhead.

    `claims` includes the resources of the node that its resource claims use.
    """
    total = container_total(pod.spec, "requests")
    for status in pod.status.node_allocatable_resource_claim_statuses if claims else ():
        for name, amount in status.resources.items():
            total[name] = _plus(total.get(name, _ZERO), amount)
    if pod_level and pod.spec.resources is not None:
        total |= _pod_level(pod.spec.resources.requests)
    if overhead:
        for name, amount in pod.spec.overhead.items():
            total[name] = _plus(total.get(name, _ZERO), amount)
    return total


def pod_limits(pod: Pod, *, overhead: bool = True, pod_level: bool = True) -> Resources:
    """Return the total limits of a pod; resources that no container limits are absent.

    A container without a limit does not make the sum unlimited: callers that need an upper bound must check
    that every container has a limit.
    """
    total = container_total(pod.spec, "limits")
    if pod_level and pod.spec.resources is not None:
        total |= _pod_level(pod.spec.resources.limits)
    if overhead:
        for name, amount in pod.spec.overhead.items():
            if total.get(name, _ZERO).nanos:
                total[name] = _plus(total[name], amount)
    return total


def has_pod_level_resources(pod: Pod) -> bool:
    """Return whether the pod sets pod-level resources that the node can enforce."""
    resources = pod.spec.resources
    return resources is not None and bool(_pod_level(resources.requests) or _pod_level(resources.limits))


def declared_limit(pod: Pod, resource: str, *, pod_level: bool = True) -> Quantity | None:
    """Return the pod's limit if it is set at pod level or for every container, else None.

    A sum over containers would also limit a container that has no limit.
    """
    pod_resources = pod.spec.resources if pod_level and has_pod_level_resources(pod) else None
    if pod_resources is None or not pod_resources.limits.get(resource, _ZERO).nanos:
        containers = (*pod.spec.containers, *pod.spec.init_containers)
        if not all(container.resources.limits.get(resource, _ZERO).nanos for container in containers):
            return None
    limit = pod_limits(pod, pod_level=pod_level).get(resource, _ZERO)
    return limit if limit.nanos else None


def oom_score_adj(pod: Pod, container: Container, memory_capacity: int, *, pod_level: bool = True) -> int:
    """Return the oom_score_adj of a container's processes; `memory_capacity` is in bytes.

    The memory request of a Burstable container, in thousandths of the host's memory, lowers the score by as
    much as using that memory raises it, so that containers within their request are killed last.
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
        # A sidecar must not be killed before the containers that it serves.
        request = max(request, min(_memory(served) for served in pod.spec.containers))
    if pod_level:
        request += _unassigned_memory(pod)
    score = 1000 - 1000 * request // max(memory_capacity, 1)
    return max(_LOWEST_BURSTABLE, min(score, BEST_EFFORT_OOM_SCORE_ADJ - 1))


def shares_of(milli_cpu: int) -> int:
    """Return the CPU shares for a request in millicores, clamped to the kernel's bounds."""
    return max(MIN_SHARES, min(milli_cpu * SHARES_PER_CPU // 1000, MAX_SHARES))


def quota_of(milli_cpu: int, period: int = DEFAULT_PERIOD) -> int:
    """Return the quota in microseconds per period for a limit in millicores; 0 is unlimited."""
    return max(MIN_QUOTA, milli_cpu * period // 1000) if milli_cpu else 0


def milli_cpu_of_shares(shares: int) -> int:
    """Return the request in millicores for CPU shares, rounded up; 0 for shares below the minimum."""
    return -(-shares * 1000 // SHARES_PER_CPU) if shares >= MIN_SHARES else 0


def milli_cpu_of_quota(quota: int, period: int) -> int:
    """Return the limit in millicores for a quota and its period; 0 is unlimited."""
    return quota * 1000 // period if quota > 0 and period > 0 else 0


def _positive(amounts: Resources) -> dict[str, int]:
    return {name: amounts[name].nanos for name in _COMPUTE if name in amounts and amounts[name].nanos > 0}


def _totals(amounts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(entry.get(name, 0) for entry in amounts) for name in _COMPUTE}


def _pod_level(amounts: Resources) -> Resources:
    """Return only the resources that are supported at pod level."""
    return {
        name: amount
        for name, amount in amounts.items()
        if name in _COMPUTE or name.startswith(HUGE_PAGES_PREFIX)
    }


def _plus(left: Quantity, right: Quantity) -> Quantity:
    return Quantity(left.nanos + right.nanos, left.notation if left.nanos else right.notation)


def _is_sidecar_of(pod: Pod, container: Container) -> bool:
    return container.restart_policy == "Always" and any(
        init.name == container.name for init in pod.spec.init_containers
    )


def _memory(container: Container) -> int:
    return int(container.resources.requests.get("memory", _ZERO))


def _unassigned_memory(pod: Pod) -> int:
    """Return each container's equal part, in bytes, of the pod-level request that exceeds the containers'."""
    resources = pod.spec.resources
    pod_request = int(resources.requests.get("memory", _ZERO)) if resources is not None else 0
    if not pod_request:
        return 0
    assigned = int(container_total(pod.spec, "requests").get("memory", _ZERO))
    return max(0, pod_request - assigned) // max(1, len(pod.spec.containers) + len(pod.spec.init_containers))
