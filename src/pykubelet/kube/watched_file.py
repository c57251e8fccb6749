"""A small file whose contents others replace: certificates and tokens that are renewed.

Looking at it costs one `stat`; it is read again when that shows a change, and each minute in case a
change did not show. A file that vanishes or cannot be read later is told once, and its last contents
stay in use: whoever replaces it may be half-way.
"""

from __future__ import annotations

from pathlib import Path

from pykubelet.logs import get_logger

log = get_logger(__name__)

READ_AGAIN_SECONDS = 60.0
MAX_BYTES = 1024 * 1024


class WatchedFile:
    """The contents of one file; times are seconds of any steady clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark: tuple[int, ...] | None = None
        self._contents: bytes | None = None
        self._read_at = 0.0
        self._complaint = ""

    def contents(self, now: float) -> bytes:
        """Give the contents; raises OSError while the file has never been read.

        Files such as these are a few kilobytes on a local disk, not worth a thread.
        """
        try:
            mark = self._look()
            if self._contents is None or mark != self._mark or now - self._read_at >= READ_AGAIN_SECONDS:
                with self.path.open("rb") as file:
                    self._contents = file.read(MAX_BYTES)
                self._mark, self._read_at = mark, now
        except OSError as err:
            if self._contents is None:
                raise
            if (complaint := err.strerror or str(err)) != self._complaint:
                log.error(
                    complaint, "Failed to read again, keeping what was read before", path=str(self.path)
                )
                self._complaint = complaint
        else:
            self._complaint = ""
        return self._contents

    def forget(self) -> None:
        """Read the file anew the next time, whatever it looks like."""
        self._mark = None

    def _look(self) -> tuple[int, ...]:
        found = self.path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
