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
from pykubelet.util.backoff import ErrorLogLimiter, ExponentialDelay
from pykubelet.util.tasks import TaskScope, finish_in_thread, in_own_thread
from pykubelet.volumes.csi.dependencies import CsiDependencies, DriverCallError, driver_call
from pykubelet.volumes.csi.drivers import Drivers
from pykubelet.volumes.csi.names import KIND
from pykubelet.volumes.csi.pending_unpublish import PendingUnpublish, PendingUnpublishStore
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError
from pykubelet.volumes.operations import INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, Locks

if TYPE_CHECKING:
    from pykubelet.volumes.csi.node_client import NodeClient

log = get_logger(__name__)
UNMOUNT_SECONDS = 20.0
"""Seconds that an unmount may take before the mount is detached."""
EVENT = "UnpublishedWithoutDriver"


async def unpublish_or_force(
    deps: CsiDependencies,
    pending_call: PendingUnpublish,
    unpublish: Callable[[], Awaitable[None]],
    remove_paths: Callable[[], None],
) -> None:
    """Unpublish a volume through its driver (`unpublish`), or without it after the driver's deadline.

    `pending_call` is stored then, and `remove_paths` removes the target path and its traces, in a thread. May
    be cancelled at any point and repeated. Raises what `unpublish` raises before the deadline,
    VolumePluginError or OSError after it.
    """
    try:
        await unpublish()
    except (VolumePluginError, OSError) as err:
        if not deps.deadlines.record_failure(pending_call.target, absent=_is_unreachable(err)):
            raise
        await _force_unpublish(deps, pending_call, remove_paths, err)
    else:
        await finish_in_thread(lambda: deps.pending_unpublishes.remove(pending_call))
    deps.deadlines.forget(pending_call.target)


async def unmount_by_force(path: Path) -> None:
    """Unmount all mounts at or below a real path, detaching them if they are busy or hang.

    Takes at most twice UNMOUNT_SECONDS. Raises VolumePluginError.
    """
    try:
        await _unmount_all(path, detach=False)
    except OSError as err:  # includes TimeoutError
        log.warning("Failed to unmount volume, detaching it", path=path, err=str(err) or "it hangs")
        try:
            await _unmount_all(path, detach=True)
        except OSError as again:
            reason = again.strerror or "it does not answer"
            raise VolumePluginError(f"{KIND}: cannot detach {path}: {reason}") from again


async def _force_unpublish(
    deps: CsiDependencies, pending_call: PendingUnpublish, remove_paths: Callable[[], None], cause: Exception
) -> None:
    await finish_in_thread(lambda: deps.pending_unpublishes.add(pending_call))
    target_path = Path(pending_call.target)
    await unmount_by_force(target_path)

    def remove() -> None:
        # Checked again: a driver that hung may continue at any time.
        if read_mounts(target_path):
            raise VolumePluginError(f"{KIND}: {target_path} is mounted again")
        _move_leftovers(deps.pending_unpublishes, pending_call)
        remove_paths()

    await finish_in_thread(remove)
    log.warning(
        "Unmounted volume without its CSI driver, NodeUnpublishVolume is pending",
        driver=pending_call.driver,
        volumeHandle=pending_call.handle,
        podUID=pending_call.pod,
        err=cause,
    )
    deps.record_warning(
        pending_call.pod,
        EVENT,
        f'CSI driver "{pending_call.driver}" did not take back volume "{pending_call.volume}" '
        f"({pending_call.handle}), so it was unmounted without the driver: {cause}. The volume "
        "stays in use on this node until the driver is there and has been asked",
    )
    deps.on_pending_unpublish()


def _move_leftovers(store: PendingUnpublishStore, pending_call: PendingUnpublish) -> None:
    """Move a plain directory that is not empty aside: deleting it might delete a volume's content."""
    target_path = Path(pending_call.target)
    if target_path.is_symlink() or not target_path.is_dir() or not any(target_path.iterdir()):
        return
    leftovers = store.leftovers_path(pending_call)
    target_path.rename(leftovers)
    log.warning(
        "Moved aside files that a CSI driver left at a target path without a mount",
        driver=pending_call.driver,
        volumeHandle=pending_call.handle,
        path=leftovers,
    )


async def _unmount_all(path: Path, *, detach: bool) -> None:
    def work() -> None:
        # The newest first: a mount on top of another one was mounted later.
        for mounted in reversed(read_mounts(path)):
            unmount(mounted.point, detach=detach)

    async with asyncio.timeout(UNMOUNT_SECONDS):
        await in_own_thread(work, name=f"unmount {path}", cancel_timeout=0)


def _is_unreachable(err: Exception) -> bool:
    """Return whether the driver is not reachable; one that returns an error may have a reason."""
    return isinstance(err, VolumeNotReady) or (isinstance(err, DriverCallError) and not err.was_reached)


async def unpublish_pending(
    store: PendingUnpublishStore, pending_call: PendingUnpublish, client: NodeClient
) -> None:
    """Call NodeUnpublishVolume for a volume already removed from its pod. Raises PluginError.

    NotFound is a success: the driver has nothing to unpublish.
    """
    try:
        await client.unpublish(pending_call.handle, pending_call.target)
    except PluginError as err:
        if err.code != "NotFound":
            raise
    await finish_in_thread(lambda: store.remove(pending_call))
    log.info(
        "Completed pending NodeUnpublishVolume", driver=pending_call.driver, volumeHandle=pending_call.handle
    )


async def unpublish_pending_before(
    deps: CsiDependencies, volume: CsiVolume, client: NodeClient, target_path: Path
) -> None:
    """Make the pending calls of a volume before it is published at `target_path`. Raises VolumePluginError.

    Calls for other pods from which the volume is not removed yet are skipped.
    """
    for pending_call in await finish_in_thread(
        lambda: deps.pending_unpublishes.for_volume(volume.unique_name)
    ):
        if pending_call.is_due or pending_call.target == str(target_path):
            with driver_call(
                f"{KIND}: driver {pending_call.driver} must first take back what an earlier pod had: "
            ):
                await unpublish_pending(deps.pending_unpublishes, pending_call, client)


class UnpublishRetrier:
    """Retrier of pending unpublish calls, active while `run` runs."""

    def __init__(
        self, store: PendingUnpublishStore, drivers: Drivers, locks: Locks, on_unpublished: Callable[[], None]
    ) -> None:
        """Initialize; `on_unpublished` is called after successful calls, `locks` are by unique name."""
        self._store = store
        self._drivers = drivers
        self._locks = locks
        self._on_unpublished = on_unpublished
        self._wake_event = asyncio.Event()
        self._driver_change = asyncio.Event()
        """Set when a driver registers or deregisters, and then replaced by a new event."""
        self._active: set[str] = set()
        drivers.add_listener(self._drivers_changed)

    def wake(self) -> None:
        """Check for pending calls immediately."""
        self._wake_event.set()

    async def run(self) -> NoReturn:
        """Make pending calls of registered drivers until cancelled."""
        async with TaskScope() as scope:
            while True:
                self._wake_event.clear()
                pending_drivers = {
                    pending_call.driver for pending_call in await finish_in_thread(self._store.all)
                }
                for driver in sorted((pending_drivers & self._drivers.names) - self._active):
                    self._active.add(driver)
                    scope.start(self._retry_driver(driver), name=f"csi-debts {driver}")
                await self._wake_event.wait()
        raise AssertionError("the loop above ends only by being cancelled")

    def _drivers_changed(self) -> None:
        change, self._driver_change = self._driver_change, asyncio.Event()
        change.set()
        self.wake()

    async def _retry_driver(self, driver: str) -> None:
        """Make the pending calls of one driver, until none is left or the driver deregisters."""
        error_log = ErrorLogLimiter(log, "Failed to complete pending NodeUnpublishVolume", driver=driver)
        clock = asyncio.get_running_loop().time
        delay = ExponentialDelay(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        try:
            while (client := self._drivers.client(driver)) is not None:
                change = self._driver_change
                try:
                    if await self._try_pending(driver, client):
                        return
                except (PluginError, OSError) as err:
                    error_log.failed(err, clock())
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay.next()):
                        await change.wait()
        finally:
            self._active.discard(driver)

    async def _try_pending(self, driver: str, client: NodeClient) -> bool:
        """Try each pending call of a driver once and return whether none is left.

        Raises the last PluginError, or OSError if a completed call could not be deleted from disk.
        """
        failure: PluginError | OSError | None = None
        completed = waiting = False
        for pending_call in await finish_in_thread(self._store.all):
            if pending_call.driver != driver:
                continue
            async with self._locks(pending_call.unique_name):
                if not pending_call.is_due:
                    waiting = True
                    continue
                try:
                    await unpublish_pending(self._store, pending_call, client)
                    completed = True
                except (PluginError, OSError) as err:
                    failure = err
        if completed:
            self._on_unpublished()
        if failure is not None:
            raise failure
        return not waiting
