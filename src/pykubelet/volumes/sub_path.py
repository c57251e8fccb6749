"""Sub-paths: a part of a volume, found so that nobody in the volume can lead us out of it.

Containers write to volumes while we look, so a path that was checked may be another one when it is
used. Links are therefore resolved once, the result must lie inside of the volume, and then each step
is taken from the folder before it without following links; what is bound is the opened file itself
and no path any more. (`openat2` would take all steps at once, but does not promise more than that, and
calling it from Python takes longer than the steps.)
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
from pykubelet.linux.mounts import Mount, read_mounts, unmount
from pykubelet.logs import get_logger
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.paths import VolumeFolders, make_folder
from pykubelet.volumes.plugin import MountedVolume

log = get_logger(__name__)
_MS_BIND = 4096
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MADE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINK = frozenset((errno.EINVAL, errno.ENOENT, errno.ENOTDIR))
_MOST_LINKS = 40
"""As in the kernel."""


class SubPathEscapeError(OSError):
    """A path leads out of its volume."""


def bind_sub_paths(
    root: Path,
    pod: Pod,
    container: Container,
    mounted: Mapping[str, MountedVolume],
    paths: Mapping[int, str],
) -> dict[int, str]:
    """Bind a container's parts of volumes below the agent's (real) root, and give where they are.

    `paths` is by the mount's index. Raises VolumeError in words that tell nothing of the host. Blocks.
    """
    folders = VolumeFolders.of(root, pod.uid)
    # Nothing is bound below a directory that does not exist, and the mount table has all pods' mounts.
    mounts = read_mounts(folders.sub_paths) if folders.sub_paths.exists() else []
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
            target = folders.sub_path(mounted[name].name or name, container.name, index)
            with opened_inside(Path(mounted[name].path), path) as source:
                bind(source, target, mounts)
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
    """Open what is at a path inside of a volume, as a descriptor that only names it (`O_PATH`).

    Folders that are not there are made, with the mode of the volume's own, unless told not to. Raises
    OSError, of which OutsideError when the path, or a link in it, leads elsewhere.
    """
    base = Path(resolved(str(volume)))
    inside = Path(resolved(f"{volume}/{sub_path}"))
    if not inside.is_relative_to(base):
        raise SubPathEscapeError(errno.EXDEV, "leads out of the volume", f"{volume}/{sub_path}")
    at = os.open(base, _STEP)
    try:
        mode = stat.S_IMODE(os.fstat(at).st_mode)
        for part in inside.relative_to(base).parts:
            try:
                step = _step(at, part)
            except FileNotFoundError:
                if not make:
                    raise
                step = _make(at, part, mode)
            os.close(at)
            at = step
        yield at
    finally:
        os.close(at)


def resolved(path: str) -> str:
    """Give an absolute path without links, `.` and `..`; what is not there is taken by its name.

    Raises OSError for more links than the kernel would follow, too: who writes to a volume could
    keep us busy, and Python's own way ends in a RecursionError.
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
            # A path and not steps, because links may lead elsewhere and back; nothing is opened yet.
            target = str(Path(f"{done}/{part}").readlink())
        except OSError as err:
            if err.errno not in _NO_LINK:
                raise
            done = f"{done}/{part}"
            continue
        links += 1
        if links > _MOST_LINKS:
            raise SubPathEscapeError(errno.ELOOP, "has too many links", path)
        if target.startswith("/"):
            done = ""
        rest += target.split("/")[::-1]
    return done or "/"


def bind(source: int, target: Path, mounts: list[Mount]) -> None:
    """Show an opened file or folder at `target` too; raises OSError.

    `mounts` is the mount table. What is bound there already stays if it is the same.
    """
    given = os.fstat(source)
    while any(mount.point == target for mount in mounts):
        there = target.lstat()
        if (there.st_dev, there.st_ino) == (given.st_dev, given.st_ino):
            return
        unmount(target)
        mounts.remove(next(mount for mount in mounts if mount.point == target))
    make_folder(target.parent)
    _make_place(target, folder=stat.S_ISDIR(given.st_mode))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(f"/proc/self/fd/{source}".encode(), os.fsencode(target), None, _MS_BIND, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def _make_place(target: Path, *, folder: bool) -> None:
    """Have something to mount on; a file will do for everything but folders."""
    if target.is_dir() and not folder:
        target.rmdir()
    elif target.exists() and folder and not target.is_dir():
        target.unlink()
    if folder:
        make_folder(target)
    else:
        target.touch(mode=0o640)


def _step(at: int, part: str) -> int:
    try:
        # Asking for a folder makes an automounter mount it.
        return os.open(part, _STEP | os.O_DIRECTORY, dir_fd=at)
    except NotADirectoryError:
        step = os.open(part, _STEP, dir_fd=at)
    if stat.S_ISLNK(os.fstat(step).st_mode):
        os.close(step)
        raise SubPathEscapeError(errno.ELOOP, "has become a link", part)
    return step


def _make(at: int, part: str, mode: int) -> int:
    try:
        os.mkdir(part, mode, dir_fd=at)
    except FileExistsError:
        return _step(at, part)  # somebody was quicker
    made = os.open(part, _MADE, dir_fd=at)
    try:
        os.fchmod(made, mode)  # mkdir's mode is cut by the umask
    except OSError:
        os.close(made)
        raise
    return made
