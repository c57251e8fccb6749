"""Conversion of requests and limits to CRI's Linux resources: shares, quotas, bytes, OOM scores.

The runtime writes them into the cgroups of a container. The pod's cgroup is managed by the `cm` package with
the same conversions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Container, Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cm.capacity import kernel_size, page_size
from pykubelet.cm.qos import (
    has_pod_level_resources,
    oom_score_adj,
    pod_limits,
    pod_requests,
    qos_class,
    quota_of,
    shares_of,
)
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.kuberuntime.configuration.options import (
    RunContainerOptions,
    RunSandboxOptions,
    RuntimeNodeOptions,
)
from pykubelet.podconfig.static_pods import is_critical_pod

_NOTHING = Quantity.from_units(0)
_UNLIMITED = -1


def container_resources(
    pod: Pod, container: Container, options: RunContainerOptions
) -> cri.LinuxContainerResources:
    """Return the Linux resources of one container."""
    node = options.node
    resources = container.resources
    message = _cpu_and_memory(
        resources.requests.get("cpu"),
        _limit("cpu", pod, container, node),
        _limit("memory", pod, container, node),
        node,
        unlimited_cpu=options.cpuset.exclusive,
    )
    message.oom_score_adj = oom_score_adj(pod, container, node.memory_capacity, pod_level=node.pod_level)
    message.hugepage_limits.extend(_huge_pages(pod, container, node))
    message.cpuset_cpus = options.cpuset.cpus
    message.cpuset_mems = options.cpuset.memory_nodes
    _bound_swap(message, pod, container, node)
    if node.cgroup_v2 and node.gates.enabled("MemoryQoS"):
        message.unified.update(_memory_qos(pod, container, node))
    return message


def sandbox_resources(pod: Pod, options: RunSandboxOptions) -> cri.LinuxContainerResources:
    """Return the sum of the containers' resources, for runtimes that run pods in virtual machines."""
    node = options.node
    limits = pod_limits(pod, overhead=False, pod_level=node.pod_level)
    return _cpu_and_memory(
        pod_requests(pod, overhead=False, pod_level=node.pod_level).get("cpu"),
        limits.get("cpu", _NOTHING),
        limits.get("memory", _NOTHING),
        node,
        unlimited_cpu=options.exclusive_cpus,
    )


def overhead_resources(pod: Pod, node: RuntimeNodeOptions) -> cri.LinuxContainerResources:
    """Return the pod overhead of the RuntimeClass; empty when it has none."""
    overhead = pod.spec.overhead
    if not overhead:
        return cri.LinuxContainerResources()
    cpu = overhead.get("cpu", _NOTHING)
    return _cpu_and_memory(cpu, cpu, overhead.get("memory", _NOTHING), node)


def can_swap(pod: Pod, container: Container, node: RuntimeNodeOptions) -> bool:
    """Return whether a container may use swap on this node."""
    return node.cgroup_v2 and node.swap_controller and _may_swap(pod, container, node)


def huge_page_size(resource: str) -> str | None:
    """Return the page size of a resource as the kernel writes it: `hugepages-2Mi` is `2MB`.

    None when the resource is not a huge page size.
    """
    size = page_size(resource)
    return kernel_size(size) if size is not None else None


def _cpu_and_memory(
    cpu_request: Quantity | None,
    cpu_limit: Quantity,
    memory_limit: Quantity,
    node: RuntimeNodeOptions,
    *,
    unlimited_cpu: bool = False,
) -> cri.LinuxContainerResources:
    # Without a request, the limit is the request.
    effective_request = cpu_limit if cpu_request is None else cpu_request
    message = cri.LinuxContainerResources(
        cpu_shares=shares_of(effective_request.milli), memory_limit_in_bytes=int(memory_limit)
    )
    if node.cpu_quota:
        exclusive = unlimited_cpu and node.gates.enabled("DisableCPUQuotaWithExclusiveCPUs")
        message.cpu_period = node.quota_period
        message.cpu_quota = _UNLIMITED if exclusive else quota_of(cpu_limit.milli, node.quota_period)
    if node.cgroup_v2 and not node.single_process_oom_kill:
        message.unified["memory.oom.group"] = "1"
    return message


def _limit(name: str, pod: Pod, container: Container, node: RuntimeNodeOptions) -> Quantity:
    limit = container.resources.limits.get(name, _NOTHING)
    if limit.nanos or pod.spec.resources is None or not node.pod_level:
        return limit
    return pod.spec.resources.limits.get(name, _NOTHING)


def _huge_pages(pod: Pod, container: Container, node: RuntimeNodeOptions) -> list[cri.HugepageLimit]:
    """Return a limit for every page size of the host; 0 for sizes without a limit in the spec."""
    limits: dict[str, int] = {}
    if node.pod_level and pod.spec.resources is not None and has_pod_level_resources(pod):
        limits |= _page_limits(pod.spec.resources.limits)
    limits |= _page_limits(container.resources.limits)
    return [cri.HugepageLimit(page_size=size, limit=limits.get(size, 0)) for size in node.huge_page_sizes]


def _page_limits(amounts: Resources) -> dict[str, int]:
    sizes = ((huge_page_size(name), amount) for name, amount in amounts.items())
    return {size: int(amount) for size, amount in sizes if size is not None}


def _bound_swap(
    message: cri.LinuxContainerResources, pod: Pod, container: Container, node: RuntimeNodeOptions
) -> None:
    if not node.swap_controller:
        return
    if node.cgroup_v2:
        allowed = _swap_share(container, node) if _may_swap(pod, container, node) else 0
        message.unified["memory.swap.max"] = str(allowed)
    else:
        # On cgroup v1 the limit is the sum of memory and swap, so this allows no swap.
        message.memory_swap_limit_in_bytes = message.memory_limit_in_bytes


def _may_swap(pod: Pod, container: Container, node: RuntimeNodeOptions) -> bool:
    """Return whether a container gets swap: in a Burstable pod, if memory request and limit differ."""
    if node.swap_behavior != "LimitedSwap" or not node.gates.enabled("NodeSwap") or is_critical_pod(pod):
        return False
    request = container.resources.requests.get("memory", _NOTHING)
    limit = container.resources.limits.get("memory", _NOTHING)
    return qos_class(pod, pod_level=node.pod_level) == "Burstable" and request != limit


def _swap_share(container: Container, node: RuntimeNodeOptions) -> int:
    """Return the container's swap in bytes: proportional to its memory request."""
    request = int(container.resources.requests.get("memory", _NOTHING))
    if request > node.memory_capacity:
        return 0
    # In floating point as upstream, so that both yield the same number of bytes.
    return int(request / max(node.memory_capacity, 1) * node.swap_capacity)


def _memory_qos(pod: Pod, container: Container, node: RuntimeNodeOptions) -> Mapping[str, str]:
    """Return memory.min, memory.low and memory.high, which protect requests and throttle before OOM."""
    request = int(container.resources.requests.get("memory", _NOTHING))
    limit = int(container.resources.limits.get("memory", _NOTHING))
    if request and node.memory_reservation_policy == "TieredReservation":
        guaranteed = qos_class(pod, pod_level=node.pod_level) == "Guaranteed"
        unified = {"memory.min" if guaranteed else "memory.low": str(request)}
    else:
        unified = {"memory.min": "0", "memory.low": "0"}
    ceiling = limit or node.unreserved_memory
    if request != limit and ceiling:
        bytes_high = request + (ceiling - request) * node.memory_throttling_factor
        high = math.floor(bytes_high / node.page_size) * node.page_size
        if high > request:
            unified["memory.high"] = str(high)
    return unified
