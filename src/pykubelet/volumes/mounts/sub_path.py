"""Sub-paths of volumes, resolved so that no process that writes to a volume can lead out of it.

Containers write to volumes concurrently, so a checked path may have changed when it is used. Symlinks are
therefore resolved once, the result must be inside the volume, and then each component is opened from its open
parent without following symlinks; the bind mount is that of the open file, not of a path. (`openat2` would
take all steps in one call, but guarantees no more than that, and calling it from Python takes longer than the
steps.)
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pykubelet.api.pod import Container, Pod
from pykubelet.linux.mounts import MS_BIND, Mount, read_mounts, unmount
from pykubelet.linux.untrusted_files import OPEN_DIRECTORY
from pykubelet.logs import get_logger
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.paths import PodVolumePaths, make_directory
from pykubelet.volumes.plugin import MountedVolume

log = get_logger(__name__)
_OPEN_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_A_LINK = frozenset((errno.EINVAL, errno.ENOENT, errno.ENOTDIR))
_MAX_LINKS = 40
"""Maximum number of symlinks in a path, as in the kernel."""


class SubPathEscapeError(OSError):
    """Raised when a path leads out of its volume, or a symlink in it cannot be followed safely."""


def bind_sub_paths(
    root: Path,
    pod: Pod,
    container: Container,
    mounted: Mapping[str, MountedVolume],
    paths: Mapping[int, str],
) -> dict[int, str]:
    """Bind-mount a container's sub-paths below the kubelet's (real) root; return their paths.

    `paths` is by volume mount index. Raises VolumeError, whose text reveals nothing about the host. Blocks.
    """
    pod_paths = PodVolumePaths.for_pod(root, pod.uid)
    # Without the directory there are no mounts; reading the mount table costs all pods' mounts.
    mounts = read_mounts(pod_paths.sub_paths) if pod_paths.sub_paths.exists() else []
    bound = {}
    for index, path in paths.items():
        name = container.volume_mounts[index].name
        if not path:
            continue
        if name not in mounted:
            raise VolumeError(f'cannot find volume "{name}" to mount into container "{container.name}"')
        if path.startswith("/") or ".." in path.split("/"):
            raise VolumeError(f"subPath `{path}` must be a relative path without '..'")
        try:
            target = pod_paths.sub_path(mounted[name].name or name, container.name, index)
            with opened_inside(Path(mounted[name].path), path) as source:
                bind_opened(source, target, mounts)
        except (OSError, ValueError) as err:
            log.error(
                err,
                "Failed to prepare subPath for volumeMount of the container",
                podUID=pod.uid,
                containerName=container.name,
                volumeMountName=name,
            )
            raise VolumeError(
                f'failed to prepare subPath for volumeMount "{name}" of container "{container.name}"'
            ) from err
        bound[index] = str(target)
    return bound


@contextmanager
def opened_inside(volume: Path, sub_path: str, *, make: bool = True) -> Iterator[int]:
    """Open a path inside a volume and yield an `O_PATH` descriptor.

    Missing directories are created with the mode of the volume's root, unless `make` is false. Raises
    OSError, of which SubPathEscapeError if the path, or a symlink in it, leads out of the volume.
    """
    base = Path(resolved(str(volume)))
    inside = Path(resolved(f"{volume}/{sub_path}"))
    if not inside.is_relative_to(base):
        raise SubPathEscapeError(errno.EXDEV, "leads out of the volume", f"{volume}/{sub_path}")
    at = os.open(base, _OPEN_PATH)
    try:
        mode = stat.S_IMODE(os.fstat(at).st_mode)
        for part in inside.relative_to(base).parts:
            try:
                step = _open_component(at, part)
            except FileNotFoundError:
                if not make:
                    raise
                step = _make_component(at, part, mode)
            os.close(at)
            at = step
        yield at
    finally:
        os.close(at)


def resolved(path: str) -> str:
    """Return an absolute path without symlinks, `.` and `..`; components that do not exist are kept.

    Raises OSError, also for more symlinks than the kernel follows: otherwise a writer to the volume could
    keep the kubelet busy, and Python's own resolution ends in a RecursionError.
    """
    absolute = path if path.startswith("/") else f"{Path.cwd()}/{path}"
    done, rest, links = "", absolute.split("/")[::-1], 0
    while rest:
        part = rest.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = done.rpartition("/")[0]
            continue
        try:
            # By path, because symlinks may lead out of the volume and back; nothing is opened yet.
            target = str(Path(f"{done}/{part}").readlink())
        except OSError as err:
            if err.errno not in _NOT_A_LINK:
                raise
            done = f"{done}/{part}"
            continue
        links += 1
        if links > _MAX_LINKS:
            raise SubPathEscapeError(errno.ELOOP, "has too many links", path)
        if target.startswith("/"):
            done = ""
        rest += target.split("/")[::-1]
    return done or "/"


def bind_opened(source: int, target: Path, mounts: list[Mount]) -> None:
    """Bind-mount an open file or directory at `target`. Raises OSError.

    `mounts` is the mount table. An existing mount of the same inode is kept.
    """
    source_status = os.fstat(source)
    while any(mount.point == target for mount in mounts):
        target_status = target.lstat()
        if (target_status.st_dev, target_status.st_ino) == (source_status.st_dev, source_status.st_ino):
            return
        unmount(target)
        mounts.remove(next(mount for mount in mounts if mount.point == target))
    make_directory(target.parent)
    _make_mount_point(target, is_directory=stat.S_ISDIR(source_status.st_mode))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(f"/proc/self/fd/{source}".encode(), os.fsencode(target), None, MS_BIND, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def _make_mount_point(target: Path, *, is_directory: bool) -> None:
    """Create the mount point: a directory for a directory, a file for everything else."""
    if target.is_dir() and not is_directory:
        target.rmdir()
    elif target.exists() and is_directory and not target.is_dir():
        target.unlink()
    if is_directory:
        make_directory(target)
    else:
        target.touch(mode=0o640)


def _open_component(at: int, part: str) -> int:
    try:
        # O_DIRECTORY triggers an automount.
        return os.open(part, _OPEN_PATH | os.O_DIRECTORY, dir_fd=at)
    except NotADirectoryError:
        step = os.open(part, _OPEN_PATH, dir_fd=at)
    if stat.S_ISLNK(os.fstat(step).st_mode):
        os.close(step)
        raise SubPathEscapeError(errno.ELOOP, "has become a link", part)
    return step


def _make_component(at: int, part: str, mode: int) -> int:
    try:
        os.mkdir(part, mode, dir_fd=at)
    except FileExistsError:
        return _open_component(at, part)  # created concurrently
    descriptor = os.open(part, OPEN_DIRECTORY, dir_fd=at)
    try:
        os.fchmod(descriptor, mode)  # mkdir applies the umask
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
