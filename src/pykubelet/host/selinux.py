"""SELinux, where the machine has it: whether it does, and folders that plugins in containers may use.

A container may touch only files with a label for containers. Plugins put their sockets into folders of the
agent, so these folders must have it; a plugin without privileges would not come to be heard otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pykubelet.logs import get_logger

log = get_logger(__name__)

FS = Path("/sys/fs/selinux")
CONTAINER_FILES = "system_u:object_r:container_file_t:s0"

_ATTRIBUTE = "security.selinux"

Write = Callable[[Path, str, bytes], None]
"""Sets an extended attribute of a file; raises OSError."""


def has_selinux(fs: Path = FS) -> bool:
    """Whether the machine has SELinux."""
    return (fs / "enforce").exists()


def share_with_containers(folder: Path, fs: Path = FS, write: Write = os.setxattr) -> None:
    """Label a folder so that containers may use it; does nothing where there is no SELinux."""
    if not has_selinux(fs):
        return
    try:
        write(folder, _ATTRIBUTE, CONTAINER_FILES.encode())
    except OSError as err:
        log.warning(
            "Could not set the SELinux label of a folder: plugins in plain containers may not work",
            path=folder,
            err=err,
        )
