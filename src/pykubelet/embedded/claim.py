"""Making a directory ours, and knowing that it is.

`down` deletes a directory whole, so it must never be handed a stranger's. A directory is ours when
it holds our marker and marker and directory belong to root (or to whoever we run as); the marker
is the first thing written into a directory that was empty, and the last thing removed.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from pykubelet.embedded.errors import DirectoryError
from pykubelet.embedded.instance import Instance

_TEXT = """\
This directory belongs to pykubelet, a Kubernetes node agent.
`pykubelet down --data-dir ...` removes it with everything in it.
"""
# What a fresh file system and an interrupted `down` leave.
_NOTHING = frozenset({"lost+found", "lock"})


def is_ours(instance: Instance) -> bool:
    """Whether the data directory exists and was made ours by `claim`."""
    return _owned(instance.data_dir, stat.S_ISDIR) and _owned(instance.marker, stat.S_ISREG)


def is_untouched(instance: Instance) -> bool:
    """Whether there is nothing at all: no directory, or an empty one that somebody prepared."""
    return not os.path.lexists(instance.data_dir) or _entries(instance.data_dir) == set()


def require_ours(instance: Instance) -> None:
    """Raise DirectoryError when the data directory holds anything but our own things."""
    if not is_ours(instance) and not is_untouched(instance):
        raise DirectoryError(
            f"{instance.data_dir} was not made by pykubelet (it has no {instance.marker.name} file of ours): "
            "nothing in it is touched; choose another --data-dir, or remove it yourself"
        )


def claim(instance: Instance) -> bool:
    """Make the data directory ours; returns whether it was made just now.

    Raises DirectoryError when it holds something else, or cannot be made.
    """
    if is_ours(instance):
        return False
    require_ours(instance)
    directory = instance.data_dir
    try:
        if not directory.parent.is_dir():
            raise DirectoryError(
                f"data directory {directory} cannot be made: its parent does not exist: "
                f"run 'mkdir -p {directory.parent}' first"
            )
        directory.mkdir(mode=0o755, exist_ok=True)
        if directory.stat().st_uid != os.geteuid():
            raise DirectoryError(
                f"data directory {directory} belongs to another user: change its owner or choose another path"
            )
        instance.marker.write_text(_TEXT)
    except OSError as err:
        raise DirectoryError(f"data directory {directory} cannot be used: {err.strerror}") from err
    return True


def make_folders(instance: Instance) -> None:
    """Make the folders in a data directory that is ours."""
    for folder, mode in (
        (instance.manifests, 0o755),
        (instance.kubelet_root, 0o750),
        (instance.pod_logs, 0o755),
        # Containers in a user namespace must be able to pass through to their root file system.
        (instance.containerd, 0o711),
        (instance.cni_conf, 0o755),
    ):
        folder.mkdir(mode=mode, parents=True, exist_ok=True)


def _entries(directory: Path) -> set[str] | None:
    try:
        return {path.name for path in directory.iterdir()} - _NOTHING
    except OSError:
        return None


def _owned(path: Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return is_kind(found.st_mode) and found.st_uid == os.geteuid()
