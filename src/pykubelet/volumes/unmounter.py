"""Teardown of pods' volumes, and release of what several pods shared of a volume.

`PodUnmounter` ensures that a pod can always be deleted: first the sub-paths of its containers are unmounted,
then each plugin undoes its set-up, then mounts and files are removed. All of this is determined from the disk
and the mount table, so it may be interrupted anywhere and repeated by a kubelet process that has never seen
the pod. A mount that does not respond is detached after a timeout. A busy mount is reported, retried, and
detached after BUSY_SECONDS: it ends with its last user. The markers of complete emptyDirs are deleted first,
because a half-deleted directory must never count as a volume. Nothing is deleted while something is mounted
in it, so that no foreign files are deleted.

`VolumeGarbageCollector` releases staged mounts, iSCSI sessions and mounted disks, which outlive each pod and
thus belong to no pod worker. It runs soon after a pod is gone, and periodically, because a previous kubelet
process may have left something. A plugin that hangs does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

from pykubelet.linux.mounts import (
    TooManyEntries,
    is_mounted_inside,
    mount_points_in,
    plan_unmounts,
    read_mounts,
    remove_tree,
    unmount,
)
from pykubelet.logs import get_logger
from pykubelet.util.tasks import in_own_thread
from pykubelet.volumes.block import DEVICES, mapped_devices, unmap_device
from pykubelet.volumes.errors import VolumeError, told
from pykubelet.volumes.operations import FAILURES, OperationPending, PendingOperations, side_by_side
from pykubelet.volumes.paths import VolumeFolders
from pykubelet.volumes.plugin import VolumePlugin
from pykubelet.volumes.volume_state import VolumeState

log = get_logger(__name__)
_MOST_STACKED = 8
"""Maximum number of stacked mounts that are unmounted without reading the mount table."""


class PodVolumeTeardown:
    """One attempt to remove a pod's volumes of some plugins (by their directories); it blocks, and may hang.

    Volumes of other plugins are only unmounted: the plugin may no longer be installed, and the pod must be
    deletable; their directories are deleted with the pod's. With `detach`, busy mounts are detached from the
    pod's directory too: they end with their last user.
    """

    def __init__(self, root: Path, uid: str, kinds: Collection[str], *, detach: bool = False) -> None:
        """Initialize for a pod. Raises ValueError for a uid that is not a single path component."""
        self._root = root
        self._uid = uid
        self._folders = VolumeFolders.of(root, uid)
        self._kinds = kinds
        self._detach = detach
        self.at: Path | None = None
        """Mount point that is being unmounted: where the attempt hangs, if it does."""

    @property
    def needed(self) -> bool:
        """Whether anything of the pod's volumes exists."""
        folders = self._folders
        if any(path.exists() for path in (folders.sub_paths, folders.markers, folders.pod / DEVICES)):
            return True
        return bool(_entries(folders.volumes)) or any(mapped_devices(self._root, self._uid))

    def volumes(self) -> Iterator[tuple[str, str]]:
        """Yield the existing volumes as the plugin's directory and the volume's name; reads only names."""
        for folder in self._known(self._folders):
            yield from ((folder.name, path.name) for path in _entries(folder))
        yield from mapped_devices(self._root, self._uid)

    def sub_paths(self) -> None:
        """Unmount and delete the sub-paths of the containers. Raises OSError."""
        real = self._real()
        self._remove((real.sub_paths,), real)

    def everything(self) -> None:
        """Unmount and delete all that is left. Raises OSError."""
        real = self._real()
        remove_tree(real.markers)
        for kind, name in mapped_devices(self._root, self._uid):
            unmap_device(self._root, kind, self._uid, name)
        folders = (real.sub_paths, *self._known(real), real.pod / DEVICES)
        self._remove(folders, real, others=[path for path in _entries(real.volumes) if path not in folders])

    def _real(self) -> VolumeFolders:
        """Return the pod's directories by their real paths, as in the mount table."""
        return VolumeFolders(self._folders.pod.parent.resolve() / self._folders.pod.name)

    def _known(self, folders: VolumeFolders) -> list[Path]:
        return [path for path in _entries(folders.volumes) if path.name in self._kinds]

    def _remove(self, folders: Sequence[Path], real: VolumeFolders, others: Sequence[Path] = ()) -> None:
        if self._unmount_volumes((*folders, *others)):
            for folder in folders:
                remove_tree(folder, ())
            return
        mounts = read_mounts(real.pod)
        if points := [point for folder in (*folders, *others) for point in plan_unmounts(mounts, folder)]:
            for point in points:
                self.at = point
                self._unmount(point)
            self.at = None
        for folder in folders:
            # Checked again after an unmount, which may have uncovered another mount.
            remove_tree(folder, None if points else mounts)

    def _unmount_volumes(self, folders: Sequence[Path]) -> bool:
        """Unmount the volumes in some directories without the mount table, which has all pods' mounts.

        Return whether nothing is mounted there any more. False if more than volumes is mounted, if a volume
        is busy, or if the check would cost more than the mount table.
        """
        try:
            for _ in range(_MOST_STACKED):
                points = [point for folder in folders for point in mount_points_in(folder)]
                if not points:
                    break
                for point in points:
                    self.at = point
                    unmount(point)
            return not any(is_mounted_inside(folder) for folder in folders)
        except TooManyEntries:
            return False
        except OSError as err:
            if err.errno != errno.EBUSY:
                raise
            return False
        finally:
            self.at = None

    def _unmount(self, point: Path) -> None:
        try:
            unmount(point)
        except OSError as err:
            if err.errno != errno.EBUSY or not self._detach:
                raise
            log.warning("Detaching busy volume mount", path=point, podUID=self._uid)
            unmount(point, detach=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


PATIENCE = 20.0
"""Seconds that a pod worker waits for unmounting per attempt."""
KIND_PATIENCE = 123.0
"""Seconds that a pod worker waits for a plugin's `take_down`: drivers access servers."""
BUSY_SECONDS = 60.0
"""Seconds after which busy mounts are detached."""
AT_ONCE = 4
"""Number of pods whose files are deleted concurrently: more threads only slow each other down."""
TURN_SECONDS = 5.0
"""Seconds that a pod waits for other pods before its files are deleted regardless of the limit."""
Count = Callable[[str, str, str, float, bool], None]
"""Records a volume: the pod's uid, the plugin's directory, the name, the seconds, whether it was removed."""
_TAKE_DOWN = "taking down"
_UNMOUNT = "unmounting"


class PodUnmounter:
    """Unmounter of pods' volumes below one root directory."""

    def __init__(
        self,
        root: Path,
        kinds: Mapping[str, VolumePlugin],
        operations: PendingOperations,
        count: Count = lambda uid, folder, name, seconds, well: None,
    ) -> None:
        self._root = root
        self._count = count
        self._kinds = {kind.folder: kind for kind in kinds.values() if kind.folder}
        self._operations = operations
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._troubled: dict[str, float] = {}
        """Event-loop time since which a pod's volumes cannot be unmounted, by uid."""
        self._working: dict[str, PodVolumeTeardown] = {}
        """Teardown in progress in a thread, by uid."""

    async def pod(self, uid: str) -> bool:
        """Remove all of a pod's volumes; return whether any of them had a slow plugin.

        Raises VolumeError, after which it may be called again.
        """
        now = asyncio.get_running_loop().time()
        try:
            work = PodVolumeTeardown(
                self._root,
                uid,
                self._kinds.keys(),
                detach=now - self._troubled.get(uid, now) >= BUSY_SECONDS,
            )
            needed = work.needed
            volumes = list(work.volumes()) if needed else []
            slow = [part for part in volumes if self._is_slow(part[0])]
        except (OSError, ValueError) as err:
            raise _failed(uid, err) from err
        if not needed:
            self._troubled.pop(uid, None)
            return False
        well = False
        try:
            if slow:
                await self._unmount(uid, work, work.sub_paths)
                await self._undo(uid, slow)
            await self._unmount(uid, work, work.everything)
            well = True
        finally:
            seconds = asyncio.get_running_loop().time() - now
            for folder, name in volumes:
                self._count(uid, folder, name, seconds, well)
        self._troubled.pop(uid, None)
        return bool(slow)

    def _is_slow(self, folder: str) -> bool:
        return folder in self._kinds and self._kinds[folder].slow

    async def _undo(self, uid: str, volumes: list[tuple[str, str]]) -> None:
        """Call the `take_down` of each volume's plugin."""
        problems = await side_by_side([self._undo_one(uid, folder, name) for folder, name in volumes])
        if found := [problem for problem in problems if problem]:
            raise VolumeError(*found)

    async def _undo_one(self, uid: str, folder: str, name: str) -> str:
        kind = self._kinds[folder]
        try:
            await self._operations.run(
                f"{uid}/{name}", _TAKE_DOWN, lambda: kind.take_down(uid, name), patience=KIND_PATIENCE
            )
        except FAILURES as err:
            reason = told(err) if isinstance(err, OSError) else err
            return f'UnmountVolume.TearDown failed for volume "{name}" : {reason}'
        return ""

    async def _unmount(self, uid: str, work: PodVolumeTeardown, step: Callable[[], None]) -> None:
        key = f"{uid}/"
        now = asyncio.get_running_loop().time()

        async def in_thread() -> None:
            async with self._turn():
                self._working[uid] = work
                try:
                    await in_own_thread(step, name=f"unmount {uid}", cancel_timeout=0)
                finally:
                    del self._working[uid]

        try:
            await self._operations.run(key, _UNMOUNT, in_thread, patience=PATIENCE, pauses=False)
        except OperationPending as err:
            self._troubled.setdefault(uid, now)
            # The thread may belong to an earlier attempt.
            point = self._working.get(uid, work).at
            if point is None:
                # Deleting millions of files takes long; a second thread would only slow down others.
                raise _failed(uid, "deleting its files takes long, and goes on") from err
            await self._detach(uid, point)
            await self._operations.end(key, _UNMOUNT, patience=PATIENCE)
            raise _failed(uid, f"{point} does not answer, so it is detached") from err
        except OSError as err:
            self._troubled.setdefault(uid, now)
            raise _failed(uid, told(err)) from err

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for a slot, at most TURN_SECONDS: a teardown that hangs must not block other pods."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._turns.release()

    async def _detach(self, uid: str, point: Path) -> None:
        log.warning("Detaching unresponsive volume mount", path=point, podUID=uid)
        try:
            async with asyncio.timeout(PATIENCE):
                await in_own_thread(
                    lambda: unmount(point, detach=True), name=f"detach {uid}", cancel_timeout=0
                )
        except TimeoutError:
            raise _failed(uid, f"{point} does not answer, and cannot be detached") from None
        except OSError as err:
            raise _failed(uid, told(err)) from err


def _failed(uid: str, reason: object) -> VolumeError:
    return VolumeError(f"UnmountVolume.TearDown failed for pod {uid} : {reason}")


SECONDS = 60.0
"""Seconds between runs when no pod is removed."""
UNSTAGE_TIMEOUT_SECONDS = 30.0
"""Seconds to wait for one plugin."""


class VolumeGarbageCollector:
    """Garbage collector of shared volume state: calls the `sweep` of all plugins."""

    def __init__(
        self, kinds: Mapping[str, VolumePlugin], holdings: VolumeState, operations: PendingOperations
    ) -> None:
        self._kinds = kinds
        self._holdings = holdings
        self._operations = operations
        self._due = asyncio.Event()

    def soon(self) -> None:
        """Request a run soon, because a pod is gone."""
        self._due.set()

    async def run(self, swept: Callable[[], None]) -> NoReturn:
        """Run until cancelled; `swept` is called after each run that `soon` requested."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SECONDS):
                    await self._due.wait()
            left = self._due.is_set()
            self._due.clear()
            await self.once()
            if left:
                swept()

    async def once(self) -> None:
        """Call `sweep` of all plugins now; failures are only logged."""
        await side_by_side([self._kind(name, kind) for name, kind in self._kinds.items()])

    async def _kind(self, name: str, kind: VolumePlugin) -> None:
        def work() -> Coroutine[Any, Any, None]:
            return kind.sweep(self._holdings.names)

        try:
            await self._operations.run(
                f"all/{name}", "sweeping", work, patience=UNSTAGE_TIMEOUT_SECONDS, pauses=False
            )
        except Exception as err:  # third-party plugins may raise anything
            log.error(err, "Failed to release volumes that no pod uses", kind=name)
