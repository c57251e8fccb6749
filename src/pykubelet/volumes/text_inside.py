"""Reads a text that a container has put into a volume: of any file, and of nothing outside of it.

Whoever writes there is not to be trusted: the name may be a link to the host's files, a pipe that
never says anything, or a file as large as the disk.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pykubelet.volumes.sub_path import opened_inside

LARGEST = 1 << 20
"""Bytes: more than all variables of a process may take."""


def read_inside(volume: Path, path: str) -> bytes:
    """Return the content of a file of a volume.

    Raises OSError, and ValueError when it is no file or too large; neither tells of the host. Blocks.
    """
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError("the path must be relative and without '..'")
    try:
        with opened_inside(volume, path, make=False) as found:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise ValueError("it is not a file")
            with Path(f"/proc/self/fd/{found}").open("rb") as file:
                data = file.read(LARGEST + 1)
    except OSError as err:
        raise OSError(err.errno, err.strerror) from err
    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    return data
