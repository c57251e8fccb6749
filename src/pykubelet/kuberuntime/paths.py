"""Pod directories below the kubelet's root directory, and paths of container logs.

    <root>/pods/<uid>/volumes, plugins              mode 0750
    <root>/pods/<uid>/containers/<name>/<random>    termination log of one start, mode 0666
    <root>/pods/<uid>/etc-hosts                     mode 0644

Layout, modes and log paths are upstream's: a node can be switched between kubelets, and log shippers parse
pod and container from the paths. A pod directory is deleted only when nothing is mounted below it, because
the content of a volume does not belong to the kubelet.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from pykubelet.linux.mounts import plan_unmounts, read_mounts, remove_tree

TERMINATION_LOGS = 5
"""Number of termination logs kept per container, more than the runtime keeps dead containers."""


class PodDirs:
    """Directories of all pods below one root directory."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.pods = self.root / "pods"

    def pod(self, uid: str) -> Path:
        """Return a pod's directory. Raises ValueError for an invalid UID."""
        if not uid or "/" in uid or uid in (".", ".."):
            raise ValueError(f"{uid!r} is not a pod uid")
        return self.pods / uid

    def volumes(self, uid: str) -> Path:
        """Return the directory of the pod's volumes."""
        return self.pod(uid) / "volumes"

    def hosts_file(self, uid: str) -> Path:
        """Return the path of the pod's /etc/hosts."""
        return self.pod(uid) / "etc-hosts"

    def make(self, uid: str) -> None:
        """Ensure that the directories of a pod exist."""
        for path in (self.root, self.pods, self.pod(uid), self.volumes(uid), self.pod(uid) / "plugins"):
            _make(path)

    def write_hosts(self, uid: str, content: str) -> Path:
        """Write the pod's /etc/hosts in place, because running containers have it mounted. Raises OSError.

        Containers can write to the file. At most one byte more than the expected content is read, whatever
        its size, and anything but a regular file is replaced.
        """
        path = self.hosts_file(uid)
        data = content.encode()
        opened = _open_regular(path)
        try:
            # On a full disk, rewriting the same content would leave containers with an empty file.
            if os.pread(opened, len(data) + 1, 0) != data:
                os.ftruncate(opened, 0)
                unwritten, offset = memoryview(data), 0
                while unwritten:
                    written = os.pwrite(opened, unwritten, offset)
                    unwritten, offset = unwritten[written:], offset + written
                os.fchmod(opened, 0o644)
        finally:
            os.close(opened)
        return path

    def new_termination_log(self, uid: str, container: str) -> Path:
        """Create the termination log of one start of a container; it is world-writable."""
        directory = self.pod(uid) / "containers"
        _make(directory)
        directory /= container
        _make(directory)
        path = directory / secrets.token_hex(4)
        path.touch(exist_ok=False)
        path.chmod(0o666)
        _remove_oldest(directory, keep=TERMINATION_LOGS)
        return path

    def uids(self) -> set[str]:
        """Return the UIDs of pods that have a directory."""
        try:
            return set(os.listdir(self.pods))  # noqa: PTH208 - a Path per pod every two seconds costs more
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def remove(self, uid: str) -> None:
        """Delete a pod's directory. Raises OSError when something is mounted below it."""
        path = self.pod(uid)
        if not path.exists():
            return
        try:
            remove_tree(path)
        except OSError as err:
            # The mount table contains resolved paths only.
            real = path.parent.resolve() / path.name
            if mounted := plan_unmounts(read_mounts(real), real):
                raise OSError(f"{path} is kept: {mounted[0]} is still mounted") from err
            raise


def _open_regular(path: Path) -> int:
    """Open a regular file for reading and writing, replacing any other file type. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        opened = os.open(path, flags, 0o644)
        if stat.S_ISREG(os.fstat(opened).st_mode):
            return opened
        os.close(opened)
    except OSError as err:
        if err.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    remove_tree(path)
    return os.open(path, flags | os.O_EXCL, 0o644)


def _make(path: Path) -> None:
    if not path.is_dir():
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
        path.chmod(0o750)  # mkdir applies the umask to its mode


def _remove_oldest(directory: Path, keep: int) -> None:
    """Delete the oldest files, so that a crashing container does not fill the disk."""
    newest_first = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in newest_first[keep:]:
        path.unlink(missing_ok=True)


LEGACY_LOG_DIR = "/var/log/containers"
_SUFFIX = ".log"
_LONGEST_FILE_NAME = 255
_ROTATED = re.compile(r"([0-9]{1,9})\.log(?:\..*)?", re.ASCII | re.DOTALL)
_LINK = re.compile(r".*-([^-]{6,})\.log", re.DOTALL)


def pod_log_dir(logs_dir: str, namespace: str, name: str, uid: str) -> str:
    """Return the directory of a pod's logs: `/var/log/pods/default_web_4f…`."""
    return f"{logs_dir.rstrip('/')}/{namespace}_{name}_{uid}"


def container_log_path(container: str, attempt: int) -> str:
    """Return the path of a container's log, relative to the pod's log directory: `main/0.log`."""
    return f"{container}/{attempt}{_SUFFIX}"


def legacy_log_link(pod: str, namespace: str, container: str, container_id: str) -> str:
    """Return the file name of the link in /var/log/containers to a container's log."""
    stem = f"{pod}_{namespace}_{container}-{container_id}"
    return stem[: _LONGEST_FILE_NAME - len(_SUFFIX)] + _SUFFIX


def pod_uid_of_log_dir(name: str) -> str:
    """Return the pod UID of a log directory by its name; older kubelets used the UID alone."""
    return name.rpartition("_")[2]


def container_id_of_link(name: str) -> str | None:
    """Return the container ID of a link, possibly truncated; None for an unrelated file."""
    match = _LINK.fullmatch(name)
    return match[1] if match else None


def attempts_in_logs(file_names: Iterable[str]) -> int:
    """Return the number of starts of a container, by the names of its log files.

    A runtime that lost its state (a reboot) would begin at 0 and overwrite old logs.
    """
    found = (_ROTATED.fullmatch(name) for name in file_names)
    return max((int(match[1]) + 1 for match in found if match), default=0)
