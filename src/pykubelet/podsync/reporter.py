"""Status reports of the pod syncer: computes a pod's status from the observed state and stores it.

Active deadlines (`activeDeadlineSeconds`) are evaluated with every status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pykubelet.api.meta import now as api_now
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus, StatusResources
from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.podsync.contract import PodStatusFunc, PodSyncState
from pykubelet.podsync.resource_allocator import DeviceHealth, no_health
from pykubelet.probes.prober import Prober
from pykubelet.resize.allocation_manager import AllocationManager
from pykubelet.status.compute import TERMINAL, StatusStore, compute_status, final_status
from pykubelet.status.containers import StartFailure, StatusInputs, api_time
from pykubelet.status.patch import status_patch

EXCEEDED = "DeadlineExceeded"
MESSAGE = "Pod was active on the node longer than the specified deadline"


def time_left(pod: Pod, status: PodStatus, state: PodSyncState, now: float, clock: float) -> float | None:
    """Return the seconds until a pod's active deadline, None without one.

    `now` is the loop time, `clock` seconds since 1970. The clock is read once: setting it later has no
    effect.
    """
    if pod.spec.active_deadline_seconds is None or status.start_time is None:
        return None
    if state.began is None:
        state.began = now - max(0.0, clock - status.start_time.timestamp())
    return state.began + pod.spec.active_deadline_seconds - now


def ended_in_time(pod: Pod, status: PodStatus) -> bool:
    """Return whether all containers exited by themselves before the deadline.

    A kubelet that was not running at the deadline observes both later.
    """
    if status.phase not in TERMINAL or status.start_time is None or pod.spec.active_deadline_seconds is None:
        return False
    deadline = status.start_time.timestamp() + pod.spec.active_deadline_seconds
    states = (container.state.terminated for container in status.container_statuses)
    ends = [state.finished_at for state in states if state is not None and state.finished_at]
    return bool(ends) and all(end.timestamp() < deadline for end in ends)


def exceeded(status: PodStatus) -> PodStatus:
    """Return the status of a pod that exceeded its active deadline."""
    return msgspec.structs.replace(status, phase="Failed", reason=EXCEEDED, message=MESSAGE)


def status_before(pod: Pod, observed: ObservedPod) -> PodStatus:
    """Return the status of a pod that an earlier kubelet process started, with its original start time."""
    began = min((sandbox.created_at for sandbox in observed.sandboxes), default=0)
    return msgspec.structs.replace(pod.status, start_time=pod.status.start_time or api_time(began))


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions:
    """Facts about the node and its runtime that appear in pod statuses."""

    runtime_name: str
    host_ips: Sequence[str]
    recursive_handlers: Callable[[], frozenset[str]] = frozenset
    """Returns the runtime handlers that support recursive read-only mounts."""
    stays_initialized: bool = True
    """Whether the condition Initialized stays true while init containers run again."""
    reports_image_volumes: bool = False
    """Whether mounts of images have the image's reference."""
    reports_ready_to_start: bool = True
    """Whether pods have the condition PodReadyToStartContainers."""
    clustered: bool = False
    """Whether an API server gets the statuses."""


def _no_message(image: str) -> str:
    return ""


class StatusReporter:
    """Computes and stores the status of pods."""

    def __init__(
        self,
        options: StatusOptions,
        prober: Prober,
        statuses: StatusStore,
        allocation: AllocationManager,
        cgroups: PodCgroups,
        history: PodHistory,
        device_health: Callable[[Pod], DeviceHealth] = no_health,
        clock: Callable[[], float] = time.time,
        pull_message: Callable[[str], str] = _no_message,
    ) -> None:
        """Initialize; `pull_message` returns the message of containers that wait for an image, or ""."""
        self._options = options
        self._prober = prober
        self._statuses = statuses
        self._allocation = allocation
        self._cgroups = cgroups
        self._history = history
        self._device_health = device_health
        self._clock = clock
        self._pull_message = pull_message

    def forget(self, uid: str) -> None:
        """Drop the status of a pod."""
        self._statuses.forget(uid)

    def time_left(self, pod: Pod, status: PodStatus, state: PodSyncState) -> float | None:
        """Return the seconds until a pod's active deadline, None without one."""
        return time_left(pod, status, state, asyncio.get_running_loop().time(), self._clock())

    def report(
        self,
        pod: Pod,
        observed: ObservedPod,
        state: PodSyncState,
        *,
        terminal: bool = False,
        override: PodStatusFunc | None = None,
    ) -> PodStatus:
        """Compute the status of a pod, store it and return it.

        `terminal`: no container runs and none will; `override` sets the status of a pod that the kubelet
        kills.
        """
        self._prober.add_pod(pod)
        self._prober.observe(pod, observed)
        for container in observed.running:
            state.failures.pop(container.name, None)
        previous = self._statuses.get(pod.uid) or status_before(pod, observed)
        view = StatusInputs(
            pod=pod,
            observed=observed,
            previous=previous,
            failures=self._shown_failures(state),
            health=self._prober.update_status(pod, observed),
            terminal=terminal,
            host_ips=self._options.host_ips,
            runtime_name=self._options.runtime_name,
            recursive_handlers=self._options.recursive_handlers(),
            stays_initialized=self._options.stays_initialized,
            reports_image_volumes=self._options.reports_image_volumes,
            reports_ready_to_start=self._options.reports_ready_to_start,
            resizes=self._allocation.status_conditions(pod.uid),
            actuated=self._allocation.actuated(pod.uid),
            in_force=self._in_force(pod, previous),
            device_health=self._device_health(pod),
            pull_messages=self._pull_messages(pod),
        )
        status = compute_status(view, api_now())
        if view.in_force is not None and status_patch(previous, status).keys() == {"resources"}:
            # Not reported on its own: the next status contains it.
            status.resources = previous.resources
        if previous.phase not in TERMINAL:
            status = self._past_deadline(pod, status, state)
            status = override(status) if override is not None else status
        if terminal and not is_static_pod(pod):
            status = final_status(pod, status)
        before = view.previous.phase
        if self._statuses.set(pod, status) and status.phase != before:
            self._history.note(pod.uid, "status", f"{before or 'new'} → {status.phase}")
        return status

    def _pull_messages(self, pod: Pod) -> dict[str, str]:
        spec = pod.spec
        containers = (*spec.init_containers, *spec.containers, *spec.ephemeral_containers)
        found = {container.name: self._pull_message(container.image) for container in containers}
        return {name: message for name, message in found.items() if message}

    def _past_deadline(self, pod: Pod, status: PodStatus, state: PodSyncState) -> PodStatus:
        """Return the status of a pod, Failed when the pod has exceeded activeDeadlineSeconds."""
        left = self.time_left(pod, status, state)
        if left is None or left > 0 or ended_in_time(pod, status):
            return status
        self._history.event(pod, "Normal", EXCEEDED, MESSAGE)
        return exceeded(status)

    def _shown_failures(self, state: PodSyncState) -> dict[str, StartFailure]:
        """Return why containers wait; in a cluster a crash is reported first, then its back-off.

        Upstream does the same. A standalone node reports the back-off immediately.
        """
        if not self._options.clustered:
            return state.failures
        return {
            name: failure for name, failure in state.failures.items() if name not in state.unreported_failures
        }

    def _in_force(self, pod: Pod, previous: PodStatus) -> StatusResources | None:
        """Return the enforced resources of a running pod of the API server; they stay after its end."""
        if previous.phase in TERMINAL:
            return previous.resources
        if previous.phase != "Running" or is_static_pod(pod):
            return None
        found = self._cgroups.in_force(pod, self._allocation.settings(pod))
        return StatusResources(limits=found[0], requests=found[1]) if found is not None else None
