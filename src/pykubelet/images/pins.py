"""Record of pinned images: names that garbage collection keeps, in a file of the kubelet's root directory.

containerd 1.7 and later report pins themselves; 1.6 and other runtimes do not, so the kubelet has its own
record. The command line and the kubelet change it under a lock, whether the other one runs or not; garbage
collection reads it before each collection. Writes are atomic and survive a power failure.

A pin is a name, so it follows its tag when the image is loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from pykubelet.util.files import exclusive_lock, write_atomically

FILE_NAME = "pinned_images.json"
MAX_BYTES = 1024 * 1024
MAX_NAMES = 5000
_LOCK_NAME = ".pinned_images.lock"


class PinError(Exception):
    """Raised when the record cannot be read or changed; one line with the file, the cause and a remedy."""


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    images: list[str]


class PinRecord:
    """The record in a kubelet's root directory; all methods block and raise PinError."""

    def __init__(self, root_dir: Path) -> None:
        self._root_dir = root_dir
        self.path = root_dir / FILE_NAME

    def names(self) -> frozenset[str]:
        """Return the names of the pinned images."""
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return frozenset()
        except OSError as err:
            raise self._error("read", err.strerror or str(err)) from err
        try:
            if len(content) > MAX_BYTES:
                raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
            return frozenset(msgspec.json.decode(content, type=_Record).images)
        except (ValueError, RecursionError) as err:
            raise self._error("read", f"{err}; remove it and pin the images again") from err

    def add(self, names: Iterable[str]) -> frozenset[str]:
        """Pin images; return the names that were not pinned before."""
        added = frozenset(names)
        return self._change(lambda known: known | added) & added

    def remove(self, names: Iterable[str]) -> frozenset[str]:
        """Unpin images; return the names that were pinned before."""
        removed = frozenset(names)
        return self._change(lambda known: known - removed) & removed

    def _change(self, change: Callable[[frozenset[str]], frozenset[str]]) -> frozenset[str]:
        """Replace the names, and return those that differ."""
        try:
            with exclusive_lock(self._root_dir / _LOCK_NAME):
                before = self.names()
                after = change(before)
                if len(after) > MAX_NAMES:
                    raise self._error("changed", f"it would have more than {MAX_NAMES} names; unpin some")
                if after != before:
                    content = msgspec.json.format(msgspec.json.encode(_Record(sorted(after))), indent=2)
                    write_atomically(self.path, content, 0o600, sync_directory=True)
        except OSError as err:
            raise self._error("changed", err.strerror or str(err)) from err
        return before ^ after

    def _error(self, action: str, reason: str) -> PinError:
        return PinError(f"the record of pinned images {self.path} cannot be {action}: {reason}")
