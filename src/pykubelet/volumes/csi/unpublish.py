"""Unpublish of pods' volumes, forced if the CSI driver is not available, and retry of the pending calls.

A pod can always be deleted. NodeUnpublishVolume is retried until a deadline (`UnpublishDeadlines`), so that a
restart or a temporary failure of the driver is handled normally. After the deadline the pod does not wait any
longer:

1. the pending call is stored on disk (`pending_unpublish.py`);
2. the target path is unmounted, or detached if it is busy or hangs;
3. the path is removed. Files in it that are not in a mount are moved aside: they may be a volume's only copy.

The volume stays in the node's `volumesInUse`, so that controllers do not detach it, and stays staged, until
the pending call has been made.

The pending calls of a volume are made before the volume is published again. All others are made when their
driver registers, also after a restart of the kubelet, with exponential back-off while the driver fails; a
driver that hangs does not delay others. When no call is pending any more, the volume is unstaged and leaves
`volumesInUse`, unless a pod uses it.
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
"""Seconds that an unmount may take before the mount is detached."""
EVENT = "UnpublishedWithoutDriver"


async def let_go(
    parts: CsiDependencies,
    debt: PendingUnpublish,
    ordinary: Callable[[], Awaitable[None]],
    clear: Callable[[], None],
) -> None:
    """Unpublish a volume through its driver (`ordinary`), or without it after the driver's deadline.

    `debt` is the pending call to store then, and `clear` removes the target path and its traces, in a
    thread. May be cancelled at any point and repeated. Raises what `ordinary` raises before the deadline,
    VolumePluginError or OSError after it.
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
    """Unmount all mounts at or below a real path, detaching them if they are busy or hang.

    Takes at most twice UNMOUNT_SECONDS. Raises VolumePluginError.
    """
    try:
        await _unmounted(place, detach=False)
    except OSError as err:  # includes TimeoutError
        log.warning("Failed to unmount volume, detaching it", path=place, err=str(err) or "it hangs")
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
        # Checked again: a driver that hung may continue at any time.
        if read_mounts(place):
            raise VolumePluginError(f"{KIND}: {place} is mounted again")
        _put_aside(parts.debts, debt)
        clear()

    await finish_in_thread(remove)
    log.warning(
        "Unmounted volume without its CSI driver, NodeUnpublishVolume is pending",
        driver=debt.driver,
        volumeHandle=debt.handle,
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
    """Move a plain directory that is not empty aside: deleting it might delete a volume's content."""
    place = Path(debt.target)
    if place.is_symlink() or not place.is_dir() or not any(place.iterdir()):
        return
    aside = debts.aside(debt)
    place.rename(aside)
    log.warning(
        "Moved aside files that a CSI driver left at a target path without a mount",
        driver=debt.driver,
        volumeHandle=debt.handle,
        path=aside,
    )


async def _unmounted(place: Path, *, detach: bool) -> None:
    def work() -> None:
        # The newest first: a mount on top of another one was mounted later.
        for mounted in reversed(read_mounts(place)):
            unmount(mounted.point, detach=detach)

    async with asyncio.timeout(UNMOUNT_SECONDS):
        await in_own_thread(work, name=f"unmount {place}", cancel_timeout=0)


def _is_absent(err: Exception) -> bool:
    """Return whether the driver is not reachable; one that returns an error may have a reason."""
    return isinstance(err, VolumeNotReady) or (isinstance(err, DriverCallError) and not err.was_reached)


async def pay(debts: PendingUnpublishStore, debt: PendingUnpublish, client: NodeClient) -> None:
    """Call NodeUnpublishVolume for a volume already removed from its pod. Raises PluginError.

    NotFound is a success: the driver has nothing to unpublish.
    """
    try:
        await client.unpublish(debt.handle, debt.target)
    except PluginError as err:
        if err.code != "NotFound":
            raise
    await finish_in_thread(lambda: debts.settle(debt))
    log.info("Completed pending NodeUnpublishVolume", driver=debt.driver, volumeHandle=debt.handle)


async def pay_before(parts: CsiDependencies, volume: CsiVolume, client: NodeClient, place: Path) -> None:
    """Make the pending calls of a volume before it is published at `place`. Raises VolumePluginError.

    Calls for other pods from which the volume is not removed yet are skipped.
    """
    for debt in await finish_in_thread(lambda: parts.debts.of(volume.unique_name)):
        if debt.is_due or debt.target == str(place):
            with asking(f"{KIND}: driver {debt.driver} must first take back what an earlier pod had: "):
                await pay(parts.debts, debt, client)


class UnpublishRetrier:
    """Retrier of pending unpublish calls, active while `run` runs."""

    def __init__(
        self, debts: PendingUnpublishStore, drivers: Drivers, locks: Locks, paid: Callable[[], None]
    ) -> None:
        """Initialize; `paid` is called after calls have succeeded, `locks` are by unique volume name."""
        self._debts = debts
        self._drivers = drivers
        self._locks = locks
        self._paid = paid
        self._owed = asyncio.Event()
        self._driver_change = asyncio.Event()
        """Set when a driver registers or deregisters, and then replaced by a new event."""
        self._under_way: set[str] = set()
        drivers.listen(self._drivers_changed)

    def look(self) -> None:
        """Check for pending calls immediately."""
        self._owed.set()

    async def run(self) -> NoReturn:
        """Make pending calls of registered drivers until cancelled."""
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
        """Make the pending calls of one driver, until none is left or the driver deregisters."""
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
        """Try each pending call of a driver once and return whether none is left.

        Raises the last PluginError, or OSError if a completed call could not be deleted from disk.
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
