"""Taking away all that a pod's volumes are on this machine, by what the disk and the mount table say.

It may be interrupted anywhere and repeated by an agent that never saw the pod. The marks of complete
folders go first: what is only half deleted must never pass for a volume. Nothing is deleted while
something is mounted in it, so that no one else's files go with it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pykubelet.host.mounts import plan_unmounts, read_mounts, remove_tree, unmount
from pykubelet.volumes.errors import VolumeError, told
from pykubelet.volumes.folders import VolumeFolders


def needs_take_down(folders: VolumeFolders, kinds: Collection[str]) -> bool:
    """Whether anything of a pod's volumes is there; `kinds` are the folders of the kinds that count."""
    if folders.sub_paths.exists() or folders.markers.exists():
        return True
    return bool(_kind_folders(folders, kinds))


def take_down(folders: VolumeFolders, kinds: Collection[str]) -> None:
    """Unmount and delete a pod's volumes of these kinds, and its sub-paths; raises VolumeError. Blocks."""
    try:
        # The mount table knows real paths only.
        real = VolumeFolders(folders.pod.resolve())
        mounts = read_mounts(real.pod)
        remove_tree(real.markers, mounts)
        everything = (real.sub_paths, *_kind_folders(real, kinds))
        if points := [point for folder in everything for point in plan_unmounts(mounts, folder)]:
            for point in points:
                unmount(point)
            mounts = read_mounts(real.pod)
        for folder in everything:
            remove_tree(folder, mounts)
    except OSError as err:
        raise VolumeError(f"UnmountVolume.TearDown failed for pod {folders.pod.name} : {told(err)}") from err


def _kind_folders(folders: VolumeFolders, kinds: Collection[str]) -> list[Path]:
    try:
        return sorted(path for path in folders.volumes.iterdir() if path.name in kinds)
    except (FileNotFoundError, NotADirectoryError):
        return []
