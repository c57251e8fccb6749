"""Pod events for the clients of WatchPods.

`PodWatch` follows the pod store, the status store and the pod workers, which call it on each change. As
upstream, a pod is ADDED with its first status and DELETED when it has terminated, at the latest when it
leaves the node. Nothing here blocks: an event is put into the queue of each watcher, and encoded when the
first of them sends it. A watcher whose queue is full gets no further events;
its call ends with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.logs import get_logger
from pykubelet.podconfig.mux import PodStore, difference
from pykubelet.server.podsapi import pods_pb2 as pb
from pykubelet.server.podsapi.encoding import PodEncoder, encode_identity, encode_pod
from pykubelet.server.podsapi.metrics import PodWatchMetrics
from pykubelet.status.compute import StatusStore
from pykubelet.transport.grpc_server import GrpcError

log = get_logger(__name__)
MAX_WATCHERS = 64
QUEUE_EVENTS = 100
"""Events that wait for one client, as upstream."""


@dataclass(frozen=True, slots=True, eq=False)
class PodEvent:
    """A change of a pod; DELETED has no status."""

    type: pb.EventType
    pod: Pod
    status: PodStatus | None


class Watcher:
    """Queue of events for one client."""

    def __init__(self) -> None:
        self._events: deque[PodEvent] = deque()
        self._changed = asyncio.Event()
        self._overflowed = False

    def put(self, event: PodEvent) -> bool:
        """Add an event; False if the queue is full, which ends the watcher and drops its events."""
        if len(self._events) >= QUEUE_EVENTS:
            self._overflowed = True
            self._events.clear()
        else:
            self._events.append(event)
        self._changed.set()
        return not self._overflowed

    async def next(self) -> PodEvent:
        """Wait for the next event. Raises GrpcError when the queue was full."""
        while not self._events:
            if self._overflowed:
                raise GrpcError("RESOURCE_EXHAUSTED", "watch client channel closed")
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()


class PodWatch:
    """Events of all pods of this node, and the clients that receive them."""

    def __init__(
        self,
        store: PodStore,
        statuses: StatusStore,
        is_terminated: Callable[[str], bool],
        metrics: PodWatchMetrics,
    ) -> None:
        """Initialize; `is_terminated` returns whether the worker of a pod has terminated it."""
        self.encoder = PodEncoder()
        self.metrics = metrics
        self._store = store
        self._statuses = statuses
        self._is_terminated = is_terminated
        self._announced: dict[str, Pod] = {}
        """Pods that were ADDED and not DELETED, as sent last."""
        self._watchers: set[Watcher] = set()
        """Watchers that get events."""
        self._open = 0
        """Calls in progress, including those that get no further events."""

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Register a watcher within the block. Raises GrpcError if there are too many."""
        if self._open >= MAX_WATCHERS:
            raise GrpcError("RESOURCE_EXHAUSTED", f"too many watch clients: the limit is {MAX_WATCHERS}")
        watcher = Watcher()
        self._open += 1
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._open -= 1
            self._watchers.discard(watcher)

    def encode(self, event: PodEvent) -> bytes:
        """Return the pod of an event in protobuf. Raises EncodingError."""
        pod, status = event.pod, event.status
        if status is None:
            return encode_identity(pod)
        return self.encode_current(pod, status)

    def encode_current(self, pod: Pod, status: PodStatus) -> bytes:
        """Return a pod with this status in protobuf. Raises EncodingError."""
        if self._store.get(pod.uid) is not pod:
            # An earlier version of the pod: it must not replace the cached one, nor outlive the pod.
            return self.encoder.cached(pod, status) or encode_pod(pod, status)
        return self.encoder.encode(pod, status)

    # Listeners

    def handle_status(self, pod: Pod, status: PodStatus, before: PodStatus | None) -> None:
        """Send the new status of a pod."""
        uid = pod.uid
        if self._is_terminated(uid):
            self._remove(uid)
            return
        latest = self._store.get(uid) or pod
        is_new = uid not in self._announced and pod.metadata.deletion_timestamp is None
        self._announced[uid] = latest
        self._send(PodEvent(pb.ADDED if is_new else pb.MODIFIED, latest, status))

    def handle_pod(self, uid: str) -> None:
        """Send a change of a pod's desired state."""
        pod, sent = self._store.get(uid), self._announced.get(uid)
        if pod is None:
            self.encoder.forget(uid)
            self._remove(uid)
        elif sent is not None and difference(sent, pod) in ("UPDATE", "DELETE"):
            self._announced[uid] = pod
            self._send(PodEvent(pb.MODIFIED, pod, self._statuses.get(uid) or pod.status))

    def handle_worker(self, uid: str) -> None:
        """Send that a pod has terminated."""
        if uid in self._announced and self._is_terminated(uid):
            self._remove(uid)

    def _remove(self, uid: str) -> None:
        if (pod := self._announced.pop(uid, None)) is not None:
            self._send(PodEvent(pb.DELETED, pod, None))

    def _send(self, event: PodEvent) -> None:
        for watcher in tuple(self._watchers):
            if not watcher.put(event):
                log.info("Watch client channel is full, dropping client")
                self.metrics.dropped.inc()
                self._watchers.discard(watcher)
