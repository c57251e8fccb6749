"""Parser of environment files in volumes (`fileKeyRef`): a strict subset of the shell's assignments.

    NAME='value'   # a comment

A value is enclosed in single quotes, is taken literally and may span lines. `NAME= 'x'` assigns the empty
string, as in a shell. Anything else is an error, so that no file means one thing here and another in a shell.

Containers write these files. The parser reads each byte once, line by line, retains only the requested
values and blocks its thread for less than a second for the largest file; it never runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

MAX_LINE_BYTES = (64 << 10) - 1
"""Bytes of the longest line, without its line feed; upstream's scanner has a buffer of 64 KiB."""

_BLANKS = b" \t"


@dataclass(frozen=True, slots=True)
class EnvFile:
    """The requested values of an environment file, up to the first line that is not an assignment."""

    values: dict[str, str] = field(default_factory=dict)
    error: ValueError | None = None

    def value(self, key: str) -> str:
        """Return the first value of a variable; "" when the file does not set it.

        Raises ValueError, with the number of the line, when an invalid line precedes the variable.
        """
        if key not in self.values and self.error is not None:
            raise self.error
        return self.values.get(key, "")


def parse_env_file(data: bytes, keys: Collection[str]) -> EnvFile:
    """Parse the values of these variables, of each the first. Blocks for a time linear in `data`.

    Bytes that are not UTF-8 are in the values as `surrogateescape` writes them.
    """
    missing = {key.encode(errors="surrogateescape"): key for key in keys}
    values: dict[str, str] = {}
    try:
        for name, value in _assignments(data):
            key = missing.pop(name, None)
            if key is not None:
                values[key] = value.decode(errors="surrogateescape")
            if not missing:
                break
    except ValueError as err:
        return EnvFile(values, err)
    return EnvFile(values)


def _assignments(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    lines = _lines(data)
    for number, line in lines:
        text = line.lstrip(_BLANKS)
        if not text or text.startswith(b"#"):
            continue
        name, equals, value = text.partition(b"=")
        if not equals or not name or name != name.rstrip(_BLANKS):
            raise _invalid(number, "write NAME='value', with no space before the =")
        if value[:1] in (b" ", b"\t"):
            yield name, b""
        elif value.startswith(b"'"):
            yield name, _quoted(value[1:], number, lines)
        else:
            raise _invalid(number, "write the value in single quotes")


def _quoted(rest: bytes, first: int, lines: Iterator[tuple[int, bytes]]) -> bytes:
    """Return a value from behind its opening quote up to the closing one, which may be lines below."""
    number = first
    parts = []
    while True:
        part, quote, after = rest.partition(b"'")
        parts.append(part)
        if quote:
            break
        found = next(lines, None)
        if found is None:
            raise _invalid(first, "close the single quote")
        number, rest = found
    after = after.lstrip(_BLANKS)
    if after and not after.startswith(b"#"):
        raise _invalid(number, "write nothing but a # comment after the value")
    return b"\n".join(parts)


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers, without line ends. Raises ValueError for one that is too long."""
    number, start = 0, 0
    while start < len(data):
        number += 1
        end = data.find(b"\n", start)
        if end < 0:
            end = len(data)
        if end - start > MAX_LINE_BYTES:
            raise _invalid(number, f"write at most {MAX_LINE_BYTES} bytes per line")
        yield number, data[start:end].removesuffix(b"\r")
        start = end + 1


def _invalid(line: int, remedy: str) -> ValueError:
    return ValueError(f"line {line} of the environment file is no assignment: {remedy}")
