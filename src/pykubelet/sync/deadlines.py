"""Pods that may be active on a node for so long only: `activeDeadlineSeconds`."""

from __future__ import annotations

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.sync.apply import PodMemory
from pykubelet.sync.status_phase import TERMINAL

EXCEEDED = "DeadlineExceeded"
MESSAGE = "Pod was active on the node longer than the specified deadline"


def time_left(pod: Pod, status: PodStatus, memory: PodMemory, now: float, clock: float) -> float | None:
    """Give the seconds until a pod's deadline, None when it has none.

    `now` is the loop's time, `clock` seconds since 1970. The clock is looked at once: whoever sets it later
    neither ends pods nor lets them live.
    """
    if pod.spec.active_deadline_seconds is None or status.start_time is None:
        return None
    if memory.began is None:
        memory.began = now - max(0.0, clock - status.start_time.timestamp())
    return memory.began + pod.spec.active_deadline_seconds - now


def ended_in_time(pod: Pod, status: PodStatus) -> bool:
    """Return whether all containers ended by themselves before the deadline.

    A kubelet that was not running at the deadline learns of both later.
    """
    if status.phase not in TERMINAL or status.start_time is None or pod.spec.active_deadline_seconds is None:
        return False
    deadline = status.start_time.timestamp() + pod.spec.active_deadline_seconds
    states = (one.state.terminated for one in status.container_statuses)
    ends = [state.finished_at for state in states if state is not None and state.finished_at]
    return bool(ends) and all(end.timestamp() < deadline for end in ends)


def exceeded(status: PodStatus) -> PodStatus:
    """Give the status of a pod whose time is over."""
    return msgspec.structs.replace(status, phase="Failed", reason=EXCEEDED, message=MESSAGE)
