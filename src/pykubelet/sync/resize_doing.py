"""The part of a pod's step that resizes it: done, told and counted; a failure does not stop the rest."""

from __future__ import annotations

import time
from collections.abc import Callable

from pykubelet.api.pod import Container, Pod
from pykubelet.runtime.actions import Actions
from pykubelet.runtime.update import ResizeError, Resizer
from pykubelet.sync.resizing import Resizing


class ResizeDoing:
    """Resizes pods, and keeps the books; without a resizer it only keeps them."""

    def __init__(
        self,
        resizing: Resizing,
        resizer: Resizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resizing = resizing
        self._resizer = resizer
        self._clock = clock

    async def apply(self, pod: Pod, actions: Actions) -> bool:
        """Have a pod's containers set to what the pod says; False when that failed, which is told."""
        if self._resizer is None:
            return True
        began = self._clock()
        failure = ""
        try:
            sandbox_id = "" if actions.create_sandbox else actions.sandbox_id
            await self._resizer.apply(pod, sandbox_id, actions.resize)
            self._resizing.settled(pod)
        except ResizeError as err:
            failure = str(err)
            self._resizing.failed(pod, failure)
        self._resizing.metrics.resized(self._clock() - began, success=not failure)
        return not failure

    def starting(self, pod: Pod, container: Container) -> None:
        """Take note that a container is made with what the pod says."""
        self._resizing.starting(pod, container)

    def made(self, pod: Pod) -> None:
        """Take note that the pod's cgroup was made."""
        self._resizing.made(pod)
