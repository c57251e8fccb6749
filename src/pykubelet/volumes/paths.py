"""Paths of pods' volumes below the kubelet's root directory; creation of directories and bind mounts.

Layout and modes are upstream's, so that a node can be switched between kubelets in either direction:

    pods/<uid>/volumes/kubernetes.io~<plugin>/<volume>                  the volume itself
    pods/<uid>/plugins/kubernetes.io~empty-dir/<volume>/ready           marker of a complete emptyDir
    pods/<uid>/plugins/kubernetes.io~empty-dir/wrapped_<volume>/ready   marker of one with projected files
    pods/<uid>/volumeDevices/kubernetes.io~<plugin>/<volume>            symlink to a block device
    pods/<uid>/volume-subpaths/<volume>/<container>/<index>             bind mount of a sub-path

All functions that access the disk block.
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
_DEFAULT_MODE = 0o750


@dataclass(frozen=True, slots=True)
class PodVolumePaths:
    """Directories of one pod's volumes."""

    pod: Path

    @classmethod
    def for_pod(cls, root: Path, uid: str) -> PodVolumePaths:
        """Return those of a pod. Raises ValueError for a uid that is not a single path component."""
        return cls(root / "pods" / path_component(uid))

    @property
    def volumes(self) -> Path:
        """Directory of all volumes, with one directory per plugin."""
        return self.pod / "volumes"

    @property
    def markers(self) -> Path:
        """Directory of the markers of complete emptyDirs."""
        return self.pod / "plugins" / EMPTY_DIR

    @property
    def sub_paths(self) -> Path:
        """Directory of all bind-mounted sub-paths."""
        return self.pod / SUB_PATHS

    def volume(self, plugin_dir: str, volume: str) -> Path:
        """Return the directory that containers see; `plugin_dir` is the plugin's directory name."""
        return self.volumes / path_component(plugin_dir) / path_component(volume)

    def device(self, plugin_dir: str, volume: str) -> Path:
        """Return the symlink to a volume's block device (`block.py`)."""
        return self.pod / "volumeDevices" / path_component(plugin_dir) / path_component(volume)

    def marker(self, volume: str, *, wrapped: bool = False) -> Path:
        """Return the marker of an emptyDir, or of one that another plugin writes to (`wrapped`)."""
        return self.markers / f"{'wrapped_' if wrapped else ''}{path_component(volume)}" / "ready"

    def sub_path(self, volume: str, container: str, index: int) -> Path:
        """Return the mount point of a sub-path; `index` is that of the container's volume mount."""
        return self.sub_paths / path_component(volume) / path_component(container) / str(index)


def make_directory(path: Path, mode: int = _DEFAULT_MODE) -> None:
    """Ensure that a directory exists; a new one gets exactly this mode, missing parents get 0750.

    An existing directory is left unchanged. Raises OSError, also if the path is not a directory.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        if not path.parent.exists():
            make_directory(path.parent)
        path.mkdir(mode=mode, exist_ok=True)
        path.chmod(mode)  # mkdir applies the umask
        return
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(20, "Not a directory", str(path))


def entries(directory: Path) -> list[Path]:
    """Return the entries of a directory, sorted; none if it does not exist or is not a directory."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_mount_point(path: Path) -> bool:
    """Return whether another file system is mounted here; does not detect binds of the same file system."""
    try:
        return path.lstat().st_dev != path.parent.lstat().st_dev
    except FileNotFoundError:
        return False


def path_component(name: str) -> str:
    """Return a name that is a single path component. Raises ValueError for any other."""
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
_IGNORED_OPTIONS = frozenset(("bind", "rw", "defaults", "suid", "dev", "exec"))


def bind_flags(options: Collection[str]) -> int:
    """Return the flags for options of a bind mount. Raises VolumePluginError for an unsupported option."""
    if unknown := [option for option in options if option not in _FLAGS and option not in _IGNORED_OPTIONS]:
        raise VolumePluginError(
            f"mount option {unknown[0]!r} means nothing to a folder of this node: "
            f"possible are {', '.join(_FLAGS)}"
        )
    flags = 0
    for option in options:
        flags |= _FLAGS.get(option, 0)
    return flags


def bind_directory(source: Path, mount_point: Path, flags: int) -> None:
    """Ensure that a directory is bind-mounted at `mount_point` with these flags. Raises OSError.

    An existing mount is kept, and gets the flags that an interrupted attempt did not set.
    """
    existing = mount_at(mount_point)
    if existing is None:
        make_directory(mount_point)
        mount(str(source), mount_point, "", flags=MS_BIND)
    needs_flags = flags and (existing is None or not _option_names(flags) <= existing.options)
    if needs_flags:
        # mount(2) ignores other flags with MS_BIND; a remount sets them.
        mount("", mount_point, "", flags=MS_REMOUNT | MS_BIND | flags)


def mount_at(mount_point: Path) -> Mount | None:
    """Return the topmost mount at a path, or None."""
    real = mount_point.parent.resolve() / mount_point.name
    return next((entry for entry in reversed(read_mounts(real)) if entry.point == real), None)


def _option_names(flags: int) -> set[str]:
    return {name for name, flag in _FLAGS.items() if flags & flag}
