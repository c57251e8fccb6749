"""Persistent queue of NodeUnpublishVolume calls that CSI drivers have not completed, and their deadlines.

Each pending call is a small file in `<root>/pykubelet/csi-debts`, readable by root only:

    <digest of the target path>.json    the pending call
    <digest of the target path>.left    files found at the target path without a mount; never deleted

The file is on disk before anything is unmounted and is deleted after the driver has been called, so that a
kubelet killed at any point leaves the same pending calls to the next process. A repeated call is harmless,
because CSI requires it to be idempotent.

`UnpublishDeadlines` limits how long a terminating pod waits for a driver; it is in memory only, so that the
deadlines start again with each kubelet process.
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
from pykubelet.util.files import fsync_directory, write_atomically
from pykubelet.volumes.csi.names import unique_name

log = get_logger(__name__)
DIRECTORY = Path("pykubelet", "csi-debts")


class PendingUnpublish(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A pending NodeUnpublishVolume call for a volume that a driver published for a pod."""

    driver: str
    handle: str
    target: str
    """Target path at which the driver published it."""
    trace: str
    """Path in the pod's directory that exists until the volume is removed from the pod."""
    ephemeral: bool = False
    pod: str = ""
    """UID of the pod, for logs and events only."""
    volume: str = ""
    """Name of the volume on the node, for events only."""

    @property
    def unique_name(self) -> str:
        """Name of the volume in the node's status."""
        return unique_name(self.driver, self.handle)

    @property
    def is_due(self) -> bool:
        """Whether the volume is removed from its pod; before that, the pod's teardown calls the driver."""
        return not os.path.lexists(self.trace)


class PendingUnpublishStore:
    """Pending unpublish calls of one node, stored on disk; all methods block briefly."""

    def __init__(self, root: Path) -> None:
        self._directory = root / DIRECTORY

    def add(self, pending_call: PendingUnpublish) -> None:
        """Store a pending call durably (fsync), before anything is unmounted. Raises OSError."""
        file = self._file(pending_call)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = msgspec.json.encode(pending_call) + b"\n"
        write_atomically(file, content, temporary=file.with_suffix(".new"))
        for directory in (self._directory, self._directory.parent, self._directory.parent.parent):
            fsync_directory(directory)

    def remove(self, pending_call: PendingUnpublish) -> None:
        """Delete a call that is no longer pending. Raises OSError."""
        file = self._file(pending_call)
        for path in (file, file.with_suffix(".new")):
            path.unlink(missing_ok=True)
        for directory in (self._directory, self._directory.parent):
            with suppress(OSError):  # missing or not empty
                directory.rmdir()

    def all(self) -> list[PendingUnpublish]:
        """Return all pending calls; an unreadable file is logged and kept."""
        try:
            files = sorted(self._directory.glob("*.json"))
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
                    err, "Failed to read pending NodeUnpublishVolume, delete the file to drop it", path=file
                )
        return found

    def for_volume(self, name: str) -> list[PendingUnpublish]:
        """Return the pending calls of one volume, by its unique name."""
        return [pending_call for pending_call in self.all() if pending_call.unique_name == name]

    def leftovers_path(self, pending_call: PendingUnpublish) -> Path:
        """Return the path to which files found at an unmounted target path are moved."""
        return self._file(pending_call).with_suffix(".left")

    def _file(self, pending_call: PendingUnpublish) -> Path:
        return self._directory / f"{hashlib.sha256(pending_call.target.encode()).hexdigest()}.json"


ABSENT_SECONDS = 30.0
"""Seconds for a driver that is not registered, or whose socket does not accept connections."""
FAILING_SECONDS = 120.0
"""Seconds for a driver that is reachable, but fails or times out: it may have a reason."""


@dataclass(slots=True)
class _Failure:
    since: float
    absent_since: float | None


class UnpublishDeadlines:
    """Deadlines of failing unpublish calls, by target path, in event loop time."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def record_failure(self, target_path: str, *, absent: bool) -> bool:
        """Record a failed unpublish and return whether its deadline has expired."""
        now = asyncio.get_running_loop().time()
        failure = self._failures.setdefault(target_path, _Failure(now, None))
        if not absent:
            failure.absent_since = None
        elif failure.absent_since is None:
            failure.absent_since = now
        if failure.absent_since is not None and now - failure.absent_since >= ABSENT_SECONDS:
            return True
        return now - failure.since >= FAILING_SECONDS

    def forget(self, target_path: str) -> None:
        """Forget a target path whose volume is removed from its pod."""
        self._failures.pop(target_path, None)
