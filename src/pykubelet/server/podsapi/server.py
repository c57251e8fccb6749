"""Pods API: ListPods, GetPod and WatchPods, for clients on the node.

Monitoring agents call it on `pods-api/pods-api.sock` instead of watching the API server. The state belongs to
`PodWatch` and the stores. As upstream, all clients together may send a hundred unary requests per second.
Pods are encoded one at a time, with other tasks in between; the watch of a client that accepts no message for
`SEND_TIMEOUT_SECONDS` ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pykubelet.api.pod import Pod
from pykubelet.podconfig.mux import PodStore
from pykubelet.server.podsapi import pods_pb2 as pb
from pykubelet.server.podsapi.encoding import EncodingError
from pykubelet.server.podsapi.watch import PodWatch
from pykubelet.status.compute import StatusStore
from pykubelet.transport.grpc_server import GrpcError, Methods, StreamingMethod, UnaryMethod, serving
from pykubelet.util.rate_limiter import TokenBucket

DIRECTORY_NAME = "pods-api"
SOCKET_NAME = "pods-api.sock"
QPS, BURST = 100.0, 10
SEND_TIMEOUT_SECONDS = 30.0
_DIRECTORY_MODE = 0o750


class PodsServer:
    """Handlers of the pods API."""

    def __init__(
        self,
        store: PodStore,
        statuses: StatusStore,
        watch: PodWatch,
        send_timeout: float = SEND_TIMEOUT_SECONDS,
    ) -> None:
        """Initialize; `send_timeout` are the seconds that a watch client may take to accept a message."""
        self._store = store
        self._statuses = statuses
        self._watch = watch
        self._send_timeout = send_timeout
        self._bucket = TokenBucket(QPS, BURST)

    @property
    def methods(self) -> Methods:
        """Methods of the service."""
        service = "/v1alpha1.Pods/"
        return {
            f"{service}ListPods": UnaryMethod(pb.ListPodsRequest, self._limited(self._list_pods)),
            f"{service}GetPod": UnaryMethod(pb.GetPodRequest, self._limited(self._get_pod)),
            f"{service}WatchPods": StreamingMethod(
                pb.WatchPodsRequest, self._watch_pods, send_timeout=self._send_timeout
            ),
        }

    def _limited(self, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def call(request: Any) -> Any:
            if not self._bucket.try_acquire(asyncio.get_running_loop().time()):
                raise GrpcError("RESOURCE_EXHAUSTED", "rejected by rate limit")
            try:
                return await handler(request)
            except EncodingError as err:
                raise GrpcError("INTERNAL", f"failed to marshal pod: {err}") from err

        return call

    async def _list_pods(self, request: pb.ListPodsRequest) -> pb.ListPodsResponse:
        return pb.ListPodsResponse(pods=[data async for data in self._encoded_pods()])

    async def _get_pod(self, request: pb.GetPodRequest) -> pb.GetPodResponse:
        if (pod := self._store.get(request.podUID)) is None:
            raise GrpcError("NOT_FOUND", f"pod with UID {request.podUID} not found")
        return pb.GetPodResponse(pod=self._encode(pod))

    async def _watch_pods(self, request: pb.WatchPodsRequest) -> AsyncGenerator[pb.WatchPodsEvent, None]:
        with self._watch.watching() as watcher:
            try:
                async for data in self._encoded_pods():
                    yield pb.WatchPodsEvent(type=pb.ADDED, pod=data)
                yield pb.WatchPodsEvent(type=pb.INITIAL_SYNC_COMPLETE)
                while True:
                    event = await watcher.next()
                    yield pb.WatchPodsEvent(type=event.type, pod=self._watch.encode(event))
            except EncodingError as err:
                self._watch.metrics.dropped.inc()
                raise GrpcError("INTERNAL", f"error marshalling watch event pod: {err}") from err

    async def _encoded_pods(self) -> AsyncIterator[bytes]:
        """Yield the pods of this moment in the order of their UIDs. Raises EncodingError."""
        for pod in sorted(self._store.pods(), key=lambda pod: pod.uid):
            status = self._statuses.get(pod.uid) or pod.status
            if (data := self._watch.encoder.cached(pod, status)) is None:
                await asyncio.sleep(0)
                data = self._encode(pod)
            yield data

    def _encode(self, pod: Pod) -> bytes:
        return self._watch.encode_current(pod, self._statuses.get(pod.uid) or pod.status)


@asynccontextmanager
async def serving_pods(directory: Path, server: PodsServer) -> AsyncIterator[None]:
    """Serve the API on a socket in this directory, creating it, within the block. Raises OSError."""
    directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
    async with serving(directory / SOCKET_NAME, server.methods):
        yield
