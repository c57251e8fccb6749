"""Node lease (`kube-node-lease`), renewed at a quarter of its duration.

The loop continues whatever else fails, because the cluster evicts the pods of a node whose lease expires.
A failed renewal is retried immediately, up to `TRIES` times. When the server is unreachable twice in a
row, all connections are closed: they may be dead, and the next try opens a new one.

The Lease is owned by the Node object, so that it is garbage-collected with it; a lease without an owner
gets one as soon as the node's UID is known.

`WakeupTimer` and `jittered` are the timers of this loop and of the status loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import NoReturn, Protocol

import msgspec

from pykubelet.api.meta import ObjectMeta, OwnerReference
from pykubelet.api.node import Lease, micro_time
from pykubelet.apiserver.client import LEASES, Resource
from pykubelet.apiserver.errors import (
    Conflict,
    InvalidResponse,
    KubeError,
    NotFound,
    ServerError,
    Unreachable,
)
from pykubelet.logs import get_logger
from pykubelet.node.settings import NodeSettings
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
NAMESPACE = "kube-node-lease"


class LeaseClient(Protocol):
    """API client for leases: an ApiClient."""

    async def get(self, resource: Resource[Lease], name: str, namespace: str = "") -> Lease:
        """Get a lease."""

    async def create(self, resource: Resource[Lease], obj: Lease, namespace: str = "") -> Lease:
        """Create a lease."""

    async def update(self, resource: Resource[Lease], obj: Lease) -> Lease:
        """Replace a lease."""

    async def pause(self, seconds: float) -> None:
        """Wait `seconds` before the next try, less if the server becomes reachable earlier."""


def renewed(known: Lease | None, node: str, node_uid: str, seconds: int, now: datetime) -> Lease:
    """Return the renewed lease; `node_uid` is empty while the node's UID is unknown."""
    lease = known or Lease(metadata=ObjectMeta(name=node, namespace=NAMESPACE))
    spec = msgspec.structs.replace(
        lease.spec, holder_identity=node, lease_duration_seconds=seconds, renew_time=micro_time(now)
    )
    meta = lease.metadata
    if node_uid and not meta.owner_references:
        owner = OwnerReference(api_version="v1", kind="Node", name=node, uid=node_uid)
        meta = msgspec.structs.replace(meta, owner_references=[owner])
    return Lease(metadata=meta, spec=spec)


async def heartbeat(
    store: LeaseClient, node: str, node_uid: str, seconds: int, known: Lease | None, now: datetime
) -> Lease | None:
    """Renew the lease once and return it as the API server has it. Raises KubeError.

    `known` is the result of the last heartbeat: with it, one request is enough. Without a node UID no
    lease is created, since it would never be garbage-collected: the result is None then.
    """
    if known is not None:
        try:
            return await store.update(LEASES, renewed(known, node, node_uid, seconds, now))
        except (Conflict, NotFound):
            # Another client updated or deleted the lease: get it again.
            pass
    try:
        found = await store.get(LEASES, node, NAMESPACE)
    except NotFound:
        if not node_uid:
            return None
        return await store.create(LEASES, renewed(None, node, node_uid, seconds, now), NAMESPACE)
    return await store.update(LEASES, renewed(found, node, node_uid, seconds, now))


JITTER = 0.04
"""Maximum random fraction added to an interval, so that the nodes of a cluster do not synchronize."""


class WakeupTimer:
    """A sleep that `wake` interrupts; several calls before the next sleep count once."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """End the current sleep, or the next one immediately if no task is sleeping."""
        self._woken.set()

    async def sleep(self, seconds: float) -> bool:
        """Sleep up to `seconds` and return whether `wake` ended the sleep."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        return True


def jittered(seconds: float, rng: Callable[[], float] = random.random) -> float:
    """Return the seconds until the next round, with random jitter added."""
    return seconds * (1 + JITTER * rng())


TRIES = 5
MAX_RETRY_SECONDS = 7.0
"""Maximum seconds to wait after a failed round."""
RETRIABLE_ERRORS = (Unreachable, InvalidResponse, Conflict, ServerError)
"""Errors that are retried immediately; all others are final for the round."""
CloseConnections = Callable[[], Awaitable[None]]


class LeaseLoop:
    """Renewal loop of one node's lease; `node_uid` returns the node's UID, empty while unknown."""

    def __init__(
        self,
        store: LeaseClient,
        settings: NodeSettings,
        node_uid: Callable[[], str],
        close_connections: CloseConnections,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._settings = settings
        self._node_uid = node_uid
        self._close_connections = close_connections
        self._clock = clock
        self._rng = rng
        self._wakeup = WakeupTimer()
        self._error_log = ErrorLogLimiter(log, "Failed to renew the node's lease", node=settings.name)
        self._lease: Lease | None = None

    def set_settings(self, settings: NodeSettings) -> None:
        """Replace the duration of the lease, and renew it with that immediately."""
        self._settings = settings
        self.wake()

    def wake(self) -> None:
        """Renew the lease immediately because the node's UID is known now or has changed."""
        self._wakeup.wake()

    async def run(self) -> NoReturn:
        """Renew the lease until cancelled."""
        while True:
            interval = self._settings.lease_seconds / 4
            if await self._round():
                await self._wakeup.sleep(jittered(interval, self._rng))
            else:
                await self._store.pause(min(interval, MAX_RETRY_SECONDS))

    async def _round(self) -> bool:
        clock = asyncio.get_running_loop().time
        settings = self._settings
        for number in range(TRIES):
            try:
                self._lease = await heartbeat(
                    self._store,
                    settings.name,
                    self._node_uid(),
                    settings.lease_seconds,
                    self._lease,
                    self._clock(),
                )
            except KubeError as err:
                self._error_log.failed(err, clock())
                if not isinstance(err, RETRIABLE_ERRORS):
                    return False
                if number > 0 and isinstance(err, Unreachable):
                    await self._close_connections()
            else:
                self._error_log.succeeded(clock())
                return True
        return False
