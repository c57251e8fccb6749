"""Asking drivers for what they are owed (`debts.py`), as soon as they are there again.

A volume's debts are paid before the volume is published anew. All others are paid when their driver
registers, also after a restart of the agent, with growing pauses while the driver fails; one driver that
hangs holds up no other. When all is paid, the volume is unstaged and no longer in use, if nobody has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pykubelet.host.plugin_calls import PluginError
from pykubelet.kube.retrying import Complaints
from pykubelet.logs import get_logger
from pykubelet.tasks import TaskScope, finish_in_thread
from pykubelet.volumes.csi.debts import Debt, Debts
from pykubelet.volumes.csi.drivers import Drivers
from pykubelet.volumes.csi.names import KIND
from pykubelet.volumes.csi.parts import Parts, asking
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.operations import FIRST_PAUSE, LONGEST_PAUSE, Locks

if TYPE_CHECKING:
    from pykubelet.volumes.csi.node_client import NodeClient

log = get_logger(__name__)


async def pay(debts: Debts, debt: Debt, client: NodeClient) -> None:
    """Have a driver take back a volume that its pod has let go of; raises PluginError.

    A driver that knows no such volume has nothing to take back.
    """
    try:
        await client.unpublish(debt.handle, debt.target)
    except PluginError as err:
        if err.code != "NotFound":
            raise
    await finish_in_thread(lambda: debts.settle(debt))
    log.info("A CSI driver has taken back what it was owed for", driver=debt.driver, volume=debt.handle)


async def pay_before(parts: Parts, volume: CsiVolume, client: NodeClient, place: Path) -> None:
    """Pay what is owed for a volume that is about to be published at a place; raises KindError.

    What other pods have not let go of yet is not touched.
    """
    for debt in await finish_in_thread(lambda: parts.debts.of(volume.unique_name)):
        if debt.is_due or debt.target == str(place):
            with asking(f"{KIND}: driver {debt.driver} must first take back what an earlier pod had: "):
                await pay(parts.debts, debt, client)


class Paying:
    """Pays debts while `run` runs."""

    def __init__(self, debts: Debts, drivers: Drivers, locks: Locks, paid: Callable[[], None]) -> None:
        """`paid` is called after something was paid; `locks` are of volumes, by their unique names."""
        self._debts = debts
        self._drivers = drivers
        self._locks = locks
        self._paid = paid
        self._owed = asyncio.Event()
        self._driver_change = asyncio.Event()
        """Set when drivers have come or gone, and then another one."""
        self._under_way: set[str] = set()
        drivers.listen(self._drivers_changed)

    def look(self) -> None:
        """Look at once: something is owed."""
        self._owed.set()

    async def run(self) -> NoReturn:
        """Pay until cancelled."""
        async with TaskScope() as scope:
            while True:
                self._owed.clear()
                owed = {debt.driver for debt in await finish_in_thread(self._debts.all)}
                for driver in sorted((owed & self._drivers.names) - self._under_way):
                    self._under_way.add(driver)
                    scope.start(self._driver(driver), name=f"csi-debts {driver}")
                await self._owed.wait()
        raise AssertionError("the loop above ends only by being cancelled")

    def _drivers_changed(self) -> None:
        change, self._driver_change = self._driver_change, asyncio.Event()
        change.set()
        self.look()

    async def _driver(self, driver: str) -> None:
        """Pay one driver, until nothing is owed or it has left."""
        complaints = Complaints(log, "A CSI driver does not take back what it is owed for", driver=driver)
        clock = asyncio.get_running_loop().time
        pause = FIRST_PAUSE
        try:
            while (client := self._drivers.client(driver)) is not None:
                change = self._driver_change
                try:
                    if await self._round(driver, client):
                        return
                except (PluginError, OSError) as err:
                    complaints.failed(err, clock())
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await change.wait()
                pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            self._under_way.discard(driver)

    async def _round(self, driver: str, client: NodeClient) -> bool:
        """Try each debt once; says whether nothing is owed any more.

        Raises the last PluginError, or OSError of a disk that does not let a debt be crossed out.
        """
        failure: PluginError | OSError | None = None
        paid = waiting = False
        for debt in await finish_in_thread(self._debts.all):
            if debt.driver != driver:
                continue
            async with self._locks(debt.unique_name):
                if not debt.is_due:
                    waiting = True
                    continue
                try:
                    await pay(self._debts, debt, client)
                    paid = True
                except (PluginError, OSError) as err:
                    failure = err
        if paid:
            self._paid()
        if failure is not None:
            raise failure
        return not waiting
