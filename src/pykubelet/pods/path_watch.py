"""Hearing that something at a path may have changed, soon and not too often.

inotify speaks of folders and inodes, while people replace whole folders, move files over others and
point symbolic links elsewhere. So the folder above a path is watched as well as the path itself,
and the folders that links lead to; whatever is heard only means "look again". A burst of events, as
every editor makes, is one wake-up: at most `LONGEST_BURST` seconds after its first event.

Files that someone has begun to write and not closed yet are known too, so that nobody reads half a
file: until it is closed, or `SETTLED_AFTER` seconds have passed without another write. Likewise those that
were deleted or moved away, because a file of the same name and content may be back before anybody looks.
"""

from __future__ import annotations

import asyncio
import errno
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from pykubelet.host.inotify import Event, Inotify, Mask
from pykubelet.logs import get_logger

log = get_logger(__name__)

QUIET = 0.02
"""Seconds without an event that end a burst."""
LONGEST_BURST = 0.06
SETTLED_AFTER = 1.0

Names = frozenset[str]
"""The files in a watched folder that matter; none means all of them."""

_ALL: Names = frozenset()
_REMOVED = Mask.DELETE | Mask.MOVED_FROM
_CLOSED = Mask.CLOSE_WRITE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE
_MASK = _CLOSED | Mask.CREATE | Mask.MODIFY | Mask.ATTRIB | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
_LONGEST_CHAIN = 10


class PathWatch:
    """A wake-up call for paths; use it as a context manager, from one task.

    Where the kernel gives no inotify instance it says so and then only waits, so that its owner
    looks again when the time is up.
    """

    def __init__(self) -> None:
        self._inotify: Inotify | None = None
        self._armed: dict[int, tuple[Path, Names]] = {}
        self._writing: dict[Path, float] = {}
        self._removed: set[Path] = set()
        self._woken = False
        """Whether an event that matters was read outside of `wait`."""
        self._complaint = ""

    def __enter__(self) -> Self:
        try:
            self._inotify = Inotify()
        except OSError as err:
            log.error(err, "Changes of files are only noticed by the periodic check")
        return self

    def __exit__(self, *_: object) -> None:
        if self._inotify is not None:
            self._inotify.close()

    def arm(self, folders: Mapping[Path, Names]) -> None:
        """Listen to these folders and to no others. Arm first and look then, or a change may be missed."""
        if self._inotify is None:
            return
        armed: dict[int, tuple[Path, Names]] = {}
        for folder, names in folders.items():
            try:
                number = self._inotify.watch(folder, _MASK)
            except OSError as err:
                self._complain(err)
                continue
            # Two paths may lead to the same folder.
            known = armed.get(number)
            armed[number] = (folder, names if known is None else _both(names, known[1]))
        for number in self._armed.keys() - armed.keys():
            self._inotify.unwatch(number)
        self._armed = armed

    def being_written(self) -> frozenset[Path]:
        """The files that are open for writing and have been written to, as far as was heard."""
        now = asyncio.get_running_loop().time()
        self._writing = {path: until for path, until in self._writing.items() if until > now}
        return frozenset(self._writing)

    def take_removed(self) -> set[Path]:
        """Return the files that were deleted or moved away between the last call and this one.

        They may exist again. The next `wait` returns soon if anything else happened up to now.
        """
        for event in self._inotify.read_queued() if self._inotify is not None else ():
            self._woken = self._matters(event) or self._woken
        removed, self._removed = self._removed, set()
        return removed

    async def wait(self, timeout: float) -> None:
        """Return soon after something may have changed, or after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        woken, self._woken = self._woken, False
        if woken or await self._heard(timeout):
            end = loop.time() + LONGEST_BURST
            while (left := end - loop.time()) > 0 and await self._heard(min(QUIET, left)):
                pass

    async def _heard(self, timeout: float) -> bool:
        if self._inotify is None:
            await asyncio.sleep(timeout)
            return False
        try:
            async with asyncio.timeout(timeout):
                async for event in self._inotify:
                    if self._matters(event):
                        return True
                    # A neighbour's flood of events must not starve the loop.
                    await asyncio.sleep(0)
        except TimeoutError:
            pass
        return False

    def _matters(self, event: Event) -> bool:
        if event.overflowed:
            self._writing.clear()
            return True
        folder, names = self._armed.get(event.watch, (None, _ALL))
        if folder is None or (event.name and names and event.name not in names):
            return False
        path = folder / event.name
        if event.mask & _REMOVED:
            self._removed.add(path)
        if event.mask & Mask.MODIFY:
            self._writing[path] = asyncio.get_running_loop().time() + SETTLED_AFTER
        elif event.mask & _CLOSED:
            self._writing.pop(path, None)
        return True

    def _complain(self, err: OSError) -> None:
        # What is gone or no folder any more is seen by the look that follows.
        if err.errno not in (errno.ENOENT, errno.ENOTDIR) and str(err) != self._complaint:
            self._complaint = str(err)
            log.error(err, "Changes of files are only noticed by the periodic check")


def folders_around(path: Path) -> dict[Path, Names]:
    """Give the folders to watch for a file or folder of files that may not exist yet, or be a link."""
    folders: dict[Path, Names] = {}

    def add(folder: Path, names: Names) -> None:
        folders[folder] = _both(names, folders[folder]) if folder in folders else names

    for link in links(path):
        folder, name = link.parent, link.name
        while not folder.is_dir() and folder != folder.parent:
            folder, name = folder.parent, folder.name
        add(folder, frozenset((name,)))
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            add(path, _ALL)
            for file in path.iterdir():
                if not file.name.startswith(".") and file.is_symlink():
                    for link in list(links(file))[1:]:
                        add(link.parent, frozenset((link.name,)))
    except OSError as err:
        log.v(4).info("Could not look into the folder to watch", path=path, err=err)
    return folders


def links(path: Path) -> Iterator[Path]:
    """Give a path and, while it is a symbolic link, the paths that it leads to."""
    for _ in range(_LONGEST_CHAIN):
        yield path
        try:
            path = path.parent / path.readlink()
        except OSError:
            return


def _both(one: Names, other: Names) -> Names:
    return one | other if one and other else _ALL
