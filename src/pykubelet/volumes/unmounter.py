"""Taking down a pod's volumes so that a pod can always be deleted.

First the parts that containers had, then whatever each kind has to undo, then the mounts and the files.
A mount that does not answer is waited for, then detached by force; one that somebody else keeps busy is
told of, tried again, and detached after a while: it ends when its last user does. Only what is mounted
nowhere any more is deleted.

Taking away all that a pod's volumes are on this machine, by what the disk and the mount table say.

It may be interrupted anywhere and repeated by an agent that never saw the pod. The marks of complete
folders go first: what is only half deleted must never pass for a volume. Nothing is deleted while
something is mounted in it, so that no one else's files go with it.

Taking down what several pods shared of a volume, when none of them has it any more.

Staged mounts, logins to targets, mounted disks: they outlive each pod, so nobody's worker takes them down.
It is done soon after a pod has left, and now and then, because an earlier agent may have left something. A
kind that hangs is left to itself.
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
"""Mounts on top of each other that are unmounted without the mount table."""


class PodVolumeTeardown:
    """One try to take away a pod's volumes of some kinds (by their folders); it blocks, and may hang.

    Others are only unmounted: who gave them may not be installed any more, and the pod has to go; with it go
    their folders. With `detach`, mounts that somebody still uses vanish from the pod's folder too: they end
    when their last user does.
    """

    def __init__(self, root: Path, uid: str, kinds: Collection[str], *, detach: bool = False) -> None:
        """Take a pod; raises ValueError for a uid that is no plain name."""
        self._root = root
        self._uid = uid
        self._folders = VolumeFolders.of(root, uid)
        self._kinds = kinds
        self._detach = detach
        self.at: Path | None = None
        """The mount point that is being unmounted: where it hangs, if it does."""

    @property
    def needed(self) -> bool:
        """Whether anything of the pod's volumes is there."""
        folders = self._folders
        if any(path.exists() for path in (folders.sub_paths, folders.markers, folders.pod / DEVICES)):
            return True
        return bool(_entries(folders.volumes)) or any(mapped_devices(self._root, self._uid))

    def volumes(self) -> Iterator[tuple[str, str]]:
        """Give the volumes that are there, each as its kind's folder and its name; reads only names."""
        for folder in self._known(self._folders):
            yield from ((folder.name, path.name) for path in _entries(folder))
        yield from mapped_devices(self._root, self._uid)

    def sub_paths(self) -> None:
        """Unmount and delete the parts of volumes that containers had; raises OSError."""
        real = self._real()
        self._remove((real.sub_paths,), real)

    def everything(self) -> None:
        """Unmount and delete all that is left; raises OSError."""
        real = self._real()
        remove_tree(real.markers)
        for kind, name in mapped_devices(self._root, self._uid):
            unmap_device(self._root, kind, self._uid, name)
        folders = (real.sub_paths, *self._known(real), real.pod / DEVICES)
        self._remove(folders, real, others=[path for path in _entries(real.volumes) if path not in folders])

    def _real(self) -> VolumeFolders:
        """The mount table knows real paths only."""
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
            # Asked anew: what was unmounted may have hidden another mount.
            remove_tree(folder, None if points else mounts)

    def _unmount_volumes(self, folders: Sequence[Path]) -> bool:
        """Unmount the volumes in some directories without the mount table, which has all pods' mounts.

        Return whether nothing is mounted there any more. False where more than volumes is mounted, where a
        volume is busy, and where finding that out would cost more than the mount table.
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
            log.warning("Detaching a volume that somebody still uses", path=point, podUID=self._uid)
            unmount(point, detach=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


PATIENCE = 20.0
"""Seconds that a pod's worker waits for unmounting at a time."""
KIND_PATIENCE = 123.0
"""Seconds that it waits for what a kind has to undo: drivers talk to servers."""
BUSY_SECONDS = 60.0
"""After which mounts that somebody uses are detached."""
AT_ONCE = 4
"""How many pods' files are deleted at a time: more threads only keep each other from running."""
TURN_SECONDS = 5.0
"""How long a pod waits for others before its files are deleted beside theirs."""
Count = Callable[[str, str, str, float, bool], None]
"""Counts a volume: the pod's uid, the kind's folder, the name, the seconds it took, whether it is gone."""
_TAKE_DOWN = "taking down"
_UNMOUNT = "unmounting"


class PodUnmounter:
    """Takes down pods' volumes below one root."""

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
        """Since when a pod's volumes cannot be unmounted, in the loop's time."""
        self._working: dict[str, PodVolumeTeardown] = {}
        """What is at work in a thread, by the pod."""

    async def pod(self, uid: str) -> bool:
        """Take down all of a pod's volumes; gives whether others than quick ones were among them.

        Raises VolumeError, and may be called again then.
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
        """Have each kind undo what it did."""
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
                    await in_own_thread(step, name=f"unmount {uid}", patience=0)
                finally:
                    del self._working[uid]

        try:
            await self._operations.run(key, _UNMOUNT, in_thread, patience=PATIENCE, pauses=False)
        except OperationPending as err:
            self._troubled.setdefault(uid, now)
            # It may have been begun by an earlier try.
            point = self._working.get(uid, work).at
            if point is None:
                # Millions of files take their time; a second thread for them would only take it from others.
                raise _failed(uid, "deleting its files takes long, and goes on") from err
            await self._detach(uid, point)
            await self._operations.end(key, _UNMOUNT, patience=PATIENCE)
            raise _failed(uid, f"{point} does not answer, so it is detached") from err
        except OSError as err:
            self._troubled.setdefault(uid, now)
            raise _failed(uid, told(err)) from err

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until few others are at work, but not long: one that hangs must not hold up the rest."""
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
        log.warning("Detaching a mount that does not answer", path=point, podUID=uid)
        try:
            async with asyncio.timeout(PATIENCE):
                await in_own_thread(lambda: unmount(point, detach=True), name=f"detach {uid}", patience=0)
        except TimeoutError:
            raise _failed(uid, f"{point} does not answer, and cannot be detached") from None
        except OSError as err:
            raise _failed(uid, told(err)) from err


def _failed(uid: str, reason: object) -> VolumeError:
    return VolumeError(f"UnmountVolume.TearDown failed for pod {uid} : {reason}")


SECONDS = 60.0
"""How often to look, when no pod leaves."""
UNSTAGE_TIMEOUT_SECONDS = 30.0
"""How long to wait for a kind that looks, in seconds."""


class VolumeGarbageCollector:
    """Has all kinds sweep."""

    def __init__(
        self, kinds: Mapping[str, VolumePlugin], holdings: VolumeState, operations: PendingOperations
    ) -> None:
        self._kinds = kinds
        self._holdings = holdings
        self._operations = operations
        self._due = asyncio.Event()

    def soon(self) -> None:
        """Have it done soon: a pod has left."""
        self._due.set()

    async def run(self, swept: Callable[[], None]) -> NoReturn:
        """Sweep until cancelled; `swept` is called each time after a pod has left."""
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
        """Sweep now; failures are only told."""
        await side_by_side([self._kind(name, kind) for name, kind in self._kinds.items()])

    async def _kind(self, name: str, kind: VolumePlugin) -> None:
        def work() -> Coroutine[Any, Any, None]:
            return kind.sweep(self._holdings.names)

        try:
            await self._operations.run(
                f"all/{name}", "sweeping", work, patience=UNSTAGE_TIMEOUT_SECONDS, pauses=False
            )
        except Exception as err:  # anything may go wrong in others' kinds, and the agent has to go on
            log.error(err, "Could not take down volumes that no pod uses any more", kind=name)
