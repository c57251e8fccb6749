"""Taking back what drivers offered: the ResourceSlices of drivers that are not there any more.

A scheduler believes what slices say. When an agent starts, no driver is there yet, so all slices of the node
go; a driver that comes back publishes them anew. When a driver is gone for longer than an update of it
takes, its slices go. An API server that is away is asked again until it has done it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pykubelet.api.resource_claim import ResourceSlice
from pykubelet.apiserver.client import ApiClient, Resource
from pykubelet.apiserver.errors import KubeError, NotFound
from pykubelet.logs import get_logger
from pykubelet.util.backoff import Backoff, ErrorLogLimiter
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
RESOURCE_SLICES = Resource(
    ResourceSlice, "ResourceSlice", "resourceslices", "resource.k8s.io", namespaced=False
)
DELAY_SECONDS = 30.0
"""How long a driver may be away before what it offered is taken back."""
LONGEST_PAUSE_SECONDS = 300.0


class ResourceSliceCleaner:
    """Takes back slices of one node, in tasks of its own."""

    def __init__(
        self,
        api: ApiClient,
        node_name: str,
        tasks: TaskScope,
        node_there: Callable[[], Awaitable[None]],
        delay: float = DELAY_SECONDS,
    ) -> None:
        """`node_there` waits until the node is registered: before that it has no rights to its slices."""
        self._api = api
        self._node = node_name
        self._tasks = tasks
        self._node_there = node_there
        self._delay = delay
        self._pending: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Take back all: no driver has registered with this agent yet."""
        self._tasks.start(self._wipe(""), name="dra-slices")

    def driver_changed(self, driver: str, usable: bool) -> None:
        """Take note that a driver is there, or is not; the time counts from the first loss."""
        if usable:
            if (pending := self._pending.pop(driver, None)) is not None:
                pending.cancel()
        elif driver not in self._pending:
            self._pending[driver] = self._tasks.start(self._wipe_later(driver), name=f"dra-slices {driver}")

    async def _wipe_later(self, driver: str) -> None:
        await asyncio.sleep(self._delay)
        await self._wipe(driver)
        self._pending.pop(driver, None)

    async def _wipe(self, driver: str) -> None:
        selector = f"spec.nodeName={self._node}" + (f",spec.driver={driver}" if driver else "")
        pauses = Backoff(first=1.0, limit=LONGEST_PAUSE_SECONDS)
        complaints = ErrorLogLimiter(
            log, "Cannot take back ResourceSlices, will try again", selector=selector
        )
        await self._node_there()
        clock = asyncio.get_running_loop().time
        while True:
            try:
                await self._api.delete_all(RESOURCE_SLICES, params=[("fieldSelector", selector)])
            except NotFound:
                # An API server without this kind has none of them.
                return
            except KubeError as err:
                complaints.failed(err, clock())
                await self._api.pause(pauses.next(clock(), type(err)))
            else:
                complaints.succeeded(clock())
                log.v(3).info("Took back ResourceSlices", selector=selector)
                return
