"""Keeping the cluster up to date on how many volumes of a driver fit on this node.

A driver says it when it registers. Where its CSIDriver asks for it (`nodeAllocatableUpdatePeriodSeconds`)
it is asked again at that period, and when a volume could not be attached for lack of room.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from pykubelet.host.plugin_calls import PluginError
from pykubelet.host.plugin_registration import RegistrationRefused
from pykubelet.logs import get_logger
from pykubelet.tasks import wait_seconds
from pykubelet.volumes.csi.driver_objects import DriverObjects
from pykubelet.volumes.csi.drivers import Drivers
from pykubelet.volumes.csi.node_info import NodeInfo
from pykubelet.volumes.together import side_by_side

log = get_logger(__name__)


class Limits:
    """Asks drivers for their limits while `run` runs."""

    def __init__(self, drivers: Drivers, objects: DriverObjects, node: NodeInfo) -> None:
        self._drivers = drivers
        self._objects = objects
        self._node = node
        self._changed = asyncio.Event()
        self._due: dict[str, float] = {}
        drivers.listen(self._changed.set)
        objects.listen(self._changed.set)

    def period(self, driver: str) -> float:
        """Give the seconds after which a driver wants to be asked again; 0 for never."""
        found = self._objects.known(driver)
        return float(found.spec.node_allocatable_update_period_seconds or 0) if found is not None else 0.0

    async def refresh(self, driver: str) -> None:
        """Ask a driver now, and tell the cluster; what fails is logged."""
        client = self._drivers.client(driver)
        if client is None:
            return
        try:
            await self._node.update(driver, await client.info())
        except (PluginError, RegistrationRefused) as err:
            log.error(err, "Failed to update the limit of a CSI driver", driver=driver)

    async def run(self) -> NoReturn:
        """Ask each driver at its period until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            self._changed.clear()
            periods = {name: period for name in self._drivers.names if (period := self.period(name))}
            # A driver begins to wait when it, or its period, is first seen.
            self._due = {
                name: min(self._due.get(name, clock() + period), clock() + period)
                for name, period in periods.items()
            }
            due = [name for name, moment in self._due.items() if moment <= clock()]
            # Together: one that hangs does not keep the others from being asked.
            await side_by_side([self.refresh(name) for name in due])
            self._due |= {name: clock() + periods[name] for name in due}
            pause = wait_seconds(min(self._due.values()) - clock()) if self._due else None
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                pass
