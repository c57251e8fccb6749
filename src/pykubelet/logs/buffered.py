"""Buffered info messages of split log streams (`infoBufferSize`).

Lines are held until the buffer is full, until an error is logged, for at most the flush period, and until the
process exits, also by an exception (`logging` closes its handlers then). A thread flushes periodically,
because a write to a pipe may block and because a blocked event loop must not hold lines back. Lines are lost
only when the process is killed, and when the stream fails: the buffer is discarded then, so that it is
bounded, and the `log` health check reports it.
"""

from __future__ import annotations

import logging
import threading
from typing import TextIO

MAX_BYTES = 2 * 1024**3


class BufferedStream(logging.Handler):
    """A handler that writes records below ERROR to a stream in large pieces; others only flush it."""

    def __init__(self, stream: TextIO, size: int, flush_seconds: float) -> None:
        """Initialize with the size of the buffer in bytes, and the longest time that lines are held."""
        super().__init__()
        self.failure: OSError | ValueError | None = None
        self._stream = stream
        self._size = min(size, MAX_BYTES)
        self._lines: list[str] = []
        self._bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._flush_periodically, args=(flush_seconds,), name="log-flush", daemon=True
        )
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hold one line, or flush before an error, which another handler writes."""
        if record.levelno >= logging.ERROR:
            self.flush()
            return
        line = self.format(record) + "\n"
        size = len(line.encode(errors="backslashreplace"))
        if self._bytes + size > self._size:
            self.flush()
        self._lines.append(line)
        self._bytes += size
        if self._bytes >= self._size:
            self.flush()

    def flush(self) -> None:
        """Write the lines that are held. Raises nothing: a failure is kept for the health check."""
        self.acquire()
        try:
            lines, self._lines, self._bytes = self._lines, [], 0
            if lines:
                self._stream.write("".join(lines))
            self._stream.flush()
        except (OSError, ValueError) as err:  # a closed stream is a ValueError
            self.failure = err
        else:
            self.failure = None
        finally:
            self.release()

    def close(self) -> None:
        """Write the lines that are held, and end the thread; idempotent."""
        self._ended.set()
        self.flush()
        super().close()

    def _flush_periodically(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            if self._lines:
                self.flush()
