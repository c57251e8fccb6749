"""The sockets in the folder where plugins make themselves known, as they come and go.

The kernel's events only mean "look again": each look gives all sockets there are, so that nothing depends
on an event that was missed, and a socket that was replaced is told from the one before. Sockets may lie
in folders of their own; names with a dot in front are nobody's business.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pykubelet.host.inotify import Inotify, Mask
from pykubelet.logs import get_logger
from pykubelet.tasks import finish_in_thread

log = get_logger(__name__)

QUIET_SECONDS = 0.02
"""How long to wait after an event, because they come in bursts."""
LOOK_SECONDS = 60.0
"""How often to look without an event: for what the kernel did not tell."""
LOOK_OFTEN_SECONDS = 5.0
"""The same where the kernel gives no events at all."""

_MASK = (
    Mask.CREATE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE_SELF | Mask.MOVE_SELF
) | Mask.ONLYDIR


@dataclass(frozen=True, slots=True)
class SocketIdentity:
    """Tells a socket from another one that took its place."""

    device: int
    inode: int
    made: int
    """When it was made, in nanoseconds; inodes are used again."""


Sockets = Mapping[Path, SocketIdentity]


async def watch_sockets(folder: Path) -> AsyncGenerator[Sockets, None]:
    """Give the sockets below a folder, at once and then after each change.

    The folder is made when it is not there, also later. Close the generator (`aclosing`) when leaving.
    """
    before: Sockets | None = None
    with _Ear() as ear:
        while True:
            # In a thread: a plugin may have filled the directory with any number of files.
            found = await finish_in_thread(lambda: look(folder, ear))
            if found != before:
                yield found
                before = found
            await ear.hear()


def look(folder: Path, ear: _Ear | None = None) -> dict[Path, SocketIdentity]:
    """Return the sockets below a directory, and watch the directories on the way. Blocks."""
    found: dict[Path, SocketIdentity] = {}
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as err:
        log.error(err, "Cannot make the folder where plugins register", path=folder)
        return found
    pending = [folder]
    while pending:
        inside = pending.pop()
        # First listen and then look, or what comes in between is missed.
        if ear is not None:
            ear.listen(inside)
        try:
            with os.scandir(inside) as entries:
                names = [entry.name for entry in entries if not entry.name.startswith(".")]
        except OSError as err:
            log.v(4).info("A folder of plugins is gone", path=inside, err=err)
            continue
        for name in names:
            path = inside / name
            try:
                state = path.stat()
            except OSError:
                continue
            if stat.S_ISSOCK(state.st_mode):
                # Not the time of the last change: plugins give their sockets other modes.
                found[path] = SocketIdentity(state.st_dev, state.st_ino, state.st_mtime_ns)
            elif stat.S_ISDIR(state.st_mode) and not path.is_symlink():
                pending.append(path)
    return found


class _Ear:
    """Hears of changes in folders; where the kernel has no events to give, time passes instead."""

    def __init__(self) -> None:
        self._inotify: Inotify | None = None

    def __enter__(self) -> _Ear:
        try:
            self._inotify = Inotify()
        except OSError as err:
            log.error(err, "Plugins are only noticed by looking again and again")
        return self

    def __exit__(self, *_: object) -> None:
        if self._inotify is not None:
            self._inotify.close()

    def listen(self, folder: Path) -> None:
        if self._inotify is None:
            return
        try:
            self._inotify.watch(folder, _MASK)
        except OSError as err:
            log.v(4).info("Cannot listen to a folder of plugins", path=folder, err=err)

    async def hear(self) -> None:
        """Return soon after something may have changed."""
        if self._inotify is None:
            await asyncio.sleep(LOOK_OFTEN_SECONDS)
            return
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await anext(self._inotify)
            async with asyncio.timeout(QUIET_SECONDS):
                while True:
                    await anext(self._inotify)
                    # A flood of events must not starve the loop, nor the timeout.
                    await asyncio.sleep(0)
        except TimeoutError:
            pass
