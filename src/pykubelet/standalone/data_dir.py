"""Ownership marker, lock and state of a data directory.

Marker: `down` deletes the whole directory, so it must never act on one that pykubelet did not create. A
directory is pykubelet's if it contains the marker file, and both belong to the user of this process. The
marker is the first file written to an empty directory and the last one removed.

Lock: a kubelet or a `down` holds an flock on a file in the data directory. The kernel releases it when the
process ends in any way, so it is never stale. The file contains the pid and the purpose of the holder, for
error messages and for `down`, which must stop a running kubelet.

State (`state.json`): choices that must survive restarts, and the paths and iptables chains that existed
before the first start, which `down` therefore keeps.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

import msgspec

from pykubelet.standalone.instance import AlreadyRunning, DirectoryError, EmbeddedError, Instance
from pykubelet.util.files import write_atomically

_TEXT = """\
This directory belongs to pykubelet, a Kubernetes node agent.
`pykubelet down --data-dir ...` removes it with everything in it.
"""

# Entries of a new file system, and of an interrupted `down`.
_IGNORED_ENTRIES = frozenset({"lost+found", "lock"})


def is_owned(instance: Instance) -> bool:
    """Return whether the data directory exists and has the marker that `claim` writes."""
    return _is_own_file(instance.data_dir, stat.S_ISDIR) and _is_own_file(instance.marker, stat.S_ISREG)


def is_empty(instance: Instance) -> bool:
    """Return whether the data directory does not exist or is empty."""
    return not os.path.lexists(instance.data_dir) or _entries(instance.data_dir) == set()


def require_owned(instance: Instance) -> None:
    """Raise DirectoryError if the data directory is neither pykubelet's nor empty."""
    if not is_owned(instance) and not is_empty(instance):
        raise DirectoryError(
            f"{instance.data_dir} was not made by pykubelet (it has no {instance.marker.name} file of ours): "
            "nothing in it is touched; choose another --data-dir, or remove it yourself"
        )


def claim(instance: Instance) -> bool:
    """Ensure that the data directory exists with its marker; return whether the marker is new.

    Raises DirectoryError when the directory has other contents or cannot be created.
    """
    if is_owned(instance):
        return False
    require_owned(instance)
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


def closed_directory(path: Path) -> Path | None:
    """Return the outermost directory above or at `path` that other users cannot pass, or None.

    Processes of pods with user namespaces reach the root file systems of their containers as other users.
    """
    for directory in (*reversed(path.parents), path):
        try:
            if not directory.stat().st_mode & 0o001:
                return directory
        except OSError:
            return directory
    return None


def make_directories(instance: Instance) -> None:
    """Ensure that the subdirectories of a claimed data directory exist."""
    for directory, mode in (
        (instance.manifests, 0o755),
        (instance.kubelet_root, 0o750),
        (instance.pod_logs, 0o755),
        # Containers in a user namespace need search permission on the path to their root file system.
        (instance.containerd, 0o711),
        (instance.cni_conf, 0o755),
    ):
        directory.mkdir(mode=mode, parents=True, exist_ok=True)


def _entries(directory: Path) -> set[str] | None:
    try:
        return {path.name for path in directory.iterdir()} - _IGNORED_ENTRIES
    except OSError:
        return None


def _is_own_file(path: Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return is_kind(found.st_mode) and found.st_uid == os.geteuid()


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Process that holds the lock of a data directory, as written in the lock file."""

    pid: int | None
    purpose: str


@contextmanager
def hold_lock(instance: Instance, purpose: str) -> Iterator[None]:
    """Hold the lock of an existing data directory; the purpose is `up` or `down`.

    Raises AlreadyRunning, with the holder's pid, when another process holds it.
    """
    fd = _lock(instance)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {purpose}\n".encode(), 0)
        yield
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def lock_owner(instance: Instance) -> LockOwner | None:
    """Return the process that holds the lock of the data directory, or None."""
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
            raise AlreadyRunning(_lock_message(instance, found), found.pid) from None
        # A `down` may have deleted the file between open and flock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), instance.lock.stat()):
                return fd
        os.close(fd)


def _lock_message(instance: Instance, found: LockOwner) -> str:
    owner_text = f" with pid {found.pid}" if found.pid else ""
    if found.purpose == "down":
        return f"{instance.data_dir} is being removed{owner_text}: wait until that is done"
    return (
        f"pykubelet is already running{owner_text} on {instance.data_dir}: "
        "stop that one first, or choose another --data-dir"
    )


def _read(fd: int) -> LockOwner:
    """Return the holder from the lock file; right after locking it may not be written yet."""
    fields = os.pread(fd, 64, 0).split()
    if len(fields) == 2 and fields[0].isdigit():
        return LockOwner(int(fields[0]), fields[1].decode(errors="replace"))
    return LockOwner(None, "")


SHARED_DIRECTORIES = (
    Path("/run/containerd/s"),
    Path("/run/containerd"),
    Path("/var/lib/cni/results"),
    Path("/var/lib/cni"),
)
"""Directories that containerd's shims and libcni create at fixed paths, children first."""


class State(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Contents of `state.json`."""

    version: int = 1
    boot_id: str
    """Boot ID of the last use of containerd's state directory."""
    subnet: str
    """Pod subnet, such as `10.85.0.0/24`."""
    snapshotter: str
    found_paths: list[str]
    """Paths of `SHARED_DIRECTORIES` that no private runtime created."""
    found_chains: list[str]
    """Shared iptables chains that no private runtime created."""
    removing: list[str] = []
    """IDs of the containers and sandboxes that a `down` has started to remove.

    An interrupted `down` may have removed the files from which the next one would read the IDs.
    """
    seeds: dict[str, str] = {}
    """Fingerprint of the executable that each imported image was built from."""


def load_state(instance: Instance) -> State | None:
    """Return the state, or None if it does not exist yet.

    Raises EmbeddedError when the file is damaged.
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


def save_state(instance: Instance, state: State) -> None:
    """Write the state atomically: a crash leaves either the old or the new one."""
    text = msgspec.json.format(msgspec.json.encode(state), indent=2)
    write_atomically(instance.state, text + b"\n", 0o644, temporary=instance.state.with_suffix(".new"))


def preexisting(present: Iterable[str], found_by_others: Iterable[Iterable[str]]) -> list[str]:
    """Return those of the present names that no private runtime of this host created.

    `found_by_others` are the results of the other private runtimes at their first start: a name that one of
    them did not find was created by a private runtime.
    """
    result = set(present)
    for found in found_by_others:
        result &= set(found)
    return sorted(result)
