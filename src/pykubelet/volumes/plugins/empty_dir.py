"""emptyDir: a directory with the lifetime of its pod, on disk, in memory (tmpfs) or in huge pages.

Creation may be interrupted at any point: the marker of a complete volume is written last, and a volume
without it is created again. A volume with a marker is not changed any more, because its content and its
permissions belong to the containers from then on.
"""

from __future__ import annotations

import errno
from pathlib import Path

from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.api.volume import EmptyDir
from pykubelet.linux.mounts import mount
from pykubelet.util.tasks import finish_in_thread
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.ownership import give_to_group
from pykubelet.volumes.paths import EMPTY_DIR, VolumeFolders, is_mount_point, make_folder
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount

MEMORY = "Memory"
HUGE_PAGES = "HugePages"
_MODE = 0o777
_PAGES_PREFIX = "hugepages-"


class MediumError(VolumePluginError):
    """Raised when the medium is not available to this pod; the text contains the reason."""


class EmptyDirKind(BaseVolumePlugin):
    """Plugin for emptyDir volumes."""

    folder = EMPTY_DIR
    live = False
    slow = False

    def __init__(self, given: VolumeHost) -> None:
        self._given = given

    async def set_up(self, wanted: VolumeToMount) -> MountedVolume:
        """Ensure that the directory and its mount exist; in a thread, because a disk may be slow."""
        pod, source = wanted.pod, wanted.source
        assert isinstance(source, EmptyDir)
        folders = VolumeFolders.of(self._given.root, pod.uid)
        path, marker = folders.volume(EMPTY_DIR, wanted.name), folders.marker(wanted.name)
        options = self._mount_options(pod, source)
        group = pod.spec.security_context.fs_group
        await finish_in_thread(lambda: make_empty_dir(path, marker, source.medium, options, group))
        return MountedVolume(str(path), relabel=True)

    def _mount_options(self, pod: Pod, source: EmptyDir) -> str:
        if source.medium == MEMORY:
            return memory_options(self._given, pod, source.size_limit)
        if is_huge_pages(source.medium):
            return huge_page_option(source.medium, pod, pod_level=self._given.pod_level)
        if source.medium:
            raise MediumError(f'unknown storage medium "{source.medium}"')
        return ""


def memory_options(given: VolumeHost, pod: Pod, size_limit: Quantity | None = None) -> str:
    """Return the tmpfs mount options of a volume in memory."""
    wanted = int(size_limit) if size_limit is not None else 0
    size = tmpfs_size(wanted, given.memory_limit(pod) or 0, given.allocatable_memory)
    return f"size={size}" if size else ""


def tmpfs_size(size_limit: int, pod_limit: int, allocatable: int) -> int:
    """Return the size of a volume in memory: the smallest of the limits (bytes, 0 for unset).

    Its pages are charged to the pod, so a size above the pod's limit would only get the pod OOM-killed.
    """
    return min((size for size in (size_limit, pod_limit, allocatable) if size > 0), default=0)


def huge_page_option(medium: str, pod: Pod, *, pod_level: bool = True) -> str:
    """Return the mount option for the page size. Raises MediumError.

    `HugePages` alone requires that the pod requests exactly one size, `HugePages-2Mi` that it requests that
    size among others.
    """
    asked: dict[int, Quantity] = {}
    parts = [container.resources.requests for container in (*pod.spec.containers, *pod.spec.init_containers)]
    if pod_level and pod.spec.resources is not None:
        parts.append(pod.spec.resources.requests)
    for resource in (resource for part in parts for resource in part if resource.startswith(_PAGES_PREFIX)):
        size = _page_size(resource.removeprefix(_PAGES_PREFIX))
        asked[int(size)] = size
    if medium == HUGE_PAGES:
        if len(asked) > 1:
            raise MediumError(
                f"medium: {medium} can't be used if container requests multiple huge page sizes"
            )
        found = next(iter(asked.values()), None)
    else:
        found = asked.get(int(_page_size(medium.removeprefix(f"{HUGE_PAGES}-"))))
    if found is None:
        raise MediumError(
            f"medium {medium}: hugePages storage requested, but there is no resource request for huge pages"
        )
    return f"pagesize={found}"


def is_huge_pages(medium: str) -> bool:
    """Return whether a medium is huge pages, with or without a size."""
    return medium == HUGE_PAGES or medium.startswith(f"{HUGE_PAGES}-")


def is_made(path: Path, marker: Path, medium: str) -> bool:
    """Return whether the volume at `path` is complete.

    The marker outlives a mount in memory (after a reboot), so that the mount is checked as well.
    """
    return marker.exists() and (is_mount_point(path) if medium else path.is_dir())


def make_empty_dir(path: Path, marker: Path, medium: str, options: str, group: int | None) -> None:
    """Ensure that the volume exists at `path`, owned by `group` unless that is None. Raises OSError.

    `options` are the mount options of a medium other than disk. Blocks.
    """
    if is_made(path, marker, medium):
        return
    marker.unlink(missing_ok=True)
    make_folder(path.parent, 0o755)
    make_folder(path, _MODE)
    if not is_mount_point(path):
        path.chmod(_MODE)
        if medium == MEMORY:
            _mount_tmpfs(path, options)
        elif medium:
            mount("nodev", path, "hugetlbfs", options)
    if group is not None:
        give_to_group(path, group)
    make_folder(marker.parent)
    marker.touch(mode=0o644)


def _mount_tmpfs(path: Path, options: str) -> None:
    try:
        # A volume in memory must not be swapped to disk. Kernels before 6.4 do not support `noswap`.
        mount("tmpfs", path, "tmpfs", ",".join(filter(None, (options, "noswap"))))
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.EPERM):
            raise
        mount("tmpfs", path, "tmpfs", options)


def _page_size(text: str) -> Quantity:
    try:
        return Quantity.parse(text)
    except ValueError as err:
        raise MediumError(str(err)) from err
