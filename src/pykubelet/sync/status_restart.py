"""What a pod's status says while all of its containers restart in place.

The condition `AllContainersRestarting` is true from the end of the container that asked for it until
no trace of the old containers is left, and it is what the restart is decided by: a pod that was said
to restart goes on with that, also under an agent that did not see how it began. Pods that are being
deleted or are over do not restart.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import (
    ContainerState,
    ContainerStateTerminated,
    ContainerStateWaiting,
    ContainerStatus,
    PodCondition,
    PodStatus,
)
from pykubelet.runtime.observed import ObservedPod
from pykubelet.runtime.reset import is_reset, reasons_of
from pykubelet.runtime.restart import may_restart_all

KIND = "AllContainersRestarting"
REASON = "RestartingAllContainers"
"""Why a container that was removed for this waits, and how its last run is said to have ended."""
_MESSAGE = "The container is removed because RestartAllContainers in place"


def says_restarting(status: PodStatus) -> bool:
    """Whether the status says that all containers restart."""
    return any(condition.type == KIND and condition.status == "True" for condition in status.conditions)


def is_restarting(pod: Pod, observed: ObservedPod, previous: PodStatus, *, terminal: bool) -> bool:
    """Whether the pod's containers all restart: it was said, or one of them has ended in such a way."""
    if terminal or pod.metadata.deletion_timestamp is not None or not may_restart_all(pod.spec):
        return False
    return says_restarting(previous) or bool(reasons_of(pod, observed))


def restart_condition(
    pod: Pod, observed: ObservedPod, previous: PodStatus, phase: str, *, terminal: bool, now: datetime
) -> list[PodCondition]:
    """Give the condition, for pods that could ever restart so."""
    if not may_restart_all(pod.spec):
        return []
    status, reason, message = "False", "", ""
    if phase in ("Succeeded", "Failed"):
        reason = "PodCompleted" if phase == "Succeeded" else "PodFailed"
    elif is_restarting(pod, observed, previous, terminal=terminal) and not is_reset(pod, observed):
        status, reason = "True", "RestartAllContainersStarted"
        message = "container exited with restart policy rule"
    before = next((one for one in previous.conditions if one.type == KIND and one.status == status), None)
    return [
        PodCondition(
            type=KIND,
            status=status,
            last_transition_time=now if before is None else before.last_transition_time,
            reason=reason or msgspec.UNSET,
            message=message or msgspec.UNSET,
        )
    ]


def removed_for_restart(status: ContainerStatus, old: ContainerStatus) -> None:
    """Show a container that was removed to begin anew; it must not pass for one that never ran."""
    ended = ContainerStateTerminated(exit_code=137, reason=REASON, message=_MESSAGE)
    status.state = ContainerState(waiting=ContainerStateWaiting(reason=REASON, message=_MESSAGE))
    status.last_state = ContainerState(terminated=ended)
    status.restart_count = old.restart_count + 1


def will_run_again(status: ContainerStatus) -> bool:
    """Whether a container ended only because all restart: then it runs again, whatever its policy is."""
    ended = status.state.terminated or status.last_state.terminated
    return ended is not None and ended.reason == REASON
