r"""Records of the kernel's log, as `/dev/kmsg` gives them: one record for each read.

    4,118683,25622588356,-,caller=T741;oom-kill:constraint=CONSTRAINT_MEMCG,...
     SUBSYSTEM=memory

Priority (facility and level in one number), sequence number, microseconds since the boot, flags and perhaps
more, then the text, then lines of fields that begin with a blank. Bytes that are not printable, and the
backslash itself, are written as `\xNN`. Programs can write into this log, too, but never as the kernel:
whoever decides something by a record asks `from_kernel` first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_ESCAPED = re.compile(rb"\\x([0-9a-fA-F]{2})")
_MOST_DIGITS = 20


class KmsgError(ValueError):
    """This is no record of the kernel's log."""


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One message."""

    facility: int
    """Who wrote it: 0 is the kernel, programs have others."""
    level: int
    """How bad it is: 0 (emergency) to 7 (debug)."""
    sequence: int
    """Grows by one with each record: a gap means that some were lost."""
    microseconds: int
    """Since the boot of the machine."""
    flags: str
    """`-`, `c` for a part of a line, `+` for what continues it."""
    text: str
    fields: Mapping[str, str] = field(default_factory=dict)
    """What the kernel adds, such as SUBSYSTEM and DEVICE."""

    @property
    def from_kernel(self) -> bool:
        """Whether the kernel said it, and not a program."""
        return self.facility == 0


def parse_record(data: bytes) -> KernelRecord:
    """Read one record; raises KmsgError."""
    head, found, body = data.partition(b";")
    if not found:
        raise KmsgError("there is no ';' after the record's head")
    parts = head.split(b",")
    if len(parts) < 3:
        raise KmsgError("the record's head has fewer than three parts")
    priority, sequence, microseconds = map(_number, parts[:3])
    text, *lines = body.split(b"\n")
    return KernelRecord(
        facility=priority >> 3,
        level=priority & 7,
        sequence=sequence,
        microseconds=microseconds,
        flags=_text(parts[3]) if len(parts) > 3 else "-",
        text=_text(text),
        fields=dict(_fields(lines)),
    )


def _number(data: bytes) -> int:
    if not data.isdigit() or len(data) > _MOST_DIGITS:
        raise KmsgError("a number in the record's head is none")
    return int(data)


def _fields(lines: list[bytes]) -> list[tuple[str, str]]:
    pairs = [line[1:].partition(b"=") for line in lines if line.startswith(b" ")]
    return [(_text(name), _text(value)) for name, found, value in pairs if found]


def _text(data: bytes) -> str:
    plain = _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), data)
    return plain.decode("utf-8", "replace")
