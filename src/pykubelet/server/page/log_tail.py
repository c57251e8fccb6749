"""Last lines of a container's log for the page: bounded, printable, without escape sequences.

At most `MAX_BYTES` at the end of the file are read, whatever its size and the length of its lines, so that
the cost does not depend on the container. Only regular files are opened (`log_chain.open_active`).
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

from pykubelet.server.logs.log_chain import open_active
from pykubelet.server.logs.log_files import LogEntry, parse_entries
from pykubelet.server.page.facts import LogTail

MAX_BYTES = 64 * 1024
MAX_LINES = 100
MAX_LINE = 500
"""Characters of a line."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|[@-Z\\-_])")


def read_log_tail(container: str, path: Path) -> LogTail:
    """Return the last lines of a log file. Blocks."""
    try:
        opened = open_active(path)
    except OSError as err:
        return LogTail(container=container, lines=(), note=f"There is no log: {err.strerror or err}.")
    with opened.file as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = os.pread(file.fileno(), MAX_BYTES, max(size - MAX_BYTES, 0))
        except OSError as err:
            return LogTail(
                container=container, lines=(), note=f"The log cannot be read: {err.strerror or err}."
            )
    return tail_of(container, data, is_whole=size <= MAX_BYTES)


def tail_of(container: str, data: bytes, *, is_whole: bool) -> LogTail:
    """Return the lines of the end of a log file."""
    if not is_whole:
        # It begins within a line.
        data = data.partition(b"\n")[2]
    lines: list[str] = []
    partial: dict[str, str] = {}
    for entry in parse_entries(data):
        text = partial.pop(entry.stream, "")
        if len(text) <= MAX_LINE:
            text += entry.text[: 4 * MAX_LINE].decode("utf-8", "replace")
        if entry.partial:
            partial[entry.stream] = text
        else:
            lines.append(f"{_clock(entry)} {clean(text)}")
    lines += [f"… {clean(text)}" for text in partial.values()]
    is_cut = len(lines) > MAX_LINES or not is_whole
    note = "" if lines else "The log is empty." if is_whole else "The last line is too long to be shown."
    if lines and is_cut:
        note = f"The last {min(len(lines), MAX_LINES)} lines."
    return LogTail(container=container, lines=tuple(lines[-MAX_LINES:]), note=note)


def _clock(entry: LogEntry) -> str:
    """Return the time of an entry in the time zone of the node, whatever the one of the runtime."""
    moment = datetime.fromtimestamp(entry.nanoseconds / 1e9, UTC).astimezone()
    return f"{moment:%H:%M:%S}"


def clean(text: str) -> str:
    """Return a line without terminal escape sequences, shortened."""
    shown = _ESCAPES.sub("", text[: 4 * MAX_LINE]).replace("\t", "    ").rstrip("\r")
    return shown if len(shown) <= MAX_LINE else f"{shown[:MAX_LINE]}… ({len(text)} characters or more)"
