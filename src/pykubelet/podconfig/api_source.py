"""Pods from the API server: those that were bound to this node, watched.

The third source beside files and URLs. Like them it gives its full set after each list; after an event
of the watch it gives only what changed, since the cost of an event must not grow with the number of
pods. It says nothing until the first complete list is there, so that an API server that is away at the
agent's start takes no pod away; and once it has spoken, an API server that is away changes nothing.

- The list begins when the node itself has been read (`ready`), as whoever admits pods needs it.
- A pod that cannot be read is a problem, not a deletion: its last good form stays, and of one that
  was never readable at least the name is known (`unreadable`), so that what runs of it is left alone.
  So it is with one that lacks what every pod has: its uid names folders and cgroups.

Pods of an API server that does not answer: with `--pod-checkpoint-dir`, those that were last known.

What the API server wants here is written down as it changes, with each pod's last status. When the
agent starts and the API server says nothing for a while, what was written down is offered instead;
as soon as it speaks, its word wins. Until then no pod counts as unwanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from datetime import UTC, datetime
from typing import NoReturn

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.apiserver.client import PODS
from pykubelet.apiserver.reflector import ListerWatcher, Reflector, StoreDelta
from pykubelet.config.errors import Problem
from pykubelet.logs import get_logger
from pykubelet.podconfig.checkpoints import Checkpoints
from pykubelet.podconfig.file_source import Emit
from pykubelet.podconfig.mux import PodStore
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.podconfig.validate import is_uid

log = get_logger(__name__)
EmitUpdate = Callable[[str, StoreDelta[Pod], Callable[[], list[Pod]]], None]
"""Takes the source's name, what changed of its pods, and a function that returns the full set."""
_NEVER = datetime.fromtimestamp(0, UTC)


class ApiSource:
    """Watches the pods of one node and emits them, after the first list and after every change.

    `ready` is awaited before the first request. `emit_update` takes the changes of the watch; without it
    they are emitted as full sets.
    """

    name = "api"

    def __init__(
        self,
        source: ListerWatcher,
        node_name: str,
        emit: Emit,
        *,
        emit_update: EmitUpdate | None = None,
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._emit = emit
        self._emit_update = emit_update
        self._ready = ready
        self._reflector = Reflector(
            source, PODS, self._take, field_selector=f"spec.nodeName={node_name}", flaw=_flaw
        )

    @property
    def unreadable(self) -> Set[str]:
        """Names (`namespace/name`) of pods that the API server has and that could not be read."""
        return {f"{namespace}/{name}" for namespace, name in self._reflector.unreadable}

    async def synced(self) -> None:
        """Wait for the first complete list."""
        await self._reflector.synced()

    async def run(self) -> NoReturn:
        """Watch until cancelled."""
        if self._ready is not None:
            log.info("Waiting for node sync before watching apiserver pods")
            await self._ready()
        log.info("Watching apiserver")
        await self._reflector.run()

    async def _take(self, update: StoreDelta[Pod]) -> None:
        if self._emit_update is not None and not update.listed:
            self._emit_update(self.name, update, self._pods)
            return
        problems = [
            Problem(f"{namespace}/{name}", f"cannot be read: {why}")
            for (namespace, name), why in self._reflector.unreadable.items()
        ]
        self._emit(self.name, self._pods(), problems)

    def _pods(self) -> list[Pod]:
        # The oldest first: what was started in this order before is started so again.
        return sorted(self._reflector.objects.values(), key=_age)


def _flaw(pod: Pod) -> str:
    if not is_uid(pod.uid):
        return "its uid is not a plain name" if pod.uid else "it has no uid"
    return "" if pod.spec.containers else "it has no containers"


def _age(pod: Pod) -> datetime:
    return pod.metadata.creation_timestamp or _NEVER


PATIENCE_SECONDS = 10.0
"""How long the API server may take to tell its pods before those of old are started."""


class CheckpointSource:
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
