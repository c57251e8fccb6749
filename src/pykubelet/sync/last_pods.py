"""Pods of an API server that does not answer: with `--pod-checkpoint-dir`, those that were last known.

What the API server wants here is written down as it changes, with each pod's last status. When the
agent starts and the API server says nothing for a while, what was written down is offered instead;
as soon as it speaks, its word wins. Until then no pod counts as unwanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.logs import get_logger
from pykubelet.pods.checkpoints import Checkpoints
from pykubelet.pods.static import is_static_pod
from pykubelet.pods.store import PodStore

log = get_logger(__name__)

PATIENCE_SECONDS = 10.0
"""How long the API server may take to tell its pods before those of old are started."""


class LastPods:
    """Keeps the API server's pods, and offers them when it is away at the start."""

    def __init__(
        self, checkpoints: Checkpoints, store: PodStore, offer: Callable[[Sequence[Pod]], None]
    ) -> None:
        self._checkpoints = checkpoints
        self._store = store
        self._offer = offer
        self._heard = False
        self.speak_for_the_api = False
        """Whether pods run now of which the API server has not spoken yet."""

    async def run(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Offer the pods of old unless the API server answers in time."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await answered()
        except TimeoutError:
            pods = self._checkpoints.pods()
            log.warning(
                "The API server does not answer: starting the pods that were last known", pods=len(pods)
            )
            self.speak_for_the_api = True
            self._offer(pods)

    def answered(self, pods: Sequence[Pod], unreadable: Set[str]) -> None:
        """Take the API server's whole word: what it does not have when it first speaks is forgotten."""
        if self._heard:
            return
        self._heard, self.speak_for_the_api = True, False
        wanted = {pod.uid for pod in pods}
        for pod in self._checkpoints.pods():
            if pod.uid not in wanted and pod.full_name not in unreadable:
                self._checkpoints.forget(pod.uid)

    def changed(self, pod: Pod, status: PodStatus | None) -> None:
        """Take a pod, or its status, that has changed; one that is not wanted any more is forgotten."""
        if is_static_pod(pod):
            return
        known = self._store.get(pod.uid)
        if known is not None:
            self._checkpoints.keep(known, status)
        else:
            self._checkpoints.forget(pod.uid)
