"""Pod source of the API server: the pods bound to this node, and their checkpoints as a fallback.

`ApiSource` emits its full set after each list; after a watch event it emits only the difference, since the
cost of an event must not grow with the number of pods. It emits nothing before the first complete list, so
that an API server that is unreachable when the kubelet starts removes no pod; later outages change nothing.

- The list starts after the Node object has been read (`ready`), because admission needs it.
- A pod that cannot be decoded is a problem, not a deletion: its last valid form stays. If it never was
  decodable, at least its name is known (`unreadable`), so that its running containers are left alone. The
  same applies to a pod without containers or without a valid UID, which names directories and cgroups.

`CheckpointSource` (`--pod-checkpoint-dir`) writes the pods of the API server and their last status to disk as
they change. If the API server does not respond for some time after the kubelet starts, the checkpointed pods
are offered to the mux; the first list replaces them. Until then no pod is considered orphaned.
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
"""Callback with the name of the source, the difference, and a function that returns the full set."""
_NEVER = datetime.fromtimestamp(0, UTC)


class ApiSource:
    """Source of the pods of one node; emits after the first list and after every change.

    `ready` is awaited before the first request. `emit_update` receives the differences of the watch; without
    it they are emitted as full sets.
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
            source, PODS, self._emit_delta, field_selector=f"spec.nodeName={node_name}", flaw=_flaw
        )

    @property
    def unreadable(self) -> Set[str]:
        """Full names (`namespace/name`) of pods of the API server that could not be decoded."""
        return {f"{namespace}/{name}" for namespace, name in self._reflector.unreadable}

    async def synced(self) -> None:
        """Wait for the first complete list."""
        await self._reflector.synced()

    async def run(self) -> NoReturn:
        """List and watch until cancelled."""
        if self._ready is not None:
            log.info("Waiting for node sync before watching apiserver pods")
            await self._ready()
        log.info("Watching apiserver")
        await self._reflector.run()

    async def _emit_delta(self, update: StoreDelta[Pod]) -> None:
        if self._emit_update is not None and not update.listed:
            self._emit_update(self.name, update, self._pods)
            return
        problems = [
            Problem(f"{namespace}/{name}", f"cannot be read: {why}")
            for (namespace, name), why in self._reflector.unreadable.items()
        ]
        self._emit(self.name, self._pods(), problems)

    def _pods(self) -> list[Pod]:
        # Oldest first, so that a restart starts the pods in the original order.
        return sorted(self._reflector.objects.values(), key=_age)


def _flaw(pod: Pod) -> str:
    if not is_uid(pod.uid):
        return "its uid is not a plain name" if pod.uid else "it has no uid"
    return "" if pod.spec.containers else "it has no containers"


def _age(pod: Pod) -> datetime:
    return pod.metadata.creation_timestamp or _NEVER


FIRST_LIST_TIMEOUT_SECONDS = 10.0
"""Seconds to wait for the API server's first list before checkpointed pods are started."""


class CheckpointSource:
    """Checkpoints of the API server's pods, offered if it does not respond at startup."""

    def __init__(
        self, checkpoints: Checkpoints, store: PodStore, offer: Callable[[Sequence[Pod]], None]
    ) -> None:
        self._checkpoints = checkpoints
        self._store = store
        self._offer = offer
        self._has_listed = False
        self.has_unconfirmed_pods = False
        """Whether checkpointed pods are running that the API server has not confirmed yet."""

    async def run(self, synced: Callable[[], Awaitable[None]]) -> None:
        """Offer the checkpointed pods unless the API server responds in time."""
        try:
            async with asyncio.timeout(FIRST_LIST_TIMEOUT_SECONDS):
                await synced()
        except TimeoutError:
            pods = self._checkpoints.pods()
            log.warning("API server does not respond, starting checkpointed pods", pods=len(pods))
            self.has_unconfirmed_pods = True
            self._offer(pods)

    def handle_api_pods(self, pods: Sequence[Pod], unreadable: Set[str]) -> None:
        """Handle a full set of the API server: the first one removes all checkpoints of other pods."""
        if self._has_listed:
            return
        self._has_listed, self.has_unconfirmed_pods = True, False
        uids = {pod.uid for pod in pods}
        for pod in self._checkpoints.pods():
            if pod.uid not in uids and pod.full_name not in unreadable:
                self._checkpoints.forget(pod.uid)

    def update(self, pod: Pod, status: PodStatus | None) -> None:
        """Handle a changed pod or status; the checkpoint of a pod that is no longer desired is removed."""
        if is_static_pod(pod):
            return
        known = self._store.get(pod.uid)
        if known is not None:
            self._checkpoints.save(known, status)
        else:
            self._checkpoints.forget(pod.uid)
