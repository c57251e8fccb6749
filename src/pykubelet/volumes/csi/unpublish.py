"""A pod lets go of a volume: with its driver, or without it, because a pod can always be deleted.

A driver takes back what it published, and is given time for that (`patience.py`): an ordinary restart
of a driver, or a moment of trouble, goes the ordinary way. A driver that does not come back, or only ever
fails, has the pod wait no longer:

1. what the driver is owed is written down (`debts.py`);
2. the published place is unmounted, or detached when somebody uses it or it does not answer;
3. the place is removed. What is in it, if it was no mount, is moved aside: it is not ours to delete.

The volume stays in use in the node's status, so that nobody detaches it, and what was staged for the
node stays as it is, until the driver is there again and has been asked (`paying.py`).

Asking drivers for what they are owed (`debts.py`), as soon as they are there again.

A volume's debts are paid before the volume is published anew. All others are paid when their driver
registers, also after a restart of the agent, with growing pauses while the driver fails; one driver that
hangs holds up no other. When all is paid, the volume is unstaged and no longer in use, if nobody has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pykubelet.linux.mounts import read_mounts, unmount
from pykubelet.logs import get_logger
from pykubelet.pluginmanager.client import PluginError
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.tasks import TaskScope, finish_in_thread, in_own_thread
from pykubelet.volumes.csi.dependencies import CsiDependencies, DriverCallError, asking
from pykubelet.volumes.csi.drivers import Drivers
from pykubelet.volumes.csi.names import KIND
from pykubelet.volumes.csi.pending_unpublish import PendingUnpublish, PendingUnpublishStore
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError
from pykubelet.volumes.operations import FIRST_PAUSE, LONGEST_PAUSE, Locks

if TYPE_CHECKING:
    from pykubelet.volumes.csi.node_client import NodeClient

log = get_logger(__name__)
UNMOUNT_SECONDS = 20.0
"""How long unmounting may take before the mount is detached."""
EVENT = "UnpublishedWithoutDriver"


async def let_go(
    parts: CsiDependencies,
    debt: PendingUnpublish,
    ordinary: Callable[[], Awaitable[None]],
    clear: Callable[[], None],
) -> None:
    """Have a driver take back what it published (`ordinary`), or do without it when it had its time.

    `debt` is what it will then be owed, and `clear` removes the place and its traces, in a thread. May be
    interrupted anywhere and repeated. Raises what these raise, while the driver has time left.
    """
    try:
        await ordinary()
    except (VolumePluginError, OSError) as err:
        if not parts.patience.is_over(debt.target, absent=_is_absent(err)):
            raise
        await _without_driver(parts, debt, clear, err)
    else:
        await finish_in_thread(lambda: parts.debts.settle(debt))
    parts.patience.forget(debt.target)


async def unmount_by_force(place: Path) -> None:
    """Unmount all that is mounted at or below a real path, whatever it takes; never waits for long.

    Raises KindError.
    """
    try:
        await _unmounted(place, detach=False)
    except OSError as err:  # also for want of an answer
        log.warning("Detaching a volume that cannot be unmounted", path=place, err=str(err) or "it hangs")
        try:
            await _unmounted(place, detach=True)
        except OSError as again:
            reason = again.strerror or "it does not answer"
            raise VolumePluginError(f"{KIND}: cannot detach {place}: {reason}") from again


async def _without_driver(
    parts: CsiDependencies, debt: PendingUnpublish, clear: Callable[[], None], why: Exception
) -> None:
    await finish_in_thread(lambda: parts.debts.note(debt))
    place = Path(debt.target)
    await unmount_by_force(place)

    def remove() -> None:
        # Looked up anew: a driver that hangs for long may go on at any time.
        if read_mounts(place):
            raise VolumePluginError(f"{KIND}: {place} is mounted again")
        _put_aside(parts.debts, debt)
        clear()

    await finish_in_thread(remove)
    log.warning(
        "Let go of a volume without its CSI driver, which is asked when it is there again",
        driver=debt.driver,
        volume=debt.handle,
        podUID=debt.pod,
        err=why,
    )
    parts.tell(
        debt.pod,
        EVENT,
        f'CSI driver "{debt.driver}" did not take back volume "{debt.volume}" ({debt.handle}), so it was '
        f"unmounted without the driver: {why}. The volume stays in use on this node until the driver is "
        "there and has been asked",
    )
    parts.owes()


def _put_aside(debts: PendingUnpublishStore, debt: PendingUnpublish) -> None:
    """Move a plain directory with something in it out of the way: deleting it might delete a volume."""
    place = Path(debt.target)
    if place.is_symlink() or not place.is_dir() or not any(place.iterdir()):
        return
    aside = debts.aside(debt)
    place.rename(aside)
    log.warning(
        "A CSI driver had put files where a mount should have been; they are kept aside",
        driver=debt.driver,
        volume=debt.handle,
        path=aside,
    )


async def _unmounted(place: Path, *, detach: bool) -> None:
    def work() -> None:
        # The youngest first: whatever stands on a mount was mounted later.
        for mounted in reversed(read_mounts(place)):
            unmount(mounted.point, detach=detach)

    async with asyncio.timeout(UNMOUNT_SECONDS):
        await in_own_thread(work, name=f"unmount {place}", patience=0)


def _is_absent(err: Exception) -> bool:
    """Whether the driver is not there; one that is there and says no may have a reason."""
    return isinstance(err, VolumeNotReady) or (isinstance(err, DriverCallError) and not err.was_reached)


async def pay(debts: PendingUnpublishStore, debt: PendingUnpublish, client: NodeClient) -> None:
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


async def pay_before(parts: CsiDependencies, volume: CsiVolume, client: NodeClient, place: Path) -> None:
    """Pay what is owed for a volume that is about to be published at a place; raises KindError.

    What other pods have not let go of yet is not touched.
    """
    for debt in await finish_in_thread(lambda: parts.debts.of(volume.unique_name)):
        if debt.is_due or debt.target == str(place):
            with asking(f"{KIND}: driver {debt.driver} must first take back what an earlier pod had: "):
                await pay(parts.debts, debt, client)


class UnpublishRetrier:
    """Pays debts while `run` runs."""

    def __init__(
        self, debts: PendingUnpublishStore, drivers: Drivers, locks: Locks, paid: Callable[[], None]
    ) -> None:
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
        complaints = ErrorLogLimiter(
            log, "A CSI driver does not take back what it is owed for", driver=driver
        )
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
