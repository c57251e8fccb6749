"""A pod's folder below the agent's root: volumes, plugins, termination logs, /etc/hosts.

The layout and the modes are the reference's, so that a node can be handed over between agents. A
folder is only ever deleted when nothing is mounted below it: a volume's content is not ours.

Names and places that other tools find containers by: logs and links to logs.

Log shippers take pod and container from these paths, so they are the reference's to the letter.
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
"""How many starts of a container are remembered; the runtime keeps fewer dead containers than that."""


class PodDirs:
    """The folders of all pods below one root."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.pods = self.root / "pods"

    def pod(self, uid: str) -> Path:
        """One pod's folder; refuses a uid that is no plain name."""
        if not uid or "/" in uid or uid in (".", ".."):
            raise ValueError(f"{uid!r} is not a pod uid")
        return self.pods / uid

    def volumes(self, uid: str) -> Path:
        """Where the pod's volumes are mounted."""
        return self.pod(uid) / "volumes"

    def hosts_file(self, uid: str) -> Path:
        """The pod's /etc/hosts."""
        return self.pod(uid) / "etc-hosts"

    def make(self, uid: str) -> None:
        """Make the folders that every pod has."""
        for path in (self.root, self.pods, self.pod(uid), self.volumes(uid), self.pod(uid) / "plugins"):
            _make(path)

    def write_hosts(self, uid: str, content: str) -> Path:
        """Write the pod's /etc/hosts in place: running containers have it mounted. Raises OSError.

        Containers can write to the file. At most one byte more than the expected content is read, whatever
        size the file has or gets, and anything but a regular file is replaced.
        """
        path = self.hosts_file(uid)
        data = content.encode()
        opened = _open_regular(path)
        try:
            # On a full disk, writing the same content again would leave containers with an empty file.
            if os.pread(opened, len(data) + 1, 0) != data:
                os.ftruncate(opened, 0)
                left, offset = memoryview(data), 0
                while left:
                    written = os.pwrite(opened, left, offset)
                    left, offset = left[written:], offset + written
                os.fchmod(opened, 0o644)
        finally:
            os.close(opened)
        return path

    def new_termination_log(self, uid: str, container: str) -> Path:
        """Make the file that one start of a container leaves its last words in; anybody may write it."""
        folder = self.pod(uid) / "containers"
        _make(folder)
        folder /= container
        _make(folder)
        path = folder / secrets.token_hex(4)
        path.touch(exist_ok=False)
        path.chmod(0o666)
        _drop_oldest(folder, keep=TERMINATION_LOGS)
        return path

    def uids(self) -> set[str]:
        """Pods that have a folder."""
        try:
            return set(os.listdir(self.pods))  # noqa: PTH208 - a Path per pod every two seconds costs more
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def remove(self, uid: str) -> None:
        """Delete a pod's folder; raises OSError when something is mounted below it."""
        path = self.pod(uid)
        if not path.exists():
            return
        try:
            remove_tree(path)
        except OSError as err:
            # The mount table knows real paths only.
            real = path.parent.resolve() / path.name
            if mounted := plan_unmounts(read_mounts(real), real):
                raise OSError(f"{path} is kept: {mounted[0]} is still mounted") from err
            raise


def _open_regular(path: Path) -> int:
    """Open a regular file for reading and writing, in place of whatever else has its name. Raises OSError."""
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
        path.chmod(0o750)  # the umask cuts mkdir's mode


def _drop_oldest(folder: Path, keep: int) -> None:
    """Keep a crashing container from filling the disk with its last words."""
    newest_first = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in newest_first[keep:]:
        path.unlink(missing_ok=True)


LEGACY_LOG_DIR = "/var/log/containers"
_SUFFIX = ".log"
_LONGEST_FILE_NAME = 255
_ROTATED = re.compile(r"([0-9]{1,9})\.log(?:\..*)?", re.ASCII | re.DOTALL)
_LINK = re.compile(r".*-([^-]{6,})\.log", re.DOTALL)


def pod_log_dir(logs_dir: str, namespace: str, name: str, uid: str) -> str:
    """Where a pod's logs live: `/var/log/pods/default_web_4f…`."""
    return f"{logs_dir.rstrip('/')}/{namespace}_{name}_{uid}"


def container_log_path(container: str, attempt: int) -> str:
    """A container's log file, relative to its pod's folder: `main/0.log`."""
    return f"{container}/{attempt}{_SUFFIX}"


def legacy_log_link(pod: str, namespace: str, container: str, container_id: str) -> str:
    """The file name of the link in /var/log/containers that points to a container's log."""
    stem = f"{pod}_{namespace}_{container}-{container_id}"
    return stem[: _LONGEST_FILE_NAME - len(_SUFFIX)] + _SUFFIX


def pod_uid_of_log_dir(name: str) -> str:
    """The pod whose logs a folder holds, by its name; older agents named it just after the uid."""
    return name.rpartition("_")[2]


def container_id_of_link(name: str) -> str | None:
    """The (perhaps cut) id of the container that a link was made for; None for a foreign file."""
    match = _LINK.fullmatch(name)
    return match[1] if match else None


def attempts_in_logs(file_names: Iterable[str]) -> int:
    """How often a container ran, by the names of its log files.

    A runtime that lost its memory (a reboot) would begin again at 0 and write over old logs.
    """
    found = (_ROTATED.fullmatch(name) for name in file_names)
    return max((int(match[1]) + 1 for match in found if match), default=0)
