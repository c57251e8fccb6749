"""The sign of life: the node's lease, renewed each quarter of its duration.

Whatever else fails, this goes on, because the cluster moves the pods of a silent node elsewhere. A
heartbeat that fails is tried again at once, a few times; when nobody answers twice in a row, the
connections may lead nowhere, and all are closed so that the next try makes a new one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import NoReturn, Protocol

from pykubelet.api.lease import Lease
from pykubelet.kube.errors import BadAnswer, Conflict, KubeError, ServerError, Unreachable
from pykubelet.kube.leases import LeaseStore, heartbeat
from pykubelet.kube.retrying import Complaints
from pykubelet.logs import get_logger
from pykubelet.node.beats import Bell, stretched
from pykubelet.node.settings import NodeSettings

log = get_logger(__name__)

TRIES = 5
LONGEST_PAUSE_SECONDS = 7.0
"""How long to wait at most after a round without success."""
WORTH_ANOTHER_TRY = (Unreachable, BadAnswer, Conflict, ServerError)
"""What may go better at once; anything else is the server's considered answer."""

CloseConnections = Callable[[], Awaitable[None]]


class PatientStore(LeaseStore, Protocol):
    """Where leases are kept: an ApiClient."""

    async def pause(self, seconds: float) -> None:
        """Wait before the next try, or until the server is back."""


class LeaseLoop:
    """Keeps the lease of one node alive; `node_uid` gives the node's, empty while there is none."""

    def __init__(
        self,
        store: PatientStore,
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
        self._bell = Bell()
        self._complaints = Complaints(log, "Failed to renew the node's lease", node=settings.name)
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
