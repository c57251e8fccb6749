"""Pods from the API server: those that were bound to this node, watched.

The third source beside files and URLs. Like them it gives its full set after each list; after an event
of the watch it gives only what changed, since the cost of an event must not grow with the number of
pods. It says nothing until the first complete list is there, so that an API server that is away at the
agent's start takes no pod away; and once it has spoken, an API server that is away changes nothing.

- The list begins when the node itself has been read (`ready`), as whoever admits pods needs it.
- A pod that cannot be read is a problem, not a deletion: its last good form stays, and of one that
  was never readable at least the name is known (`unreadable`), so that what runs of it is left alone.
  So it is with one that lacks what every pod has: its uid names folders and cgroups.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from datetime import UTC, datetime
from typing import NoReturn

from pykubelet.api.pod import Pod
from pykubelet.config.errors import Problem
from pykubelet.kube.object_copy import Update
from pykubelet.kube.reflector import Reflector, Source
from pykubelet.kube.resources import PODS
from pykubelet.logs import get_logger
from pykubelet.pods.file_source import Emit
from pykubelet.pods.validate import is_uid

log = get_logger(__name__)

EmitUpdate = Callable[[str, Update[Pod], Callable[[], list[Pod]]], None]
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
        source: Source,
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

    async def _take(self, update: Update[Pod]) -> None:
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
