"""Types that the pod workers and the pod syncer share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.kuberuntime.observed import ObservedPod, PodStates
from pykubelet.status.containers import StartFailure

Outcome = tuple[bool, float | None]
"""Whether the pod is finished, and the seconds until the next sync (None: the resync period)."""
PodStatusFunc = Callable[[PodStatus], PodStatus]
"""Returns the status of a pod that the kubelet kills, from the status that its containers have."""


@dataclass(frozen=True, slots=True)
class KillPodOptions:
    """Options of a pod's termination."""

    grace: int | None = None
    """Grace period in seconds; None for an orphan, whose containers' labels have it."""
    pod_status: PodStatusFunc | None = None
    """Sets phase, reason, message and conditions of a pod that the kubelet evicts, preempts or shuts down.

    Ignored when the pod has reached a terminal phase before.
    """


@dataclass(slots=True)
class Remnants:
    """Containers, sandboxes, logs and directory of a finished pod that nothing refers to any more."""

    uid: str
    pod: Pod | None = None
    observed: ObservedPod | None = None
    """State in the runtime; None when it has to be queried."""
    stopped: set[str] = field(default_factory=set)
    """Ids of the sandboxes that have been stopped."""


class SyncError(Exception):
    """Raised when a step fails for a reason that has been reported; the worker retries it.

    `retry_after`: seconds until a retry can succeed; None when that is not known.
    """

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class PodRejected(SyncError):
    """Raised when an admitted pod cannot run on this node; it fails with this reason and message."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class StartDelayed(SyncError):
    """Raised when a pod must not start yet; its containers wait with this reason and message."""

    def __init__(self, reason: str, message: str, retry_after: float) -> None:
        super().__init__(message, retry_after)
        self.reason = reason
        self.message = message


class PodSyncer(Protocol):
    """Steps of a pod worker; each may be repeated and cancelled."""

    async def sync(self, pod: Pod, *, resync: bool = False) -> Outcome:
        """Bring the pod closer to its desired state; `resync`: no change caused it, only the time.

        Return whether the pod is finished for good, and the seconds until the next sync at the latest.
        """
        ...

    async def terminate(self, uid: str, pod: Pod | None, options: KillPodOptions) -> None:
        """Stop all containers of the pod."""
        ...

    async def clean_up(self, uid: str, pod: Pod | None) -> Remnants | None:
        """Release volumes and cgroup, and complete the deletion of a pod that is being deleted.

        Return the remnants of a deleted pod; None while the pod stays known.
        """
        ...

    async def remove(self, remnants: Remnants) -> None:
        """Remove what is left of a finished pod in the runtime and on disk."""
        ...


What = Literal["started", "ended", "oom", "unknown"]


class PodLifecycleEvent(NamedTuple):
    """Change of a pod in the runtime."""

    uid: str
    container_id: str = ""
    """Id of the container or sandbox; empty when only the pod is known."""
    what: What = "unknown"
    states: PodStates | None = None
    """State of the whole pod, where a relist has found it changed; None when the pod is gone."""


@dataclass(slots=True)
class PodSyncState:
    """State of a pod between syncs."""

    order: int
    """Rank of the pod by age: older pods start first."""
    failures: dict[str, StartFailure] = field(default_factory=dict)
    delayed: frozenset[str] = frozenset()
    """Containers in `failures` whose start the last sync has delayed (`StartDelayed`)."""
    unreported_failures: set[str] = field(default_factory=set)
    """Containers that entered crash-loop back-off in the last sync; the next status reports it."""
    restart_requested: set[str] = field(default_factory=set)
    observed: ObservedPod | None = None
    observed_at: float = 0.0
    """Loop time at which `observed` was complete."""
    mounted: bool = False
    """Whether the last sync mounted the pod's volumes, which also updates them."""
    current: bool = False
    """Whether `observed` is current: nothing was done to the pod since."""
    ended: set[str] = field(default_factory=set)
    """Containers and sandboxes that exited according to an event; CRI may not report it yet."""
    busy: bool = False
    """Whether a sync is in progress."""
    late: list[PodLifecycleEvent] = field(default_factory=list)
    """Runtime events that arrived during the sync."""
    ends: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By container name: id of the container that exited last, and the loop time of its exit."""
    began: float | None = None
    """Loop time at which the pod's active deadline started."""
    stopped: set[str] = field(default_factory=set)
    """Ids of sandboxes that were stopped, with their network."""
