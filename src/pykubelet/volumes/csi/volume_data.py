"""What must be known of a volume to take it down, kept beside it: `vol_data.json`.

It is written before the driver is asked for anything and deleted after the driver has undone everything,
so that an agent that never saw the pod finds all that drivers may have mounted. A file is there as a
whole or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from pykubelet.host.mounts import read_mounts
from pykubelet.volumes.csi.debts import Debt
from pykubelet.volumes.csi.names import EPHEMERAL
from pykubelet.volumes.errors import KindError
from pykubelet.volumes.folders import make_folder

DATA_FILE = "vol_data.json"
SCRAP_SECONDS = 300.0
"""How old something must be that somebody has begun and not finished."""


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

    def owed(self, place: Path, trace: Path, uid: str, name: str) -> Debt:
        """Say what the driver is owed for what it published for a pod, if it cannot be asked.

        `trace` is what the pod has of the volume until it has let go.
        """
        return Debt(
            driver=self.driver_name,
            handle=self.volume_handle,
            target=str(place),
            trace=str(trace),
            ephemeral=self.volume_lifecycle_mode == EPHEMERAL,
            pod=uid,
            volume=name,
        )


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
    if read_mounts(place):
        # Said before the place is looked at: a mount that was left may not answer.
        raise KindError(f"kubernetes.io/csi: the driver has left {place} mounted")
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


def drop_scraps(file: Path, folders: Iterable[Path], clock: Callable[[], float] = time.time) -> None:
    """Delete what an agent that was killed has begun, before it wrote the data: empty folders. Blocks.

    Only what is old: an agent that lives may be writing it just now.
    """
    with suppress(OSError):
        if clock() - file.parent.stat().st_mtime < SCRAP_SECONDS:
            return
        _unfinished(file).unlink(missing_ok=True)
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    new = _unfinished(path)
    try:
        yield new
        new.chmod(0o644)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
