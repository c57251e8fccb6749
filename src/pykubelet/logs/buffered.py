"""Buffered info messages of split log streams (`infoBufferSize`).

Lines are held until the buffer is full, until an error is logged, for at most the flush period, and until the
process exits, also by an exception (`logging` closes its handlers then). A thread flushes periodically,
because a write to a pipe may block and because a blocked event loop must not hold lines back.

While the buffer has capacity, no caller waits for the reader of the stream: the thread writes without the
lock that callers need. Lines that are being written count until the reader has taken them. A caller whose
line does not fit writes until it does, so it blocks if the reader is slow, as upstream does. Before an error,
which another handler writes, the lines are written that the stream accepts immediately; the thread writes the
rest.

Lines are in order. They are lost only when the process is killed, and when the stream fails: the buffer is
discarded then, so that it is bounded, and the `log` health check reports it.
"""

from __future__ import annotations

import logging
import select
import threading
from collections import deque
from typing import TextIO

MAX_BYTES = 2 * 1024**3
_PIECE_BYTES = 64 * 1024
"""Bytes of one write, the capacity of a pipe: what the reader has taken is free for new lines."""


class BufferedStream(logging.Handler):
    """A handler that writes records below ERROR to a stream in large pieces; others only flush it."""

    def __init__(self, stream: TextIO, size: int, flush_seconds: float) -> None:
        """Initialize with the size of the buffer in bytes, and the longest time that lines are held."""
        super().__init__()
        self.failure: OSError | ValueError | None = None
        self._stream = stream
        self._size = min(size, MAX_BYTES)
        self._writing = threading.RLock()
        """Serializes writes, each with the removal of its lines; acquired before `_changing`."""
        self._changing = threading.Lock()
        """Protects the lines and their size; never held during a write."""
        self._lines: deque[tuple[str, int]] = deque()
        """Lines that are not being written, each with its size in bytes."""
        self._bytes = 0
        """Size of all lines, including those that are being written."""
        self._ended = False
        self._due = threading.Event()
        self._thread = threading.Thread(
            target=self._flush_periodically, args=(flush_seconds,), name="log-flush", daemon=True
        )
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hold one line, or flush before an error, which another handler writes."""
        if record.levelno >= logging.ERROR:
            self._flush_without_blocking()
            return
        line = self.format(record) + "\n"
        size = len(line.encode(errors="backslashreplace"))
        while not self._hold(line, size):
            self._write_piece(_PIECE_BYTES)
        if size > self._size:
            self.flush()

    def flush(self) -> None:
        """Write the lines that are held. Raises nothing: a failure is kept for the health check."""
        while self._write_piece(_PIECE_BYTES):
            pass

    def close(self) -> None:
        """Write the lines that are held, and end the thread; idempotent."""
        self._ended = True
        self._due.set()
        self.flush()
        super().close()

    def _hold(self, line: str, size: int) -> bool:
        """Append a line if it fits, or if there is no other one; return whether it was appended."""
        with self._changing:
            if self._bytes and self._bytes + size > self._size:
                return False
            self._lines.append((line, size))
            self._bytes += size
            return True

    def _write_piece(self, limit: int) -> bool:
        """Write the oldest lines, `limit` bytes or a longer line; return whether there were any."""
        with self._writing:
            lines: list[str] = []
            size = 0
            with self._changing:
                while self._lines and (not lines or size + self._lines[0][1] <= limit):
                    line, line_size = self._lines.popleft()
                    lines.append(line)
                    size += line_size
            if not lines:
                return False
            try:
                self._stream.write("".join(lines))
                self._stream.flush()
            except (OSError, ValueError) as err:  # a closed stream is a ValueError
                self.failure = err
                with self._changing:
                    self._lines.clear()
                    self._bytes = 0
            else:
                self.failure = None
                with self._changing:
                    self._bytes -= size
            return True

    def _flush_without_blocking(self) -> None:
        """Write the lines that the stream accepts immediately, and wake the thread for the rest."""
        if self._writing.acquire(blocking=False):
            try:
                # A stream that accepts anything accepts PIPE_BUF bytes.
                while self._lines and self._lines[0][1] <= select.PIPE_BUF and self._is_writable():
                    self._write_piece(select.PIPE_BUF)
            finally:
                self._writing.release()
        if self._lines:
            self._due.set()

    def _is_writable(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self._stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # a stream in memory, or a closed one
            return True
        return bool(poll.poll(0))

    def _flush_periodically(self, seconds: float) -> None:
        while not self._ended:
            self._due.wait(seconds)
            self._due.clear()
            self.flush()
