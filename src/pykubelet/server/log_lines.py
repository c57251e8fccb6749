"""What a container's log file says, line by line.

A runtime writes what a container says as entries, one to a line of the file:

    2026-01-02T03:04:05.123456789Z stdout F a whole line
    2026-01-02T03:04:05.123456790Z stderr P the beginning of a long one, continued in the next stderr entry

Pure: bytes in, entries out. A damaged entry (a disk that was full, a runtime that was killed) is skipped;
the ones after it still count.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

Stream = Literal["stdout", "stderr"]

_ENTRY = re.compile(
    rb"(?P<stamp>[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(?:\.[0-9]{1,9})?(?:Z|[+-][0-9]{2}:[0-9]{2}))"
    rb" (?P<stream>stdout|stderr) (?P<tags>[^ ]*) (?P<text>.*)",
    re.DOTALL,
)
# The front of a whole line's entry, with the line break before it: that is quicker to find than `^`.
_FRONT = re.compile(
    rb"\n[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(?:\.[0-9]{1,9})?(?:Z|[+-][0-9]{2}:[0-9]{2})"
    rb" (?:stdout|stderr) F "
)
_STAMP = re.compile(r"(?P<seconds>.{19})(?:\.(?P<fraction>[0-9]+))?(?P<zone>.*)", re.ASCII)
_NANOS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry: a line that a container wrote, or a piece of one."""

    stamp: str
    """When it was written, as the runtime wrote it down."""
    stream: Stream
    text: bytes
    """Without a line break at its end."""
    partial: bool
    """Whether the line goes on in the next entry of the same stream."""

    @property
    def nanoseconds(self) -> int:
        """When it was written, since the epoch; 0 for a time that does not exist."""
        match = _STAMP.fullmatch(self.stamp)
        assert match is not None
        zone = "+00:00" if match["zone"] == "Z" else match["zone"]
        try:
            moment = datetime.fromisoformat(match["seconds"] + zone)
        except ValueError:
            return 0
        seconds = (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
        return int(seconds) * _NANOS + int((match["fraction"] or "0").ljust(9, "0"))

    @property
    def fixed_stamp(self) -> str:
        """The time with nine digits of the second, so that lines align."""
        match = _STAMP.fullmatch(self.stamp)
        assert match is not None
        return f"{match['seconds']}.{(match['fraction'] or '').ljust(9, '0')}{match['zone']}"


def parse_entry(line: bytes) -> LogEntry | None:
    """Read one line of a log file; None when it is no entry."""
    match = _ENTRY.fullmatch(line.removesuffix(b"\n"))
    if match is None:
        return None
    # Tags that are still to be invented follow the first one after colons.
    partial = match["tags"].partition(b":")[0] == b"P"
    stream: Stream = "stdout" if match["stream"] == b"stdout" else "stderr"
    return LogEntry(match["stamp"].decode("ascii"), stream, match["text"], partial)


def parse_entries(lines: bytes) -> Iterator[LogEntry]:
    """Read several lines; what is no entry is left out."""
    return (entry for line in lines.split(b"\n") if line and (entry := parse_entry(line)) is not None)


def last_lines(backwards: Iterable[bytes], count: int) -> list[LogEntry]:
    """Take entries from the end of a log until they make `count` whole lines; give them in their order.

    `backwards` are the lines of the file, the last one first; no more of them are taken than needed.
    A line that is still being written counts as one.
    """
    chosen: list[LogEntry] = []
    # For each stream: whether the pieces that come before belong to a line that was chosen.
    wanted: dict[Stream, bool] = {}
    lines = 0
    for line in backwards if count > 0 else ():
        if (entry := parse_entry(line)) is None:
            continue
        ends_a_line = not entry.partial or entry.stream not in wanted
        if ends_a_line:
            wanted[entry.stream] = lines < count
            lines += wanted[entry.stream]
        if wanted[entry.stream]:
            chosen.append(entry)
        elif lines == count and not any(wanted.values()):
            break
    return chosen[::-1]


class LineWriter:
    """Turns entries into what goes to each stream: pieces joined, old lines left out, times in front.

    Whether a line is shown is decided at its beginning, for each stream by itself.
    """

    def __init__(self, *, timestamps: bool = False, since: int | None = None) -> None:
        self._timestamps = timestamps
        self._since = since
        self._unfinished: dict[Stream, bool] = {}

    def write(self, entries: Iterable[LogEntry]) -> Iterator[tuple[Stream, bytes]]:
        """Give the bytes for each stream, in order; `since` is in nanoseconds since the epoch."""
        for entry in entries:
            begun = entry.stream in self._unfinished
            shown = self._unfinished.get(entry.stream) if begun else self._is_new(entry)
            if entry.partial:
                self._unfinished[entry.stream] = bool(shown)
            else:
                self._unfinished.pop(entry.stream, None)
            if shown:
                front = f"{entry.fixed_stamp} ".encode() if self._timestamps and not begun else b""
                yield entry.stream, front + entry.text + (b"" if entry.partial else b"\n")

    def text(self, lines: bytes, streams: Container[Stream] = ("stdout", "stderr")) -> bytes:
        """Give what several lines of a log file say, of the streams that are wanted."""
        plain = not self._timestamps and self._since is None and not self._unfinished
        if plain and "stdout" in streams and "stderr" in streams:
            # Mostly all lines are whole, and then there is no need to look at each one.
            text, found = _FRONT.subn(b"\n", b"\n" + lines)
            if found == lines.count(b"\n") and lines.endswith(b"\n"):
                return text[1:]
        return b"".join(text for stream, text in self.write(parse_entries(lines)) if stream in streams)

    def _is_new(self, entry: LogEntry) -> bool:
        return self._since is None or entry.nanoseconds >= self._since
