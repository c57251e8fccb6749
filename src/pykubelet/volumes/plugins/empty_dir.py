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
from pykubelet.volumes.ownership import apply_group
from pykubelet.volumes.paths import EMPTY_DIR, PodVolumePaths, is_mount_point, make_directory
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount

MEMORY = "Memory"
HUGE_PAGES = "HugePages"
_MODE = 0o777
_PAGES_PREFIX = "hugepages-"


class MediumError(VolumePluginError):
    """Raised when the medium is not available to this pod; the text contains the reason."""


class EmptyDirPlugin(BaseVolumePlugin):
    """Plugin for emptyDir volumes."""

    directory_name = EMPTY_DIR
    live = False
    slow = False

    def __init__(self, host: VolumeHost) -> None:
        self._host = host

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Ensure that the directory and its mount exist; in a thread, because a disk may be slow."""
        pod, source = volume.pod, volume.source
        assert isinstance(source, EmptyDir)
        paths = PodVolumePaths.for_pod(self._host.root, pod.uid)
        path, marker = paths.volume(EMPTY_DIR, volume.name), paths.marker(volume.name)
        options = self._mount_options(pod, source)
        group = pod.spec.security_context.fs_group
        await finish_in_thread(lambda: make_empty_dir(path, marker, source.medium, options, group))
        return MountedVolume(str(path), relabel=True)

    def _mount_options(self, pod: Pod, source: EmptyDir) -> str:
        if source.medium == MEMORY:
            return memory_options(self._host, pod, source.size_limit)
        if is_huge_pages(source.medium):
            return huge_page_option(source.medium, pod, pod_level=self._host.node.pod_level)
        if source.medium:
            raise MediumError(f'unknown storage medium "{source.medium}"')
        return ""


def memory_options(host: VolumeHost, pod: Pod, size_limit: Quantity | None = None) -> str:
    """Return the tmpfs mount options of a volume in memory."""
    limit = int(size_limit) if size_limit is not None else 0
    size = tmpfs_size(limit, host.memory.for_pod(pod) or 0, host.memory.allocatable)
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
    requested: dict[int, Quantity] = {}
    requests = [
        container.resources.requests for container in (*pod.spec.containers, *pod.spec.init_containers)
    ]
    if pod_level and pod.spec.resources is not None:
        requests.append(pod.spec.resources.requests)
    for resource in (
        resource for request in requests for resource in request if resource.startswith(_PAGES_PREFIX)
    ):
        size = _page_size(resource.removeprefix(_PAGES_PREFIX))
        requested[int(size)] = size
    if medium == HUGE_PAGES:
        if len(requested) > 1:
            raise MediumError(
                f"medium: {medium} can't be used if container requests multiple huge page sizes"
            )
        found = next(iter(requested.values()), None)
    else:
        found = requested.get(int(_page_size(medium.removeprefix(f"{HUGE_PAGES}-"))))
    if found is None:
        raise MediumError(
            f"medium {medium}: hugePages storage requested, but there is no resource request for huge pages"
        )
    return f"pagesize={found}"


def is_huge_pages(medium: str) -> bool:
    """Return whether a medium is huge pages, with or without a size."""
    return medium == HUGE_PAGES or medium.startswith(f"{HUGE_PAGES}-")


def is_complete(path: Path, marker: Path, medium: str) -> bool:
    """Return whether the volume at `path` is complete.

    The marker outlives a mount in memory (after a reboot), so that the mount is checked as well.
    """
    return marker.exists() and (is_mount_point(path) if medium else path.is_dir())


def make_empty_dir(path: Path, marker: Path, medium: str, options: str, group: int | None) -> None:
    """Ensure that the volume exists at `path`, owned by `group` unless that is None. Raises OSError.

    `options` are the mount options of a medium other than disk. Blocks.
    """
    if is_complete(path, marker, medium):
        return
    marker.unlink(missing_ok=True)
    make_directory(path.parent, 0o755)
    make_directory(path, _MODE)
    if not is_mount_point(path):
        path.chmod(_MODE)
        if medium == MEMORY:
            _mount_tmpfs(path, options)
        elif medium:
            mount("nodev", path, "hugetlbfs", options)
    if group is not None:
        apply_group(path, group)
    make_directory(marker.parent)
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
