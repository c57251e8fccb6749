"""Registry of the private runtimes of this host (`/run/pykubelet`): one symbolic link per data directory.

Private runtimes share the address space of pods, fixed directories of containerd's shims and libcni, and
iptables chains; the directory's lock serializes their choices. It is empty after a reboot and filled again by
each start.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pykubelet.standalone.data_dir import State, is_owned, load_state
from pykubelet.standalone.instance import EmbeddedError, Instance

DIRECTORY = Path("/run/pykubelet")
_LOCK_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Registry:
    """Locked registry of the private runtimes of this host."""

    directory: Path

    def other_states(self, instance: Instance) -> list[State]:
        """Return the states of all other private runtimes; remove entries of those that no longer exist."""
        states = []
        for entry in self.directory.iterdir():
            if entry.name == instance.name:
                continue
            state = _state_of(entry)
            if state is None:
                entry.unlink(missing_ok=True)
            else:
                states.append(state)
        return states

    def register(self, instance: Instance) -> None:
        """Register this private runtime."""
        with suppress(FileExistsError):
            (self.directory / instance.name).symlink_to(instance.data_dir)

    def unregister(self, instance: Instance) -> None:
        """Unregister this private runtime."""
        (self.directory / instance.name).unlink(missing_ok=True)


@asynccontextmanager
async def open_registry(directory: Path = DIRECTORY) -> AsyncIterator[Registry]:
    """Lock the registry of the host; its directory is removed at exit if it is empty."""
    fd = await _lock_registry(directory)
    try:
        yield Registry(directory)
    finally:
        with suppress(OSError):
            directory.rmdir()
        os.close(fd)


async def _lock_registry(directory: Path) -> int:
    deadline = asyncio.get_running_loop().time() + _LOCK_TIMEOUT_SECONDS
    while True:
        try:
            directory.mkdir(mode=0o755, exist_ok=True)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            # Another process removed the empty directory; create it again.
            continue
        except OSError as err:
            raise EmbeddedError(f"{directory} cannot be used: {err.strerror}: root is needed") from err
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), directory.stat()):
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
        if asyncio.get_running_loop().time() > deadline:
            raise EmbeddedError(
                f"{directory} has been locked for {_LOCK_TIMEOUT_SECONDS:g} s by another pykubelet: try again"
            )
        await asyncio.sleep(0.02)


def _state_of(entry: Path) -> State | None:
    try:
        other = Instance.at(entry.readlink())
        # `register` creates only links that have the name of their target.
        return load_state(other) if other.name == entry.name and is_owned(other) else None
    except (OSError, EmbeddedError):
        return None
