"""A pod's folder below the agent's root: volumes, plugins, termination logs, /etc/hosts.

The layout and the modes are the reference's, so that a node can be handed over between agents. A
folder is only ever deleted when nothing is mounted below it: a volume's content is not ours.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from pykubelet.host.mounts import plan_unmounts, read_mounts, remove_tree

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
