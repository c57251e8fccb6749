"""Telling the cluster which drivers this node has: its CSINode, an annotation and labels of the node.

One change at a time, each made of what the API server has at that moment, tried a few times; a driver
whose facts cannot be told does not register (and tries again), because the scheduler would not know of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from pykubelet.api.storage import CsiNode
from pykubelet.host.plugin_registration import RegistrationRefused
from pykubelet.kube.client import ApiClient
from pykubelet.kube.errors import KubeError, NotFound
from pykubelet.kube.resources import NODES
from pykubelet.kube.retrying import Complaints, Pauses
from pykubelet.logs import get_logger
from pykubelet.volumes.csi.drivers import DriverNode
from pykubelet.volumes.csi.node_objects import (
    TopologyCollision,
    announced,
    belongs_to,
    blank_csi_node,
    installed,
    node_installed,
    node_uninstalled,
    uninstalled,
)
from pykubelet.volumes.csi.resources import CSI_NODES
from pykubelet.volumes.csi.volume_use import NodeFacts

log = get_logger(__name__)

TRIES = 4
FIRST_PAUSE_SECONDS = 0.01
PAUSE_FACTOR = 5.0


class NodeInfo(DriverNode):
    """The `DriverNode` of a node of a cluster."""

    def __init__(self, api: ApiClient, node_name: str, chance: Callable[[], float] = random.random) -> None:
        self._api = api
        self._name = node_name
        self._chance = chance
        self._turn = asyncio.Lock()
        self.ready = asyncio.Event()
        """The node has its CSINode; the scheduler may count on it from then on."""
        self._seen = asyncio.Event()

    async def initialize(self) -> None:
        """Have the CSINode, before any driver registers; tries until it is there."""
        pauses, complaints = Pauses(first=0.1, limit=10.0), Complaints(log, "Failed to initialize CSINode")
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async with self._turn:
                    found = await self._csi_node()
                    if patch := announced(found):
                        await self._api.patch(CSI_NODES, self._name, patch)
            except NotFound as err:
                log.v(2).info("The node is not registered yet, so it has no CSINode either", err=err)
                await self._until_seen(pauses.next(clock(), type(err)))
            except (KubeError, _Deleted) as err:
                complaints.failed(err, clock())
                await self._api.pause(pauses.next(clock(), type(err)))
            else:
                complaints.succeeded(clock())
                self.ready.set()
                return

    def node_seen(self) -> None:
        """Take note that the API server has the node: now it can have its CSINode, too."""
        self._seen.set()

    async def install(self, driver: str, facts: NodeFacts) -> None:
        """Tell of a driver: the node first, the CSINode then; raises RegistrationRefused."""
        if not facts.node_id:
            raise RegistrationRefused("error adding CSI driver node info: driverNodeID must not be empty")

        async def tell_node() -> None:
            node = await self._api.get(NODES, self._name)
            if patch := node_installed(node.metadata, driver, facts):
                await self._api.patch(NODES, self._name, patch, subresource="status")

        await self._tried("error updating Node object with CSI driver node info", tell_node)
        await self.update(driver, facts)

    async def update(self, driver: str, facts: NodeFacts) -> None:
        """Tell of a driver's facts that may change while it runs; raises RegistrationRefused."""

        async def tell_csi_node() -> None:
            found = await self._csi_node()
            if patch := installed(found, driver, facts):
                await self._api.patch(CSI_NODES, self._name, patch)

        await self._tried("error updating CSINode object with CSI driver node info", tell_csi_node)

    async def uninstall(self, driver: str, is_gone: Callable[[], bool]) -> None:
        """Tell that a driver is gone; what cannot be told is logged, the next registration corrects it."""

        async def tell_csi_node() -> None:
            if not is_gone():
                return
            try:
                found = await self._api.get(CSI_NODES, self._name)
            except NotFound:
                return
            if patch := uninstalled(found, driver):
                await self._api.patch(CSI_NODES, self._name, patch)

        async def tell_node() -> None:
            if not is_gone():
                return
            node = await self._api.get(NODES, self._name)
            if patch := node_uninstalled(node.metadata, driver):
                await self._api.patch(NODES, self._name, patch, subresource="status")

        try:
            await self._tried("error uninstalling CSI driver from CSINode object", tell_csi_node)
            await self._tried("error removing CSI driver node info from Node object", tell_node)
        except RegistrationRefused as err:
            log.error(err, "Failed to tell that a CSI driver is gone", driver=driver)

    async def _until_seen(self, seconds: float) -> None:
        self._seen.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._seen.wait()

    async def _csi_node(self) -> CsiNode:
        """Give the node's CSINode, made if need be; one of an earlier node of that name is deleted."""
        node = await self._api.get(NODES, self._name)
        try:
            found = await self._api.get(CSI_NODES, self._name)
        except NotFound:
            return await self._api.create(CSI_NODES, blank_csi_node(self._name, node.metadata.uid))
        if not belongs_to(found, self._name, node.metadata.uid):
            await self._api.delete(CSI_NODES, self._name, uid=found.metadata.uid)
            raise _Deleted(f'CSINode "{self._name}" was owned by a different node, deleted it')
        return found

    async def _tried(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        pause, last = FIRST_PAUSE_SECONDS, ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(pause * (1 + 0.1 * self._chance()))
                pause *= PAUSE_FACTOR
            try:
                async with self._turn:
                    await work()
            except (KubeError, _Deleted) as err:
                last = str(err)
            except (TopologyCollision, ValueError) as err:
                raise RegistrationRefused(f"{what}: {err}") from err
            else:
                return
        raise RegistrationRefused(f"{what}: timed out waiting for the condition; caused by: {last}")


class _Deleted(Exception):
    """Something was in the way and is gone now: try again."""
