"""Rules of in-place resizes: feasibility, order of retries and event texts, all pure; and metrics.

A resize that this node can never grant is Infeasible, and is not retried until its spec changes. One for
which the node has no capacity now is Deferred and retried, in this order: those that request no more than
they have, then by priority, by QoS class (Guaranteed first), and the longest pending first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pykubelet.api.meta import to_document
from pykubelet.api.pod import Container, Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cm.qos import pod_requests, qos_class
from pykubelet.cm.resize import RESIZABLE, Scope, resizable
from pykubelet.kuberuntime.labels import to_go_json

PENDING, IN_PROGRESS = "PodResizePending", "PodResizeInProgress"
"""Condition types of pods."""
DEFERRED, INFEASIBLE, ERROR = "Deferred", "Infeasible", "Error"
"""Condition reasons."""
_ZERO = Quantity.from_units(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRules:
    """Settings of the node that decide whether a pod can be resized at all."""

    scope: Scope = field(default_factory=Scope)
    pod_level: bool = True
    """Whether pod-level resources count (`PodLevelResources`)."""
    static_cpus: bool = False
    """Whether Guaranteed pods may have exclusive CPUs, which are not reassigned."""
    static_memory: bool = False
    """Whether Guaranteed pods have memory of certain NUMA nodes."""
    may_swap: Callable[[Pod, Container], bool] = lambda pod, container: False


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Reason why a resize is infeasible: a message, and a label for the metrics."""

    message: str
    detail: str


def infeasible(desired: Pod, allocated: Pod, rules: ResizeRules) -> Infeasible | None:
    """Return the reason why this node can never grant the desired resources; None if it might."""
    if _would_swap(desired, allocated, rules):
        return Infeasible("In-place resize of containers with swap is not supported.", "swap_limitation")
    if not rules.scope.pod_level and desired.spec.resources != allocated.spec.resources:
        return Infeasible("InPlacePodLevelResourcesVerticalScaling is disabled", "plr_feature_gate_off")
    if qos_class(desired, pod_level=rules.pod_level) == "Guaranteed":
        for static, resource, who, policy in (
            (rules.static_cpus, "cpu", "CPU", "static"),
            (rules.static_memory, "memory", "Memory", "Static"),
        ):
            if static and _requests_differ(desired, allocated, resource, rules.scope):
                return Infeasible(
                    f'Resize is infeasible for Guaranteed Pods alongside {who} Manager policy "{policy}"',
                    f"guaranteed_pod_{who.lower()}_manager_static_policy",
                )
    return None


def urgency(
    desired: Pod, allocated: Pod, waiting_since: datetime | None, *, pod_level: bool = True
) -> tuple[bool, int, bool, bool, float]:
    """Return a sort key of pending resizes; the first in order is evaluated first."""
    return (
        requests_more(desired, allocated, pod_level=pod_level),
        -(desired.spec.priority or 0),
        qos_class(desired, pod_level=pod_level) != "Guaranteed",
        waiting_since is None,
        waiting_since.timestamp() if waiting_since is not None else 0.0,
    )


def requests_more(desired: Pod, allocated: Pod, *, pod_level: bool = True) -> bool:
    """Return whether a pod's desired CPU or memory requests exceed the allocated ones."""
    new, old = pod_requests(desired, pod_level=pod_level), pod_requests(allocated, pod_level=pod_level)
    return any(new.get(name, _ZERO) > old.get(name, _ZERO) for name in RESIZABLE)


def requested_changes(before: Pod, after: Pod, scope: Scope) -> Iterator[tuple[str, str, str]]:
    """Yield the changes of containers' desired resources: resource, requirement and operation."""
    old = {container.name: container.resources for container in resizable(before, scope)}
    for container in resizable(after, scope):
        if (known := old.get(container.name)) is None or known == container.resources:
            continue
        for resource in ("memory", "cpu"):
            for requirement, had, has in (
                ("requests", known.requests, container.resources.requests),
                ("limits", known.limits, container.resources.limits),
            ):
                change = _operation(had.get(resource, _ZERO), has.get(resource, _ZERO))
                if change:
                    yield resource, requirement, change


def summary(prefix: str, pod: Pod, generation: int, error: str = "") -> str:
    """Return an event message with a pod's resources, for users and tools."""

    def listed(containers: list[Container]) -> list[dict[str, Any]]:
        return [{"name": container.name, "resources": _document(container)} for container in containers]

    document: dict[str, Any] = {}
    if pod.spec.init_containers:
        document["initContainers"] = listed(pod.spec.init_containers)
    if pod.spec.containers:
        document["containers"] = listed(pod.spec.containers)
    document["generation"] = generation
    if error:
        document["error"] = error
    return f"{prefix}: {to_go_json(document)}"


def _document(container: Container) -> dict[str, Any]:
    document: dict[str, Any] = to_document(container.resources)
    return {
        key: dict(sorted(value.items())) if isinstance(value, dict) else value
        for key, value in document.items()
    }


def _operation(old: Quantity, new: Quantity) -> str:
    if old == new:
        return ""
    if not new.nanos:
        return "remove"
    if not old.nanos:
        return "add"
    return "increase" if new > old else "decrease"


def _would_swap(desired: Pod, allocated: Pod, rules: ResizeRules) -> bool:
    old = {
        container.name: container
        for container in (*allocated.spec.containers, *allocated.spec.init_containers)
    }
    for new in (*desired.spec.containers, *desired.spec.init_containers):
        had = old.get(new.name)
        if had is None or _memory(new) == _memory(had) or _restarts_for_memory(had):
            continue
        if rules.may_swap(desired, new) or rules.may_swap(allocated, had):
            return True
    return False


def _restarts_for_memory(container: Container) -> bool:
    policy = next((entry for entry in container.resize_policy if entry.resource_name == "memory"), None)
    return policy is not None and policy.restart_policy == "RestartContainer"


def _requests_differ(desired: Pod, allocated: Pod, resource: str, scope: Scope) -> bool:
    old = {container.name: container for container in resizable(allocated, scope)}
    return any(
        container.resources.requests.get(resource, _ZERO)
        != old[container.name].resources.requests.get(resource, _ZERO)
        for container in resizable(desired, scope)
        if container.name in old
    )


def _memory(container: Container) -> Quantity:
    return container.resources.requests.get("memory", _ZERO)


_MILLISECONDS = (
    *(10, 50, 100, 500, 1000, 2000, 5000, 10_000, 20_000, 30_000),
    *(60_000, 120_000, 300_000, 600_000),
)


class ResizeMetrics:
    """Metrics of resizes; without a registry they are not exported."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._requested = Counter(
            "kubelet_container_requested_resizes_total",
            "Requested changes of container resources, counted per resource.",
            ["resource", "requirement", "operation"],
            registry=registry,
        )
        self._duration = Histogram(
            "kubelet_pod_resize_duration_milliseconds",
            "Duration of pod resizes in milliseconds.",
            ["success"],
            buckets=_MILLISECONDS,
            registry=registry,
        )
        self._pending = Gauge(
            "kubelet_pod_pending_resizes",
            "Pods whose resize is deferred or infeasible.",
            ["reason"],
            registry=registry,
        )
        self._infeasible = Counter(
            "kubelet_pod_infeasible_resizes_total",
            "Resizes that this node cannot grant.",
            ["reason_detail"],
            registry=registry,
        )
        self._in_progress = Gauge(
            "kubelet_pod_in_progress_resizes", "Pods that are being resized.", registry=registry
        )
        self._accepted = Counter(
            "kubelet_pod_deferred_accepted_resizes_total",
            "Resizes that were granted after they were deferred, by the trigger of the retry.",
            ["retry_trigger"],
            registry=registry,
        )

    def requested(self, resource: str, requirement: str, operation: str) -> None:
        """Count a requested change."""
        self._requested.labels(resource, requirement, operation).inc()

    def resized(self, seconds: float, *, success: bool) -> None:
        """Record the duration of an attempted resize."""
        self._duration.labels("true" if success else "false").observe(seconds * 1000)

    def infeasible(self, detail: str) -> None:
        """Count an infeasible resize, at each evaluation."""
        self._infeasible.labels(detail).inc()

    def accepted(self, trigger: str) -> None:
        """Count a deferred resize that is granted."""
        self._accepted.labels(trigger).inc()

    def now(self, pending: Iterable[str], in_progress: int) -> None:
        """Set the numbers of pending resizes, by reason, and of resizes in progress."""
        reasons = [reason.lower() for reason in pending]
        self._pending.clear()
        for reason in set(reasons):
            self._pending.labels(reason).set(reasons.count(reason))
        self._in_progress.set(in_progress)
