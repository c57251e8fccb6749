"""Volumes whose files the kubelet writes (configMap, secret, downwardAPI, projected), updated atomically.

Each volume is an emptyDir, created once and marked when complete; content that may be secret is on tmpfs
only. The files are in a directory of their own, and all that readers see leads there through one symlink:

    ..2026_01_31_12_00_00.123456789/   the files
    ..data -> ..2026_01_31_12_00_00.123456789
    name -> ..data/name                one for each first component of the files' paths

A new version is written to a new directory, then `..data` is replaced by rename(2): a reader sees all of the
old version or all of the new one, also when the kubelet is killed at any point. The next write removes what a
killed process left. Nothing is written if nothing has changed, so setting a volume up again brings it up to
date. Sub-paths of such a volume keep showing the version they were bound to.

Paths come from users and API objects: a path that leaves the volume or starts with the reserved `..` is
rejected before anything is written. Containers mount these volumes read-only. If one writes nevertheless, it
gains nothing: each component is opened from its open parent, no symlink is followed, and nothing that is
mounted inside is deleted. Mount points of other volumes inside such a volume are created here, because the
runtime cannot create them in a read-only volume.
"""

from __future__ import annotations

import errno
import os
import posixpath
import secrets
import stat
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pykubelet.api.pod import Container, Pod
from pykubelet.api.volume import KeyToPath
from pykubelet.linux.untrusted_files import OPEN_DIRECTORY, remove_entry
from pykubelet.logs import get_logger
from pykubelet.objects.base import ObjectNotFound
from pykubelet.util.tasks import finish_in_thread
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.ownership import group_mode, set_group
from pykubelet.volumes.paths import PodVolumePaths
from pykubelet.volumes.plugin import MountedVolume, VolumeHost
from pykubelet.volumes.plugins.empty_dir import MEMORY, make_empty_dir, memory_options

log = get_logger(__name__)
MAX_PATH_LENGTH = 4096
MAX_NAME_LENGTH = 255
MAX_DEPTH = 64
"""Maximum number of directories above a file."""
_PERMISSIONS = 0o777


@dataclass(frozen=True, slots=True, repr=False)
class File:
    """Content, mode and owner of a file; `user` None is the kubelet's user. The repr hides the content."""

    data: bytes
    mode: int
    user: int | None = None

    def __repr__(self) -> str:
        return f"File({len(self.data)} bytes, mode={self.mode:#o}, user={self.user})"


Files = Mapping[str, File]
"""Files by their paths in the volume."""
Tree = dict[str, "File | Tree"]
"""Files by directory."""


async def object_files(
    read: Awaitable[Mapping[str, bytes]],
    items: Sequence[KeyToPath],
    mode: int,
    *,
    optional: bool,
    missing: str,
) -> dict[str, File]:
    """Return the files of the API object whose data `read` returns; none if it is missing and `optional`.

    Raises ObjectError, and VolumePluginError with `missing` for a missing key.
    """
    data: Mapping[str, bytes] = {}
    try:
        data = await read
    except ObjectNotFound:
        if not optional:
            raise
    return files_for_keys(data, items, mode, optional=optional, missing=missing)


def files_for_keys(
    data: Mapping[str, bytes], items: Sequence[KeyToPath], mode: int, *, optional: bool, missing: str
) -> dict[str, File]:
    """Return the files for an object's data: one per key, or one per item if there are items.

    An item whose key is missing is skipped if `optional`. Otherwise raises VolumePluginError with `missing`
    and the key.
    """
    if not items:
        return {key: File(value, mode) for key, value in data.items()}
    files = {}
    for item in items:
        if item.key in data:
            files[item.path] = File(data[item.key], mode if item.mode is None else item.mode)
        elif not optional:
            raise VolumePluginError(f"{missing}: {item.key}")
    return files


def build_tree(files: Files) -> Tree:
    """Arrange files by directory. Raises VolumePluginError for a path that is invalid in a volume."""
    tree: Tree = {}
    for path, file in files.items():
        *directories, name = checked_path(path).split("/")
        directory = tree
        for part in directories:
            inner = directory.setdefault(part, {})
            if isinstance(inner, File):
                raise VolumePluginError(f"invalid path: {part} cannot be a file and a folder: {path}")
            directory = inner
        if isinstance(directory.get(name), dict):
            raise VolumePluginError(f"invalid path: {name} cannot be a file and a folder: {path}")
        # Setuid and setgid bits would create executables that run as the kubelet's user.
        directory[name] = replace(file, mode=file.mode & _PERMISSIONS)
    return tree


def checked_path(path: str) -> str:
    """Return the normalized path. Raises VolumePluginError if it is not a valid path inside a volume."""
    parts = path.split("/")
    try:
        longest = max(len(part.encode()) for part in parts)
    except UnicodeEncodeError as err:
        raise VolumePluginError(f"invalid path: must be text: {path!r}") from err
    clean = posixpath.normpath(path)
    problem = ""
    if clean == "." or "\0" in path:
        problem = f"must name a file: {path!r}"
    elif path.startswith("/"):
        problem = f"must be relative path: {path}"
    elif len(path.encode()) > MAX_PATH_LENGTH:
        problem = f"must be less than or equal to {MAX_PATH_LENGTH} characters"
    elif ".." in parts:
        problem = f"must not contain '..': {path}"
    elif longest > MAX_NAME_LENGTH:
        problem = f"filenames must be less than or equal to {MAX_NAME_LENGTH} characters"
    elif clean.startswith(".."):
        problem = f"must not start with '..': {path}"
    elif clean.count("/") > MAX_DEPTH:
        problem = f"must not have more than {MAX_DEPTH} folders"
    if problem:
        raise VolumePluginError(f"invalid path: {problem}")
    return clean


_MOUNT_POINT_MODE = 0o755


def nested_mount_points(pod: Pod, volume: str) -> list[str]:
    """Return the paths in a volume on which a container mounts other volumes. Raises VolumePluginError.

    Only the outermost ones: mounts below those are inside the other volume. Reserved names (leading `..`) are
    omitted.
    """
    spec = pod.spec
    found: dict[str, None] = {}
    for container in (*spec.init_containers, *spec.containers, *spec.ephemeral_containers):
        if len(container.volume_mounts) > 1:
            found |= dict.fromkeys(_points_in_container(container, volume))
    return [point for point in found if not point.startswith("..")]


def make_mount_points(volume: Path, points: list[str]) -> None:
    """Create directories in a volume without following symlinks. Raises OSError. Blocks."""
    if not points:
        return
    root = os.open(volume, OPEN_DIRECTORY)
    try:
        for point in points:
            _make(root, point.split("/"))
    finally:
        os.close(root)


def _points_in_container(container: Container, volume: str) -> list[str]:
    cleaned = [(mount.name, _clean(mount.mount_path)) for mount in container.volume_mounts]
    mount_paths = sorted({path for _, path in cleaned})
    points = []
    for outer in (path for name, path in cleaned if name == volume):
        if outer == ".." or outer.startswith("../"):
            raise VolumePluginError(f"invalid container mount point {outer}")
        inside: list[str] = []
        for mount_path in mount_paths:
            if mount_path.startswith(f"{outer}/") and not any(
                mount_path.startswith(f"{known}/") for known in inside
            ):
                inside.append(mount_path)
        points += [mount_path.removeprefix(f"{outer}/") for mount_path in inside]
    return points


def _clean(path: str) -> str:
    clean = posixpath.normpath(path)
    return f"/{clean.lstrip('/')}" if clean.startswith("/") else clean


def _make(root: int, parts: list[str]) -> None:
    at = os.dup(root)
    try:
        for part in parts:
            with suppress(FileExistsError):
                os.mkdir(part, _MOUNT_POINT_MODE, dir_fd=at)
            try:
                directory = os.open(part, OPEN_DIRECTORY, dir_fd=at)
            except OSError as err:
                if err.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                # A file or symlink of the volume has this path. The runtime may be able to mount on it, or
                # reports the error; the volume itself is valid.
                return
            os.close(at)
            at = directory
    finally:
        os.close(at)


DATA = "..data"
NEXT = "..data_tmp"
_HIDDEN = ".."
_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# Nonblocking: opening a FIFO in place of a file would wait for a writer.
_OPEN_EXISTING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY_MODE = 0o755


def publish(volume: Path, files: Files, group: int | None = None, *, moment: float) -> bool:
    """Replace the files of a volume, readable by `group` if set; return whether a new version was written.

    `moment` (seconds since the epoch) is the time in the name of the version's directory. Raises
    VolumePluginError for invalid paths before anything is changed, and OSError, after which readers still see
    the previous version. Blocks.
    """
    tree = build_tree(files)
    root = os.open(volume, OPEN_DIRECTORY)
    try:
        version = _current(root)
        changed = version is None or not _has_content(root, version, tree)
        if version is None or changed:
            version = _write_version(root, tree, group, moment)
        _update_links(root, version, tree)
        return changed
    finally:
        os.close(root)


def _current(root: int) -> str | None:
    try:
        version = os.readlink(DATA, dir_fd=root)
    except FileNotFoundError:
        return None
    except OSError as err:
        if err.errno == errno.EINVAL:
            return None
        raise
    is_valid = version.startswith(_HIDDEN) and "/" not in version and version not in (_HIDDEN, DATA, NEXT)
    return version if is_valid else None


def _has_content(at: int, name: str, expected: File | Tree) -> bool:
    """Return whether an entry of an open directory has exactly this content."""
    try:
        opened = os.open(name, _OPEN_EXISTING, dir_fd=at)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as err:
        if err.errno in (errno.ELOOP, errno.ENXIO):
            return False
        raise
    try:
        found = os.fstat(opened)
        if isinstance(expected, dict):
            if not stat.S_ISDIR(found.st_mode) or set(_entry_names(opened)) != expected.keys():
                return False
            return all(_has_content(opened, inner, file) for inner, file in expected.items())
        if not stat.S_ISREG(found.st_mode) or found.st_size != len(expected.data):
            return False
        with open(opened, "rb", closefd=False) as file:
            # Bounded: a process that can write the file may have extended it since.
            return file.read(len(expected.data) + 1) == expected.data
    finally:
        os.close(opened)


def _write_version(root: int, tree: Tree, group: int | None, moment: float) -> str:
    version = _new_name(moment)
    os.mkdir(version, 0o700, dir_fd=root)
    try:
        _fill(root, version, tree, group)
        remove_entry(root, NEXT)
        os.symlink(version, NEXT, dir_fd=root)
        os.rename(NEXT, DATA, src_dir_fd=root, dst_dir_fd=root)
    except OSError:
        with suppress(OSError):
            remove_entry(root, version)
        raise
    return version


def _new_name(moment: float) -> str:
    return f"{time.strftime('..%Y_%m_%d_%H_%M_%S', time.gmtime(moment))}.{secrets.randbelow(10**10):010}"


def _fill(at: int, name: str, tree: Tree, group: int | None) -> None:
    """Write files into a new directory, and make it accessible when it is complete."""
    directory = os.open(name, OPEN_DIRECTORY, dir_fd=at)
    try:
        for inner, content in tree.items():
            if isinstance(content, dict):
                os.mkdir(inner, 0o700, dir_fd=directory)
                _fill(directory, inner, content, group)
            else:
                _write_file(directory, inner, content, group)
        _set_owner_and_mode(directory, _DIRECTORY_MODE, None, group, is_directory=True)
    finally:
        os.close(directory)


def _write_file(directory: int, name: str, file: File, group: int | None) -> None:
    opened = os.open(name, _OPEN_NEW, 0o600 & file.mode, dir_fd=directory)
    try:
        left = memoryview(file.data)
        while left:
            left = left[os.write(opened, left) :]
        _set_owner_and_mode(opened, file.mode, file.user, group, is_directory=False)
    finally:
        os.close(opened)


def _set_owner_and_mode(
    opened: int, mode: int, user: int | None, group: int | None, *, is_directory: bool
) -> None:
    if user is not None:
        os.fchown(opened, user, -1)
    if group is not None:
        set_group(opened, group)
        mode = group_mode(mode, is_directory=is_directory, read_only=True)
    os.fchmod(opened, mode)


def _update_links(root: int, version: str, tree: Tree) -> None:
    """Ensure that the symlinks to the files exist, and remove stale ones and stale versions.

    Directories on which other volumes are mounted are kept, even where a symlink belongs.
    """
    present = set()
    for name in _entry_names(root):
        if name.startswith(_HIDDEN):
            if name not in (DATA, version):
                remove_entry(root, name)
            continue
        target = _link(root, name)
        is_own = target == f"{DATA}/{name}"
        if target is not None and is_own != (name in tree):
            os.unlink(name, dir_fd=root)
        else:
            present.add(name)
    for name, content in tree.items():
        if name not in present:
            os.symlink(f"{DATA}/{name}", name, dir_fd=root)
            if isinstance(content, File) and content.user is not None:
                os.chown(name, content.user, -1, dir_fd=root, follow_symlinks=False)


def _entry_names(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries]


def _link(root: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=root)
    except OSError:
        return None


MAX_INLINE_BYTES = 64 << 10
"""Bytes up to which a tmpfs volume is written on the event loop: a thread would take longer."""


class FileVolumeWriter:
    """Writer of the files of one plugin's volumes, below the plugin's directory."""

    def __init__(
        self,
        host: VolumeHost,
        directory_name: str,
        *,
        in_memory: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._host = host
        self._directory_name = directory_name
        self._in_memory = in_memory
        self._clock = clock

    async def write(self, pod: Pod, volume: str, files: Files) -> MountedVolume:
        """Ensure that a volume has exactly these files. Raises VolumePluginError, ValueError and OSError."""
        paths = PodVolumePaths.for_pod(self._host.root, pod.uid)
        path, marker = paths.volume(self._directory_name, volume), paths.marker(volume, wrapped=True)
        points = nested_mount_points(pod, volume)
        options = memory_options(self._host, pod) if self._in_memory else ""
        medium = MEMORY if self._in_memory else ""
        group = pod.spec.security_context.fs_group

        def work() -> None:
            make_empty_dir(path, marker, medium, options, group)
            make_mount_points(path, points)
            if publish(path, files, group, moment=self._clock()):
                log.v(4).info("Wrote files of volume", pod=pod.full_name, volumeName=volume, files=len(files))

        small = sum(len(file.data) for file in files.values()) <= MAX_INLINE_BYTES
        if self._in_memory and small:
            work()
        else:
            await finish_in_thread(work)
        return MountedVolume(str(path), read_only=True, relabel=True)


def fs_user(pod: Pod) -> int | None:
    """Return the user ID that all containers of a pod run as; None if they differ or leave it to the image.

    Ephemeral containers do not count: one that is added to a running pod must not change who may read the
    pod's tokens, which without a common user are readable by every process of the pod.
    """
    spec = pod.spec
    users = set()
    for container in (*spec.init_containers, *spec.containers):
        own = container.security_context.run_as_user if container.security_context is not None else None
        users.add(own if own is not None else spec.security_context.run_as_user)
    return users.pop() if len(users) == 1 else None
