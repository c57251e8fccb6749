"""Pod start-up latency and container exits, for upstream's metrics.

The status store reports every new status, the pod history every event, and the engine every pod that the API
server shows. State of a pod is kept until it has started. Two durations are measured:

- from the first observation of a pod to its phase Running; - from its creation until the API server shows all
its containers running: the total, and for stateless pods the SLI, which
  excludes image pulls and init containers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from pykubelet.api.pod import Pod, is_sidecar
from pykubelet.api.pod_status import ContainerStatus, PodStatus
from pykubelet.podconfig.pod_history import Event
from pykubelet.podconfig.static_pods import SEEN_ANNOTATION
from pykubelet.podworkers.metrics import StartedMetrics
from pykubelet.status.compute import TERMINAL

_STATELESS = frozenset({"secret", "configMap", "downwardAPI", "emptyDir", "projected"})
Span = tuple[float, float]


@dataclass(slots=True)
class _Start:
    """State of one pod start."""

    pulling: dict[str, float] = field(default_factory=dict)
    """Start times of running image pulls, by the container's field path."""
    pulls: list[Span] = field(default_factory=list)


class PodStartupLatencyTracker:
    """Tracker of pod start-up latency; its methods do not block."""

    def __init__(self, metrics: StartedMetrics, clock: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._clock = clock
        self._pending: set[str] = set()
        self._starts: dict[str, _Start] = {}
        self._first = True

    def status_changed(self, pod: Pod, status: PodStatus, before: PodStatus | None) -> None:
        """Handle a new status of a pod."""
        self._count_ends(before or pod.status, status)
        if status.phase == "Pending":
            self._pending.add(pod.uid)
        elif pod.uid in self._pending:
            self._pending.remove(pod.uid)
            seen = first_seen(pod)
            if status.phase == "Running" and seen is not None:
                self._metrics.runs(max(0.0, self._clock() - seen))

    def shown(self, pod: Pod) -> None:
        """Handle a pod as the API server shows it."""
        status, start = pod.status, self._starts.get(pod.uid)
        if status.phase in TERMINAL:
            self._starts.pop(pod.uid, None)
        elif start is None and status.start_time is None:
            self._starts[pod.uid] = _Start()
        elif start is not None and has_started(status) and pod.metadata.creation_timestamp is not None:
            del self._starts[pod.uid]
            self._measure(pod, start, self._clock() - pod.metadata.creation_timestamp.timestamp())

    def happened(self, pod: Pod, event: Event) -> None:
        """Handle an event of the pod history, from which pull durations are measured."""
        start = self._starts.get(pod.uid)
        if start is None:
            return
        if event.reason == "Pulling":
            start.pulling[event.where] = self._clock()
        elif event.where in start.pulling and event.reason in ("Pulled", "Failed"):
            start.pulls.append((start.pulling.pop(event.where), self._clock()))

    def forget(self, uid: str) -> None:
        """Drop the state of a removed pod."""
        self._pending.discard(uid)
        self._starts.pop(uid, None)

    def _measure(self, pod: Pod, start: _Start, seconds: float) -> None:
        self._metrics.started(max(0.0, seconds))
        if any(not _STATELESS.intersection(volume.kinds) for volume in pod.spec.volumes):
            return
        own = seconds - covered(start.pulls) - _initialization(pod)
        first = self._first and not pod.spec.host_network
        self._first &= not first
        self._metrics.started_sli(max(0.0, own), first=first)

    def _count_ends(self, before: PodStatus, after: PodStatus) -> None:
        kinds = (
            ("init_container", before.init_container_statuses, after.init_container_statuses),
            ("container", before.container_statuses, after.container_statuses),
            ("ephemeral_container", before.ephemeral_container_statuses, after.ephemeral_container_statuses),
        )
        for kind, old, new in kinds:
            for status in newly_ended(old, new):
                if (end := status.state.terminated) is not None:
                    reason = "" if isinstance(end.reason, msgspec.UnsetType) else end.reason
                    self._metrics.ended(kind, end.exit_code, reason)


def first_seen(pod: Pod) -> float | None:
    """Return when the pod was first observed, in seconds since 1970; None when its annotation is missing."""
    try:
        return datetime.fromisoformat(pod.metadata.annotations.get(SEEN_ANNOTATION, "")).timestamp()
    except ValueError:
        return None


def has_started(status: PodStatus) -> bool:
    """Return whether all ordinary containers of a pod run."""
    found = status.container_statuses
    return bool(found) and all(container.state.running is not None for container in found)


def newly_ended(old: Iterable[ContainerStatus], new: Iterable[ContainerStatus]) -> list[ContainerStatus]:
    """Return the containers that have terminated since the old statuses."""
    ended = [status for status in new if status.state.terminated is not None]
    if not ended:
        return []
    known = {status.name for status in old if status.state.terminated is not None}
    return [status for status in ended if status.name not in known]


def covered(spans: Iterable[Span]) -> float:
    """Return the seconds covered by at least one of the spans."""
    total, upto = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    return total


def _initialization(pod: Pod) -> float:
    """Return the seconds that a pod's init containers ran."""
    sidecars = {container.name for container in pod.spec.init_containers if is_sidecar(container)}
    ends = [
        status.state.terminated
        for status in pod.status.init_container_statuses
        if status.name not in sidecars and status.state.terminated is not None
    ]
    return sum(
        max(0.0, (end.finished_at - end.started_at).total_seconds())
        for end in ends
        if end.started_at is not None and end.finished_at is not None
    )
