"""The volumes that need nothing but this machine: emptyDir and hostPath.

Everything may be repeated, after any interruption and by an agent that never saw the pod: mounting
looks at the disk, unmounting at the disk and the mount table. A volume's content is deleted only
when nothing is mounted in it, so that no one else's files go with it.

File systems may block (a dead server behind a hostPath, gigabytes to delete), so the work is done in
a thread; a caller that is cancelled waits for it, or the next step would race with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pykubelet.api.pod import Container, Pod
from pykubelet.api.volume import EmptyDir, Volume
from pykubelet.host.mounts import Mount, plan_unmounts, read_mounts, remove_tree, unmount
from pykubelet.logs import get_logger
from pykubelet.volumes.empty_dir import (
    MEMORY,
    MediumError,
    huge_page_option,
    is_huge_pages,
    make_empty_dir,
    tmpfs_size,
)
from pykubelet.volumes.errors import VolumeError, set_up_failed, told
from pykubelet.volumes.folders import VolumeFolders
from pykubelet.volumes.host_path import HostPathError, check_host_path
from pykubelet.volumes.mounted import MountedVolume
from pykubelet.volumes.sub_path import bind, opened_inside

log = get_logger(__name__)

T = TypeVar("T")

SUPPORTED = ("emptyDir", "hostPath")


class PlainVolumes:
    """Mounts and unmounts pods' volumes below the agent's root."""

    def __init__(
        self,
        root: Path,
        *,
        memory_limit: Callable[[Pod], int | None],
        allocatable_memory: int,
        pod_level: bool = True,
    ) -> None:
        """Take the agent's root, what bounds a pod's memory and all pods' (bytes), and a gate.

        `pod_level`: whether resources of the whole pod count (`PodLevelResources`).
        """
        self._root = root
        self._memory_limit = memory_limit
        self._allocatable = allocatable_memory
        self._pod_level = pod_level

    async def mount(self, pod: Pod) -> dict[str, MountedVolume]:
        """Have all of the pod's volumes ready, by name.

        Raises VolumeError, which tells of each that is not.
        """
        if all(volume.host_path is not None and not volume.host_path.type for volume in pod.spec.volumes):
            return self._mount_all(pod)
        return await _to_the_end(lambda: self._mount_all(pod))

    async def sub_paths(
        self, pod: Pod, container: Container, mounted: Mapping[str, MountedVolume], paths: Mapping[int, str]
    ) -> dict[int, str]:
        """Have parts of volumes ready for a container; gives their paths on the host.

        `paths` has the path inside of the volume for each mount of the container, by its index, that
        shows only a part; raises VolumeError in words that tell nothing of the host.
        """
        if not any(paths.values()):
            return {}
        return await _to_the_end(lambda: self._bind_all(pod, container, mounted, paths))

    async def unmount(self, uid: str) -> None:
        """Take down whatever a pod has mounted, and delete what lived with it; raises VolumeError."""
        try:
            folders = VolumeFolders.of(self._root, uid)
        except ValueError as err:
            raise VolumeError(str(err)) from err
        if folders.sub_paths.exists() or folders.empty_dirs.exists() or folders.markers.exists():
            await _to_the_end(lambda: _take_down(folders))

    def _mount_all(self, pod: Pod) -> dict[str, MountedVolume]:
        mounted, problems = {}, []
        for volume in pod.spec.volumes:
            try:
                mounted[volume.name] = self._mount_one(pod, volume)
            except (HostPathError, MediumError, ValueError) as err:
                problems.append(set_up_failed(volume.name, err))
            except OSError as err:
                problems.append(set_up_failed(volume.name, told(err)))
        if problems:
            raise VolumeError("; ".join(map(str, problems)))
        return mounted

    def _mount_one(self, pod: Pod, volume: Volume) -> MountedVolume:
        if volume.empty_dir is not None:
            return self._empty_dir(pod, volume.name, volume.empty_dir)
        if volume.host_path is not None:
            check_host_path(volume.host_path)
            return MountedVolume(volume.host_path.path)
        kind = ", ".join(volume.kinds) or "none that is known"
        raise ValueError(f"its kind is {kind}; supported are {' and '.join(SUPPORTED)}")

    def _empty_dir(self, pod: Pod, name: str, source: EmptyDir) -> MountedVolume:
        folders = VolumeFolders.of(self._root, pod.uid)
        make_empty_dir(
            path := folders.empty_dir(name),
            folders.marker(name),
            source.medium,
            self._mount_options(pod, source),
            pod.spec.security_context.fs_group,
        )
        return MountedVolume(str(path), relabel=True)

    def _mount_options(self, pod: Pod, source: EmptyDir) -> str:
        if source.medium == MEMORY:
            wanted = int(source.size_limit) if source.size_limit is not None else 0
            size = tmpfs_size(wanted, self._memory_limit(pod) or 0, self._allocatable)
            return f"size={size}" if size else ""
        if is_huge_pages(source.medium):
            return huge_page_option(source.medium, pod, pod_level=self._pod_level)
        if source.medium:
            raise MediumError(f'unknown storage medium "{source.medium}"')
        return ""

    def _bind_all(
        self, pod: Pod, container: Container, mounted: Mapping[str, MountedVolume], paths: Mapping[int, str]
    ) -> dict[int, str]:
        folders = VolumeFolders.of(self._root.resolve(), pod.uid)
        mounts, bound = read_mounts(), {}
        for index, path in paths.items():
            name = container.volume_mounts[index].name
            if not path:
                continue
            if name not in mounted:
                raise VolumeError(f'cannot find volume "{name}" to mount into container "{container.name}"')
            if path.startswith("/") or ".." in path.split("/"):
                raise VolumeError(f"subPath `{path}` must be a relative path without '..'")
            try:
                target = folders.sub_path(name, container.name, index)
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


def _take_down(folders: VolumeFolders) -> None:
    try:
        # The mount table knows real paths only.
        real = VolumeFolders(folders.pod.resolve())
        mounts: list[Mount] = read_mounts()
        for folder in (real.sub_paths, real.empty_dirs):
            for point in plan_unmounts(mounts, folder):
                unmount(point)
        for folder in (real.sub_paths, real.markers, real.empty_dirs):
            remove_tree(folder)
    except OSError as err:
        raise VolumeError(f"UnmountVolume.TearDown failed for pod {folders.pod.name} : {told(err)}") from err


async def _to_the_end(work: Callable[[], T]) -> T:
    future = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as err:
            cancelled = err
    if cancelled is not None:
        if (failure := future.exception()) is not None:
            log.v(2).info("Work on volumes failed after it was cancelled", err=str(failure))
        raise cancelled
    return future.result()
