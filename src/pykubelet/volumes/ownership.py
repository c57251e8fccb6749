"""fsGroup: letting the group of a pod's processes at the files of a volume."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pykubelet.logs import get_logger

log = get_logger(__name__)

_READ = 0o440
_WRITE = 0o220
_ENTER = 0o110 | stat.S_ISGID


def group_mode(mode: int, *, folder: bool, read_only: bool) -> int:
    """Give the permissions that a file or folder needs so that its group can use it."""
    return mode | _READ | (0 if read_only else _WRITE) | (_ENTER if folder else 0)


def give_to_group(path: Path, group: int) -> None:
    """Let a group read and write everything below a path, and own what will be made there."""
    for folder, folders, files in os.walk(path, topdown=False):
        for name in (*folders, *files):
            _give(Path(folder, name), group)
    _give(path, group)


def give_opened(at: int, group: int) -> None:
    """Let a group have an opened file; what cannot be given is told and kept."""
    try:
        os.fchown(at, -1, group)
    except OSError as err:
        log.error(err, "Failed to give a volume's file to its group", group=group)


def _give(entry: Path, group: int) -> None:
    try:
        os.chown(entry, -1, group, follow_symlinks=False)
        mode = entry.lstat().st_mode
        if not stat.S_ISLNK(mode):
            entry.chmod(group_mode(stat.S_IMODE(mode), folder=stat.S_ISDIR(mode), read_only=False))
    except OSError as err:
        # Some file systems know no owners; whether that matters only the containers can tell.
        log.error(err, "Failed to give a volume's file to its group", path=str(entry), group=group)
