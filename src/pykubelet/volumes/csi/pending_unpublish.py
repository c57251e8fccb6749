"""What drivers are owed: calls to undo what a pod had, of drivers that were not there when the pod left.

One small file for each, below `<root>/pykubelet/csi-debts`, for root only. It is on the disk before
anything is undone, and goes when the driver has been asked: an agent that is killed at any point, and
the next one, owe the same. Asking twice does no harm, because drivers must be fine with that.

    <target's digest>.json    the debt
    <target's digest>.left    what lay at the published place without being mounted: nobody deletes it

How long a pod that ends waits for a driver to take back what it published.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pykubelet.logs import get_logger
from pykubelet.volumes.csi.names import unique_name

log = get_logger(__name__)
FOLDER = Path("pykubelet", "csi-debts")


class PendingUnpublish(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A volume that a driver published for a pod, and that it was never asked to take back."""

    driver: str
    handle: str
    target: str
    """Where the driver had published it."""
    trace: str
    """What lies in the pod's folder until the pod has let go of the volume."""
    ephemeral: bool = False
    pod: str = ""
    """The pod's uid, for people."""
    volume: str = ""
    """The volume's name on the node, for people."""

    @property
    def unique_name(self) -> str:
        """The volume's name in the node's status."""
        return unique_name(self.driver, self.handle)

    @property
    def is_due(self) -> bool:
        """Whether the pod has let go; before that, taking it down is what asks the driver."""
        return not os.path.lexists(self.trace)


class PendingUnpublishStore:
    """The debts of one node, by what is on disk; all of it blocks for a moment."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER

    def note(self, debt: PendingUnpublish) -> None:
        """Have a debt on the disk for certain, before anything is undone; raises OSError."""
        file = self._file(debt)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        try:
            with open(new, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
                out.write(msgspec.json.encode(debt) + b"\n")
                out.flush()
                os.fsync(out.fileno())
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
        for folder in (self._folder, self._folder.parent, self._folder.parent.parent):
            _sync(folder)

    def settle(self, debt: PendingUnpublish) -> None:
        """Take note that nothing is owed for this; raises OSError."""
        file = self._file(debt)
        for path in (file, file.with_suffix(".new")):
            path.unlink(missing_ok=True)
        for folder in (self._folder, self._folder.parent):
            with suppress(OSError):  # it is not there, or others are in it
                folder.rmdir()

    def all(self) -> list[PendingUnpublish]:
        """Give all debts; a file that nobody can read is told of and left."""
        try:
            files = sorted(self._folder.glob("*.json"))
        except OSError:
            return []
        found = []
        for file in files:
            try:
                found.append(msgspec.json.decode(file.read_bytes(), type=PendingUnpublish))
            except FileNotFoundError:
                continue
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as err:
                log.error(
                    err, "Cannot read what a CSI driver is owed; delete the file to forget it", path=file
                )
        return found

    def of(self, name: str) -> list[PendingUnpublish]:
        """Give the debts of one volume, by its unique name."""
        return [debt for debt in self.all() if debt.unique_name == name]

    def aside(self, debt: PendingUnpublish) -> Path:
        """Where to keep what lies at a published place and is not mounted there."""
        return self._file(debt).with_suffix(".left")

    def _file(self, debt: PendingUnpublish) -> Path:
        return self._folder / f"{hashlib.sha256(debt.target.encode()).hexdigest()}.json"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


ABSENT_SECONDS = 30.0
"""For a driver that is not there: not registered, or nobody answers at its socket."""
FAILING_SECONDS = 120.0
"""For a driver that is there, and fails or stays silent: it may have a reason."""


@dataclass(slots=True)
class _Trouble:
    since: float
    absent_since: float | None


class UnpublishDeadlines:
    """Since when drivers fail to take back pods' volumes, by the published places; times are the loop's."""

    def __init__(self) -> None:
        self._troubles: dict[str, _Trouble] = {}

    def is_over(self, place: str, *, absent: bool) -> bool:
        """Take note of a failure, and say whether the pod has waited long enough."""
        now = asyncio.get_running_loop().time()
        trouble = self._troubles.setdefault(place, _Trouble(now, None))
        if not absent:
            trouble.absent_since = None
        elif trouble.absent_since is None:
            trouble.absent_since = now
        if trouble.absent_since is not None and now - trouble.absent_since >= ABSENT_SECONDS:
            return True
        return now - trouble.since >= FAILING_SECONDS

    def forget(self, place: str) -> None:
        """Take note that a pod has let go."""
        self._troubles.pop(place, None)
