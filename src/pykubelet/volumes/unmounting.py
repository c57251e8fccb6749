"""Taking down a pod's volumes so that a pod can always be deleted.

First the parts that containers had, then whatever each kind has to undo, then the mounts and the files.
A mount that does not answer is waited for, then detached by force; one that somebody else keeps busy is
told of, tried again, and detached after a while: it ends when its last user does. Only what is mounted
nowhere any more is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from pykubelet.host.mounts import unmount
from pykubelet.logs import get_logger
from pykubelet.tasks import in_own_thread
from pykubelet.volumes.errors import VolumeError, told
from pykubelet.volumes.kind import VolumeKind
from pykubelet.volumes.operations import FAILURES, Operations, StillBusy
from pykubelet.volumes.take_down import TakeDown
from pykubelet.volumes.together import side_by_side

log = get_logger(__name__)

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


class Unmounting:
    """Takes down pods' volumes below one root."""

    def __init__(
        self,
        root: Path,
        kinds: Mapping[str, VolumeKind],
        operations: Operations,
        count: Count = lambda uid, folder, name, seconds, well: None,
    ) -> None:
        self._root = root
        self._count = count
        self._kinds = {kind.folder: kind for kind in kinds.values() if kind.folder}
        self._operations = operations
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._troubled: dict[str, float] = {}
        """Since when a pod's volumes cannot be unmounted, in the loop's time."""
        self._working: dict[str, TakeDown] = {}
        """What is at work in a thread, by the pod."""

    async def pod(self, uid: str) -> bool:
        """Take down all of a pod's volumes; gives whether others than quick ones were among them.

        Raises VolumeError, and may be called again then.
        """
        now = asyncio.get_running_loop().time()
        try:
            work = TakeDown(
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

    async def _unmount(self, uid: str, work: TakeDown, step: Callable[[], None]) -> None:
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
        except StillBusy as err:
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
