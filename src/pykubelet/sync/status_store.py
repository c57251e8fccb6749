"""The last status of every pod: written by the workers, read by everybody, sent by whoever listens."""

from __future__ import annotations

from collections.abc import Callable

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus

Listener = Callable[[Pod, PodStatus, PodStatus | None], None]
"""Takes a pod, its new status and the one before."""


class StatusStore:
    """Statuses by pod uid; listeners hear only of real changes."""

    def __init__(self) -> None:
        self._statuses: dict[str, PodStatus] = {}
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call `listener` for every changed status from now on; it must not block."""
        self._listeners.append(listener)

    def get(self, uid: str) -> PodStatus | None:
        """The last status of a pod, if one was set."""
        return self._statuses.get(uid)

    def set(self, pod: Pod, status: PodStatus) -> bool:
        """Keep a pod's status; True when it differs from the last one."""
        before = self._statuses.get(pod.uid)
        if before == status:
            return False
        self._statuses[pod.uid] = status
        for listener in self._listeners:
            listener(pod, status, before)
        return True

    def forget(self, uid: str) -> None:
        """Drop a pod that is gone."""
        self._statuses.pop(uid, None)
