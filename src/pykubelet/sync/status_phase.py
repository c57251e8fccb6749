"""A pod's phase from its containers' statuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.runtime.restart import restarts_after_exit
from pykubelet.sync.status_restart import will_run_again

TERMINAL = ("Succeeded", "Failed")


@dataclass(slots=True)
class _Counts:
    unknown: int = 0
    running: int = 0
    waiting: int = 0
    stopped: int = 0
    stopped_for_good: int = 0
    succeeded: int = 0


def phase_of(
    pod: Pod, statuses: Mapping[str, ContainerStatus], *, terminal: bool, initialized: bool, static: bool
) -> str:
    """Give the phase.

    `initialized` says that an ordinary container is or was active, so that a sidecar that restarts
    does not take the pod back to Pending; `terminal` that nothing will run again.
    """
    init_pending, init_failed = _initialization(pod, statuses)
    sidecars_pending, counts = _sidecars(pod, statuses)
    for container in pod.spec.containers:
        _count(pod, container, statuses.get(container.name), counts)
    if init_failed:
        return "Failed"
    if init_pending or (sidecars_pending and not initialized) or counts.waiting:
        return "Pending"
    if counts.running and not counts.unknown:
        return "Running"
    if not counts.running and counts.stopped and not counts.unknown:
        ended = "Succeeded" if counts.stopped == counts.succeeded else "Failed"
        if terminal and not static:
            return ended
        return ended if counts.stopped == counts.stopped_for_good else "Running"
    return "Pending"


def _initialization(pod: Pod, statuses: Mapping[str, ContainerStatus]) -> tuple[bool, bool]:
    """Whether init containers are still to finish, and whether one failed for good."""
    pending = failed = False
    for container in pod.spec.init_containers:
        if is_sidecar(container):
            continue
        status = statuses.get(container.name)
        code = _exit_code(status)
        if status is None or code is None:
            pending = True
        elif code != 0:
            failed = failed or not (restarts_after_exit(pod, container, code) or will_run_again(status))
    return pending, failed


def _sidecars(pod: Pod, statuses: Mapping[str, ContainerStatus]) -> tuple[bool, _Counts]:
    pending, counts = False, _Counts()
    for container in pod.spec.init_containers:
        if not is_sidecar(container):
            continue
        status = statuses.get(container.name)
        if status is None:
            counts.unknown += 1
        elif status.state.running is not None:
            pending = pending or status.started is not True
            counts.running += 1
        elif _exit_code(status) is None:
            pending = True
            if status.state.waiting is not None:
                counts.waiting += 1
            else:
                counts.unknown += 1
    return pending, counts


def _count(pod: Pod, container: Container, status: ContainerStatus | None, counts: _Counts) -> None:
    if status is None:
        counts.unknown += 1
    elif status.state.running is not None:
        counts.running += 1
    elif (code := _exit_code(status)) is not None:
        counts.stopped += 1
        counts.stopped_for_good += not (restarts_after_exit(pod, container, code) or will_run_again(status))
        counts.succeeded += status.state.terminated is not None and code == 0
    elif status.state.waiting is not None:
        counts.waiting += 1
    else:
        counts.unknown += 1


def _exit_code(status: ContainerStatus | None) -> int | None:
    """How a container that does not run ended last; None when it runs or never ran."""
    if status is None or status.state.running is not None:
        return None
    ended = status.state.terminated
    if ended is None and status.state.waiting is not None:
        ended = status.last_state.terminated
    return None if ended is None else ended.exit_code
