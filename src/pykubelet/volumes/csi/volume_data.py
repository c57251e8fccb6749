"""What must be known of a volume to take it down, kept beside it: `vol_data.json`.

It is written before the driver is asked for anything and deleted after the driver has undone everything,
so that an agent that never saw the pod finds all that drivers may have mounted. A file is there as a
whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from pykubelet.volumes.errors import KindError
from pykubelet.volumes.folders import make_folder


class VolumeData(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The facts; the names are the reference's, which reads and writes the same file."""

    volume_handle: str
    driver_name: str
    spec_vol_id: str = msgspec.field(name="specVolID", default="")
    """The persistent volume's name, or the pod's own name for the volume."""
    node_name: str = ""
    attachment_id: str = msgspec.field(name="attachmentID", default="")
    volume_lifecycle_mode: str = ""
    se_linux_mount_context: str = ""


def write_data(path: Path, data: VolumeData) -> None:
    """Write the file, in a folder that is made; raises OSError. Blocks."""
    make_folder(path.parent)
    if read_data(path) == data:
        return
    with _replacing(path) as new:
        new.write_bytes(msgspec.json.encode(data) + b"\n")


def read_data(path: Path) -> VolumeData | None:
    """Read the file; None when there is none, or none that can be read as a whole. Blocks."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=VolumeData)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def drop_place(place: Path, data: Path) -> None:
    """Delete the place where a driver had mounted something, then the data, then their empty folder.

    Drivers delete the place themselves, or should. Raises KindError when something is in it: then the
    driver did not undo what it was asked to, and deleting would delete the volume's content. Blocks.
    """
    try:
        if place.is_symlink() or place.is_file() or place.is_block_device():
            place.unlink(missing_ok=True)
        elif place.exists():
            place.rmdir()
    except OSError as err:
        raise KindError(
            f"kubernetes.io/csi: failed to remove dir [{place}]: {err.strerror}; "
            "the driver has left something there"
        ) from err
    data.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        data.parent.rmdir()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    new = path.with_name(f".{path.name}.new")
    try:
        yield new
        new.chmod(0o644)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
