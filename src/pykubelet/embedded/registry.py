"""Who else of us is on this machine.

Private runtimes share a few things: the address space for pods, directories that containerd's shims
and libcni make at fixed places, chains of the packet filter. A link per data directory in
`/run/pykubelet` lets each know of the others; the directory's lock makes their choices one after
the other. It is gone after a reboot and filled again by those that start.
"""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pykubelet.embedded.claim import is_ours
from pykubelet.embedded.errors import EmbeddedError
from pykubelet.embedded.instance import Instance
from pykubelet.embedded.state import State, load

DIRECTORY = Path("/run/pykubelet")
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Registry:
    """The registry while it is locked."""

    directory: Path

    def others(self, instance: Instance) -> list[State]:
        """Give the states of all other private runtimes; those that no longer exist are forgotten."""
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

    def enter(self, instance: Instance) -> None:
        """Make this one known."""
        with suppress(FileExistsError):
            (self.directory / instance.name).symlink_to(instance.data_dir)

    def leave(self, instance: Instance) -> None:
        """Forget this one."""
        (self.directory / instance.name).unlink(missing_ok=True)


@asynccontextmanager
async def open_registry(directory: Path = DIRECTORY) -> AsyncIterator[Registry]:
    """Hold the machine's registry; it vanishes when nobody is left in it."""
    fd = await _lock(directory)
    try:
        yield Registry(directory)
    finally:
        with suppress(OSError):
            directory.rmdir()
        os.close(fd)


async def _lock(directory: Path) -> int:
    deadline = asyncio.get_running_loop().time() + _PATIENCE
    while True:
        try:
            directory.mkdir(mode=0o755, exist_ok=True)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            # Someone left and took the directory along; make it again.
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
                f"{directory} has been locked for {_PATIENCE:g} s by another pykubelet: try again"
            )
        await asyncio.sleep(0.02)


def _state_of(entry: Path) -> State | None:
    try:
        other = Instance.at(entry.readlink())
        # A link that does not bear its target's name is not one that `enter` made.
        return load(other) if other.name == entry.name and is_ours(other) else None
    except (OSError, EmbeddedError):
        return None
