"""Deletion of the ResourceSlices of DRA drivers that are not available.

The scheduler relies on the slices. When the kubelet starts, no driver is registered yet, so all slices of the
node are deleted; a driver that registers publishes them again. When a driver is unavailable for longer than
an update of it takes, its slices are deleted. Failed requests are retried until they succeed.
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
"""Seconds that a driver may be unavailable before its slices are deleted."""
MAX_DELAY_SECONDS = 300.0


class ResourceSliceCleaner:
    """Deleter of one node's ResourceSlices, in tasks of its own."""

    def __init__(
        self,
        api: ApiClient,
        node_name: str,
        tasks: TaskScope,
        wait_node_registered: Callable[[], Awaitable[None]],
        delay: float = DELAY_SECONDS,
    ) -> None:
        """Initialize; `wait_node_registered` waits for the Node object, which authorization requires."""
        self._api = api
        self._node = node_name
        self._tasks = tasks
        self._wait_node_registered = wait_node_registered
        self._delay = delay
        self._pending: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Delete all slices: no driver has registered with this kubelet process yet."""
        self._tasks.start(self._delete(""), name="dra-slices")

    def driver_changed(self, driver: str, usable: bool) -> None:
        """Handle a driver that became usable or unusable; the delay counts from the first loss."""
        if usable:
            if (pending := self._pending.pop(driver, None)) is not None:
                pending.cancel()
        elif driver not in self._pending:
            self._pending[driver] = self._tasks.start(self._delete_later(driver), name=f"dra-slices {driver}")

    async def _delete_later(self, driver: str) -> None:
        await asyncio.sleep(self._delay)
        await self._delete(driver)
        self._pending.pop(driver, None)

    async def _delete(self, driver: str) -> None:
        selector = f"spec.nodeName={self._node}" + (f",spec.driver={driver}" if driver else "")
        backoff = Backoff(first=1.0, limit=MAX_DELAY_SECONDS)
        error_log = ErrorLogLimiter(log, "Failed to delete ResourceSlices, will retry", selector=selector)
        await self._wait_node_registered()
        clock = asyncio.get_running_loop().time
        while True:
            try:
                await self._api.delete_all(RESOURCE_SLICES, params=[("fieldSelector", selector)])
            except NotFound:
                # The API server does not serve this kind.
                return
            except KubeError as err:
                error_log.failed(err, clock())
                await self._api.pause(backoff.next(clock(), type(err)))
            else:
                error_log.succeeded(clock())
                log.v(3).info("Deleted ResourceSlices", selector=selector)
                return
