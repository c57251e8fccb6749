"""Where a pod's volumes lie below the agent's root, and making folders there.

The layout and the modes are the reference's, so that a node can be handed over between agents:

    pods/<uid>/volumes/kubernetes.io~<kind>/<volume>                    the volume itself
    pods/<uid>/plugins/kubernetes.io~empty-dir/<volume>/ready           an emptyDir was made completely
    pods/<uid>/plugins/kubernetes.io~empty-dir/wrapped_<volume>/ready   so was what holds written files
    pods/<uid>/volumeDevices/kubernetes.io~<kind>/<volume>              a link to a block device
    pods/<uid>/volume-subpaths/<volume>/<container>/<mount>             a sub-path, bound here

Showing a folder at another place, with options of its own. Everything here blocks.
"""

from __future__ import annotations

import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pykubelet.linux.mounts import MS_BIND, MS_RDONLY, MS_REMOUNT, Mount, mount, read_mounts
from pykubelet.volumes.errors import VolumePluginError

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


_FLAGS = {
    "ro": MS_RDONLY,
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}
_PLAIN = frozenset(("bind", "rw", "defaults", "suid", "dev", "exec"))


def bind_flags(options: Collection[str]) -> int:
    """Give the flags of a bind mount with these options; raises KindError for one that it cannot have."""
    if unknown := [option for option in options if option not in _FLAGS and option not in _PLAIN]:
        raise VolumePluginError(
            f"mount option {unknown[0]!r} means nothing to a folder of this node: "
            f"possible are {', '.join(_FLAGS)}"
        )
    flags = 0
    for option in options:
        flags |= _FLAGS.get(option, 0)
    return flags


def bind_folder(source: Path, place: Path, flags: int) -> None:
    """Show a folder at another place too, with these flags; harmless to repeat. Raises OSError.

    What is bound there already stays, and gets its flags if an interrupted try did not give them.
    """
    there = mount_at(place)
    if there is None:
        make_folder(place)
        mount(str(source), place, "", flags=MS_BIND)
    missing = flags and (there is None or not _names(flags) <= there.options)
    if missing:
        # A bind takes no flags: they are set in a second step.
        mount("", place, "", flags=MS_REMOUNT | MS_BIND | flags)


def mount_at(place: Path) -> Mount | None:
    """Give what is mounted at a place, on top."""
    real = place.parent.resolve() / place.name
    return next((entry for entry in reversed(read_mounts(real)) if entry.point == real), None)


def _names(flags: int) -> set[str]:
    return {name for name, flag in _FLAGS.items() if flags & flag}
