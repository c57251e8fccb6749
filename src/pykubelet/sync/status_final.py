"""The last status of a pod of which nothing runs any more, and nothing will.

Controllers wait for a pod to end, and act on how it did. So a pod that is over is always said to be
over, Succeeded or Failed, also one that was deleted before it began; and a container of which
nobody knows how it ended is said to have failed, rather than to wait for a start that never comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pykubelet.api.pod import Pod, is_sidecar
from pykubelet.api.pod_status import (
    ContainerState,
    ContainerStateTerminated,
    ContainerStatus,
    PodStatus,
)
from pykubelet.sync.status_containers import LOST
from pykubelet.sync.status_phase import TERMINAL

_MESSAGE = "The container could not be located when the pod was terminated"


def final_status(pod: Pod, status: PodStatus) -> PodStatus:
    """Give the status with which a pod's life on this node ends; the one that was passed stays."""
    ordinary = status.container_statuses
    if _is_initialized(pod, status):
        ordinary = [_ended(container) for container in ordinary]
    init = status.init_container_statuses
    begun = _begun(init)
    return msgspec.structs.replace(
        status,
        phase=status.phase if status.phase in TERMINAL else "Failed",
        container_statuses=ordinary,
        init_container_statuses=[*map(_ended, init[:begun]), *init[begun:]],
    )


def _ended(status: ContainerStatus) -> ContainerStatus:
    if status.state.terminated is not None:
        return status
    lost = ContainerStateTerminated(exit_code=LOST, reason="ContainerStatusUnknown", message=_MESSAGE)
    return msgspec.structs.replace(status, state=ContainerState(terminated=lost))


def _is_initialized(pod: Pod, status: PodStatus) -> bool:
    """Whether the pod ever got as far as its ordinary containers."""
    if not pod.spec.init_containers or any(map(_has_begun, status.container_statuses)):
        return True
    last = next(reversed(status.init_container_statuses), None)
    if last is None or last.name != pod.spec.init_containers[-1].name:
        return False
    if is_sidecar(pod.spec.init_containers[-1]):
        return last.state.running is not None and last.started is True
    ends = (last.state.terminated, last.last_state.terminated)
    return any(end is not None and end.exit_code == 0 for end in ends)


def _has_begun(status: ContainerStatus) -> bool:
    return status.state.waiting is None or status.last_state.terminated is not None


def _begun(statuses: Sequence[ContainerStatus]) -> int:
    """Give how many init containers were tried: up to the last that began, and at least the first."""
    tried = [number for number, status in enumerate(statuses, 1) if _has_begun(status)]
    return tried[-1] if tried else min(1, len(statuses))
