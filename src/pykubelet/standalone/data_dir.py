"""Making a directory ours, and knowing that it is.

`down` deletes a directory whole, so it must never be handed a stranger's. A directory is ours when
it holds our marker and marker and directory belong to root (or to whoever we run as); the marker
is the first thing written into a directory that was empty, and the last thing removed.

One at a time: an agent or a `down` holds its data directory with a lock on a file in it.

The kernel gives the lock back when the holder ends in whatever way, so there is no stale lock. The
file says who holds it, for the error message and for `down`, which has to stop an agent.

Who else of us is on this machine.

Private runtimes share a few things: the address space for pods, directories that containerd's shims
and libcni make at fixed places, chains of the packet filter. A link per data directory in
`/run/pykubelet` lets each know of the others; the directory's lock makes their choices one after
the other. It is gone after a reboot and filled again by those that start.

What has to be remembered between starts: choices that must stay, and what was there before us.

The second is how `down` can tell a directory or a packet filter chain that exists because of us
from one that somebody else needs.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

import msgspec

from pykubelet.standalone.instance import AlreadyRunning, DirectoryError, EmbeddedError, Instance

_TEXT = """\
This directory belongs to pykubelet, a Kubernetes node agent.
`pykubelet down --data-dir ...` removes it with everything in it.
"""

# What a fresh file system and an interrupted `down` leave.
_NOTHING = frozenset({"lost+found", "lock"})


def is_ours(instance: Instance) -> bool:
    """Whether the data directory exists and was made ours by `claim`."""
    return _owned(instance.data_dir, stat.S_ISDIR) and _owned(instance.marker, stat.S_ISREG)


def is_untouched(instance: Instance) -> bool:
    """Whether there is nothing at all: no directory, or an empty one that somebody prepared."""
    return not os.path.lexists(instance.data_dir) or _entries(instance.data_dir) == set()


def require_ours(instance: Instance) -> None:
    """Raise DirectoryError when the data directory holds anything but our own things."""
    if not is_ours(instance) and not is_untouched(instance):
        raise DirectoryError(
            f"{instance.data_dir} was not made by pykubelet (it has no {instance.marker.name} file of ours): "
            "nothing in it is touched; choose another --data-dir, or remove it yourself"
        )


def claim(instance: Instance) -> bool:
    """Make the data directory ours; returns whether it was made just now.

    Raises DirectoryError when it holds something else, or cannot be made.
    """
    if is_ours(instance):
        return False
    require_ours(instance)
    directory = instance.data_dir
    try:
        if not directory.parent.is_dir():
            raise DirectoryError(
                f"data directory {directory} cannot be made: its parent does not exist: "
                f"run 'mkdir -p {directory.parent}' first"
            )
        directory.mkdir(mode=0o755, exist_ok=True)
        if directory.stat().st_uid != os.geteuid():
            raise DirectoryError(
                f"data directory {directory} belongs to another user: change its owner or choose another path"
            )
        instance.marker.write_text(_TEXT)
    except OSError as err:
        raise DirectoryError(f"data directory {directory} cannot be used: {err.strerror}") from err
    return True


def make_folders(instance: Instance) -> None:
    """Make the folders in a data directory that is ours."""
    for folder, mode in (
        (instance.manifests, 0o755),
        (instance.kubelet_root, 0o750),
        (instance.pod_logs, 0o755),
        # Containers in a user namespace must be able to pass through to their root file system.
        (instance.containerd, 0o711),
        (instance.cni_conf, 0o755),
    ):
        folder.mkdir(mode=mode, parents=True, exist_ok=True)


def _entries(directory: Path) -> set[str] | None:
    try:
        return {path.name for path in directory.iterdir()} - _NOTHING
    except OSError:
        return None


def _owned(path: Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return is_kind(found.st_mode) and found.st_uid == os.geteuid()


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Who holds a data directory, as far as it has said so."""

    pid: int | None
    purpose: str


@contextmanager
def hold(instance: Instance, purpose: str) -> Iterator[None]:
    """Hold the data directory, which must exist, until the block ends; the purpose is `up` or `down`.

    Raises AlreadyRunning, with the holder's pid, when someone else holds it.
    """
    fd = _lock(instance)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {purpose}\n".encode(), 0)
        yield
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def holder(instance: Instance) -> LockOwner | None:
    """Give the process that holds the data directory; None when nobody does."""
    try:
        fd = os.open(instance.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(fd)
    finally:
        os.close(fd)
    return None


def _lock(instance: Instance) -> int:
    while True:
        try:
            fd = os.open(instance.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as err:
            raise DirectoryError(f"{instance.lock} cannot be opened: {err.strerror}") from err
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = _read(fd)
            os.close(fd)
            raise AlreadyRunning(_refusal(instance, found), found.pid) from None
        # A `down` may have deleted the file between our opening and locking it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), instance.lock.stat()):
                return fd
        os.close(fd)


def _refusal(instance: Instance, found: LockOwner) -> str:
    who = f" with pid {found.pid}" if found.pid else ""
    if found.purpose == "down":
        return f"{instance.data_dir} is being removed{who}: wait until that is done"
    return (
        f"pykubelet is already running{who} on {instance.data_dir}: "
        "stop that one first, or choose another --data-dir"
    )


def _read(fd: int) -> LockOwner:
    """Read who holds the lock; whoever has just taken it may not have written that yet."""
    words = os.pread(fd, 64, 0).split()
    if len(words) == 2 and words[0].isdigit():
        return LockOwner(int(words[0]), words[1].decode(errors="replace"))
    return LockOwner(None, "")


OUTSIDE = (
    Path("/run/containerd/s"),
    Path("/run/containerd"),
    Path("/var/lib/cni/results"),
    Path("/var/lib/cni"),
)
"""Directories that containerd's shims and libcni make at fixed places, children first."""


class State(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of `state.json`."""

    version: int = 1
    boot_id: str
    """The boot in which the state directory was last used."""
    subnet: str
    """The pods' network, such as `10.85.0.0/24`."""
    snapshotter: str
    found_paths: list[str]
    """Those of `OUTSIDE` that nobody of us made."""
    found_chains: list[str]
    """Those shared packet filter chains that nobody of us made."""
    removing: list[str] = []
    """Ids of the containers and sandboxes that `down` has begun to remove.

    A `down` that is interrupted may have removed their files, from which the next one would learn the ids.
    """
    seeds: dict[str, str] = {}
    """For each imported image what it was built from."""


def load(instance: Instance) -> State | None:
    """Read the state; None when there is none yet.

    Raises EmbeddedError when it is damaged.
    """
    try:
        found = msgspec.json.decode(instance.state.read_bytes(), type=State)
        IPv4Network(found.subnet)
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.DecodeError) as err:
        raise EmbeddedError(
            f"{instance.state} is damaged ({err}): "
            f"run 'pykubelet down --data-dir {instance.data_dir}' and start again"
        ) from err


def save(instance: Instance, state: State) -> None:
    """Write the state so that a crash leaves either the old or the new one."""
    text = msgspec.json.format(msgspec.json.encode(state), indent=2)
    draft = instance.state.with_suffix(".new")
    with draft.open("wb") as file:
        file.write(text + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(instance.state)


def before_us(present: Iterable[str], others: Iterable[Iterable[str]]) -> list[str]:
    """Decide which of the things that are present now were made by none of us.

    `others` are the answers that the other private runtimes of this machine gave when they
    started: what one of them did not find is there because of one of us.
    """
    result = set(present)
    for found in others:
        result &= set(found)
    return sorted(result)


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
    fd = await _lock_registry(directory)
    try:
        yield Registry(directory)
    finally:
        with suppress(OSError):
            directory.rmdir()
        os.close(fd)


async def _lock_registry(directory: Path) -> int:
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
