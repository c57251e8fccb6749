"""What a container's log file says, line by line.

A runtime writes what a container says as entries, one to a line of the file:

    2026-01-02T03:04:05.123456789Z stdout F a whole line
    2026-01-02T03:04:05.123456790Z stderr P the beginning of a long one, continued in the next stderr entry

Pure: bytes in, entries out. A damaged entry (a disk that was full, a runtime that was killed) is skipped;
the ones after it still count.

There are two ways to a text, and they give the same. Mostly a client wants all of a log whose lines are all
whole: then the runtime's columns are cut out of many lines at once. In all other cases each entry is looked
at, a few at a time, because that takes ten times as long.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

Stream = Literal["stdout", "stderr"]

_BOTH: tuple[Stream, ...] = ("stdout", "stderr")

# A time is known by its shape: looking at each digit would take longer than everything else here.
_SHAPE = rb"....-..-..T..:..:..[-+.:0-9Z]{1,16}+"
_ENTRY = re.compile(
    rb"(?P<stamp>" + _SHAPE + rb") (?P<stream>stdout|stderr) (?P<tags>[^ ]*) (?P<text>(?s:.*))"
)
# The front of a whole line's entry; with the line break before it; and several of them with the texts in
# between, because what each find costs by itself counts when there are a million.
_FRONT = re.compile(_SHAPE + rb" std(?:out|err) F ")
_NEXT_FRONT = re.compile(rb"\n" + _FRONT.pattern)
_AT_ONCE = 8
_FRONTS = re.compile(rb"(.*+)".join([_NEXT_FRONT.pattern] * _AT_ONCE))
_STAMP = re.compile(r"(?P<seconds>.{19})(?:\.(?P<fraction>[0-9]+))?(?P<zone>.*)", re.ASCII)
_NANOS = 1_000_000_000
# Bytes of lines that are looked at one by one at a time.
_FEW = 16 * 1024


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
        if moment.tzinfo is None:
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
    return LogEntry(match["stamp"].decode("latin-1"), stream, match["text"], partial)


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
                front = f"{entry.fixed_stamp} ".encode("latin-1") if self._timestamps and not begun else b""
                yield entry.stream, front + entry.text + (b"" if entry.partial else b"\n")

    def texts(self, lines: bytes, streams: Container[Stream] = _BOTH) -> Iterator[bytes]:
        """Give what many lines of a log file say, of the streams that are wanted.

        In pieces, none of which takes long to make; whoever has others waiting lets them go in between.
        """
        everything = not self._timestamps and self._since is None and all(one in streams for one in _BOTH)
        if everything and (text := _whole_lines(lines)) is not None:
            yield text
            return
        middle = lines.find(b"\n", len(lines) // 2) + 1
        if len(lines) > _FEW and 0 < middle < len(lines):
            yield from self.texts(lines[:middle], streams)
            yield from self.texts(lines[middle:], streams)
        else:
            entries = self.write(parse_entries(lines))
            yield b"".join(text for stream, text in entries if stream in streams)

    def _is_new(self, entry: LogEntry) -> bool:
        return self._since is None or entry.nanoseconds >= self._since


def _whole_lines(lines: bytes) -> bytes | None:
    """Give the texts of lines that are all whole, of whichever stream; None when one is not."""
    front = _FRONT.match(lines)
    if front is None or not lines.endswith(b"\n"):
        return None
    texts: list[bytes] = _FRONTS.split(lines)
    last = _NEXT_FRONT.split(texts.pop())
    # A line without a proper front is still part of the text between two finds, with its line break.
    between = b"".join((*texts[::_AT_ONCE], *last))
    if between.find(b"\n") < len(between) - 1:
        return None
    texts += last
    texts[0] = texts[0][front.end() :]
    return b"\n".join(texts)
