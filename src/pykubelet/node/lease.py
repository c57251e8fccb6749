"""The sign of life: the node's lease, renewed each quarter of its duration.

Whatever else fails, this goes on, because the cluster moves the pods of a silent node elsewhere. A
heartbeat that fails is tried again at once, a few times; when nobody answers twice in a row, the
connections may lead nowhere, and all are closed so that the next try makes a new one.

The node's lease: the sign of life by which the cluster knows that the node is there.

One small object per node, replaced at each heartbeat. It belongs to the node, so that it goes when
the node goes; a lease without an owner gets one as soon as the node is known.

Doing something again and again, early when there is a reason to.
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


class LeaseStore(Protocol):
    """Where leases are kept: an ApiClient."""

    async def get(self, resource: Resource[Lease], name: str, namespace: str = "") -> Lease:
        """Get a lease."""

    async def create(self, resource: Resource[Lease], obj: Lease, namespace: str = "") -> Lease:
        """Create a lease."""

    async def update(self, resource: Resource[Lease], obj: Lease) -> Lease:
        """Replace a lease."""


def renewed(known: Lease | None, node: str, node_uid: str, seconds: int, now: datetime) -> Lease:
    """Give the lease as it should be now; `node_uid` is empty while the node's is not known."""
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
    store: LeaseStore, node: str, node_uid: str, seconds: int, known: Lease | None, now: datetime
) -> Lease | None:
    """Renew the lease once and give it as the API server has it now; raises KubeError.

    `known` is what the last heartbeat gave: with it, one request is enough. A lease is not created
    before the node is known, since nobody would ever remove it: then there is none.
    """
    if known is not None:
        try:
            return await store.update(LEASES, renewed(known, node, node_uid, seconds, now))
        except (Conflict, NotFound):
            # Someone else wrote or removed it: look again.
            pass
    try:
        found = await store.get(LEASES, node, NAMESPACE)
    except NotFound:
        if not node_uid:
            return None
        return await store.create(LEASES, renewed(None, node, node_uid, seconds, now), NAMESPACE)
    return await store.update(LEASES, renewed(found, node, node_uid, seconds, now))


JITTER = 0.04
"""Rounds are stretched by chance up to so much, so that a cluster's nodes do not fall into step."""


class WakeupTimer:
    """Lets a loop sleep until its time has come or somebody rings; ringing twice is ringing once."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """End the sleep, or the next one at once when nobody sleeps now."""
        self._rung.set()

    async def sleep(self, seconds: float) -> bool:
        """Sleep; says whether somebody rang."""
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            return False
        self._rung.clear()
        return True


def stretched(seconds: float, chance: Callable[[], float] = random.random) -> float:
    """Give a time between two rounds, a little longer by chance."""
    return seconds * (1 + JITTER * chance())


TRIES = 5
LONGEST_PAUSE_SECONDS = 7.0
"""How long to wait at most after a round without success."""
WORTH_ANOTHER_TRY = (Unreachable, InvalidResponse, Conflict, ServerError)
"""What may go better at once; anything else is the server's considered answer."""
CloseConnections = Callable[[], Awaitable[None]]


class LeaseClient(LeaseStore, Protocol):
    """Where leases are kept: an ApiClient."""

    async def pause(self, seconds: float) -> None:
        """Wait before the next try, or until the server is back."""


class LeaseLoop:
    """Keeps the lease of one node alive; `node_uid` gives the node's, empty while there is none."""

    def __init__(
        self,
        store: LeaseClient,
        settings: NodeSettings,
        node_uid: Callable[[], str],
        close_connections: CloseConnections,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._settings = settings
        self._node_uid = node_uid
        self._close_connections = close_connections
        self._clock = clock
        self._chance = chance
        self._bell = WakeupTimer()
        self._complaints = ErrorLogLimiter(log, "Failed to renew the node's lease", node=settings.name)
        self._lease: Lease | None = None

    def wake(self) -> None:
        """Renew at once: the node is known now, or another one."""
        self._bell.ring()

    async def run(self) -> NoReturn:
        """Renew until cancelled."""
        interval = self._settings.lease_seconds / 4
        while True:
            if await self._round():
                await self._bell.sleep(stretched(interval, self._chance))
            else:
                await self._store.pause(min(interval, LONGEST_PAUSE_SECONDS))

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
                self._complaints.failed(err, clock())
                if not isinstance(err, WORTH_ANOTHER_TRY):
                    return False
                if number > 0 and isinstance(err, Unreachable):
                    await self._close_connections()
            else:
                self._complaints.succeeded(clock())
                return True
        return False
