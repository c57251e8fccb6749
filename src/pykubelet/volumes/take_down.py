"""Taking away all that a pod's volumes are on this machine, by what the disk and the mount table say.

It may be interrupted anywhere and repeated by an agent that never saw the pod. The marks of complete
folders go first: what is only half deleted must never pass for a volume. Nothing is deleted while
something is mounted in it, so that no one else's files go with it.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from pykubelet.host.mounts import plan_unmounts, read_mounts, remove_tree, unmount
from pykubelet.host.one_mount import TooManyEntries, is_mounted_inside, mount_points_in
from pykubelet.logs import get_logger
from pykubelet.volumes.block import DEVICES, mapped_devices, unmap_device
from pykubelet.volumes.folders import VolumeFolders

log = get_logger(__name__)

_MOST_STACKED = 8
"""Mounts on top of each other that are unmounted without the mount table."""


class TakeDown:
    """One try to take away a pod's volumes of some kinds (by their folders); it blocks, and may hang.

    Others are only unmounted: who gave them may not be installed any more, and the pod has to go; with it go
    their folders. With `detach`, mounts that somebody still uses vanish from the pod's folder too: they end
    when their last user does.
    """

    def __init__(self, root: Path, uid: str, kinds: Collection[str], *, detach: bool = False) -> None:
        """Take a pod; raises ValueError for a uid that is no plain name."""
        self._root = root
        self._uid = uid
        self._folders = VolumeFolders.of(root, uid)
        self._kinds = kinds
        self._detach = detach
        self.at: Path | None = None
        """The mount point that is being unmounted: where it hangs, if it does."""

    @property
    def needed(self) -> bool:
        """Whether anything of the pod's volumes is there."""
        folders = self._folders
        if any(path.exists() for path in (folders.sub_paths, folders.markers, folders.pod / DEVICES)):
            return True
        return bool(_entries(folders.volumes)) or any(mapped_devices(self._root, self._uid))

    def volumes(self) -> Iterator[tuple[str, str]]:
        """Give the volumes that are there, each as its kind's folder and its name; reads only names."""
        for folder in self._known(self._folders):
            yield from ((folder.name, path.name) for path in _entries(folder))
        yield from mapped_devices(self._root, self._uid)

    def sub_paths(self) -> None:
        """Unmount and delete the parts of volumes that containers had; raises OSError."""
        real = self._real()
        self._remove((real.sub_paths,), real)

    def everything(self) -> None:
        """Unmount and delete all that is left; raises OSError."""
        real = self._real()
        remove_tree(real.markers)
        for kind, name in mapped_devices(self._root, self._uid):
            unmap_device(self._root, kind, self._uid, name)
        folders = (real.sub_paths, *self._known(real), real.pod / DEVICES)
        self._remove(folders, real, others=[path for path in _entries(real.volumes) if path not in folders])

    def _real(self) -> VolumeFolders:
        """The mount table knows real paths only."""
        return VolumeFolders(self._folders.pod.parent.resolve() / self._folders.pod.name)

    def _known(self, folders: VolumeFolders) -> list[Path]:
        return [path for path in _entries(folders.volumes) if path.name in self._kinds]

    def _remove(self, folders: Sequence[Path], real: VolumeFolders, others: Sequence[Path] = ()) -> None:
        if self._unmount_volumes((*folders, *others)):
            for folder in folders:
                remove_tree(folder, ())
            return
        mounts = read_mounts(real.pod)
        if points := [point for folder in (*folders, *others) for point in plan_unmounts(mounts, folder)]:
            for point in points:
                self.at = point
                self._unmount(point)
            self.at = None
        for folder in folders:
            # Asked anew: what was unmounted may have hidden another mount.
            remove_tree(folder, None if points else mounts)

    def _unmount_volumes(self, folders: Sequence[Path]) -> bool:
        """Unmount the volumes in some directories without the mount table, which has all pods' mounts.

        Return whether nothing is mounted there any more. False where more than volumes is mounted, where a
        volume is busy, and where finding that out would cost more than the mount table.
        """
        try:
            for _ in range(_MOST_STACKED):
                points = [point for folder in folders for point in mount_points_in(folder)]
                if not points:
                    break
                for point in points:
                    self.at = point
                    unmount(point)
            return not any(is_mounted_inside(folder) for folder in folders)
        except TooManyEntries:
            return False
        except OSError as err:
            if err.errno != errno.EBUSY:
                raise
            return False
        finally:
            self.at = None

    def _unmount(self, point: Path) -> None:
        try:
            unmount(point)
        except OSError as err:
            if err.errno != errno.EBUSY or not self._detach:
                raise
            log.warning("Detaching a volume that somebody still uses", path=point, podUID=self._uid)
            unmount(point, detach=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
