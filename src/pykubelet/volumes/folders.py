"""Where a pod's volumes lie below the agent's root, and making folders there.

The layout and the modes are the reference's, so that a node can be handed over between agents:

    pods/<uid>/volumes/kubernetes.io~<kind>/<volume>                    the volume itself
    pods/<uid>/plugins/kubernetes.io~empty-dir/<volume>/ready           an emptyDir was made completely
    pods/<uid>/plugins/kubernetes.io~empty-dir/wrapped_<volume>/ready   so was what holds written files
    pods/<uid>/volumeDevices/kubernetes.io~<kind>/<volume>              a link to a block device
    pods/<uid>/volume-subpaths/<volume>/<container>/<mount>             a sub-path, bound here
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

EMPTY_DIR = "kubernetes.io~empty-dir"
SUB_PATHS = "volume-subpaths"

_PRIVATE = 0o750


@dataclass(frozen=True, slots=True)
class VolumeFolders:
    """The folders of one pod's volumes."""

    pod: Path

    @classmethod
    def of(cls, root: Path, uid: str) -> VolumeFolders:
        """Give those of a pod; raises ValueError for a uid that is no plain name."""
        return cls(root / "pods" / plain(uid))

    @property
    def volumes(self) -> Path:
        """The folder of all volumes, in one folder per kind."""
        return self.pod / "volumes"

    @property
    def markers(self) -> Path:
        """The folder of the marks of folders that were made completely."""
        return self.pod / "plugins" / EMPTY_DIR

    @property
    def sub_paths(self) -> Path:
        """The folder of all bound sub-paths."""
        return self.pod / SUB_PATHS

    def volume(self, kind: str, volume: str) -> Path:
        """The folder that containers see; `kind` is the name of the kind's own folder."""
        return self.volumes / plain(kind) / plain(volume)

    def device(self, kind: str, volume: str) -> Path:
        """The link to a volume's block device (`block.py`)."""
        return self.pod / "volumeDevices" / plain(kind) / plain(volume)

    def marker(self, volume: str, *, wrapped: bool = False) -> Path:
        """The mark of an emptyDir, or of the folder that another kind writes to (`wrapped`)."""
        return self.markers / f"{'wrapped_' if wrapped else ''}{plain(volume)}" / "ready"

    def sub_path(self, volume: str, container: str, index: int) -> Path:
        """Where the sub-path of a container's mount is bound."""
        return self.sub_paths / plain(volume) / plain(container) / str(index)


def make_folder(path: Path, mode: int = _PRIVATE) -> None:
    """Have a folder with exactly this mode; those above it are made private.

    A folder that exists is left as it is. Raises OSError, also when something else is in its place.
    """
    try:
        kept = path.lstat()
    except FileNotFoundError:
        if not path.parent.exists():
            make_folder(path.parent)
        path.mkdir(mode=mode, exist_ok=True)
        path.chmod(mode)  # mkdir's mode is cut by the umask
        return
    if not stat.S_ISDIR(kept.st_mode):
        raise NotADirectoryError(20, "Not a directory", str(path))


def is_mount_point(path: Path) -> bool:
    """Whether another file system begins here; does not see binds of the same file system."""
    try:
        return path.lstat().st_dev != path.parent.lstat().st_dev
    except FileNotFoundError:
        return False


def plain(name: str) -> str:
    """Give a name that is one folder's; raises ValueError for one that leads elsewhere."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"{name!r} cannot be a folder's name")
    return name
