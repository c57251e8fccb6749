"""Sequential reader of tar archives from untrusted sources, with bounded memory.

Python's tarfile keeps every member, and reads extended headers of any size into memory. This one keeps
nothing: it yields one member after the other, and names of more than `MAX_NAME_BYTES`, which only extended
headers have, are an error. It reads what image archives contain: ustar, pax and GNU long names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

BLOCK = 512
CHUNK_BYTES = 1024 * 1024
MAX_NAME_BYTES = 4096
_MAX_HEADER_BYTES = 64 * 1024
_MAX_SIZE = 2**50
_CHECKSUM = slice(148, 156)


class TarError(ValueError):
    """Raised when the data is not a tar archive that can be read; the text completes "it …"."""


class Source(Protocol):
    """A file, or a decompressor."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive; its content must be read, or skipped, before the next one."""

    name: str
    size: int
    kind: bytes
    """Type flag of the header."""
    link: str
    """Target of a link."""
    reader: TarReader

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.kind in (b"0", b"\0")

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return self.kind == b"5"

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic or hard link."""
        return self.kind in (b"1", b"2")

    def chunks(self) -> Iterator[bytes]:
        """Yield the content. Raises TarError when the archive ends before."""
        return self.reader.content()


class TarReader:
    """Reader of one archive, to iterate over once. Raises TarError and what the source raises."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._left = 0
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        overrides: dict[str, str] = {}
        while (block := self._read_header()) is not None:
            kind, size = block[156:157], _number(block[124:136])
            if size > _MAX_SIZE:
                raise TarError(f"has a member of {size} bytes")
            self._left, self._padding = size, -size % BLOCK
            if kind in (b"x", b"g", b"L", b"K"):
                data = self._extended()
                if kind == b"x":
                    overrides |= _pax(data)
                elif kind != b"g":
                    overrides["path" if kind == b"L" else "linkpath"] = _text(data)
                continue
            if "size" in overrides:
                self._left = _decimal(overrides["size"])
                self._padding = -self._left % BLOCK
            if kind not in (b"0", b"\0", b"7"):
                self._left = self._padding = 0
            yield Member(
                name=overrides.get("path") or _ustar_name(block),
                size=self._left,
                kind=b"0" if kind == b"7" else kind,
                link=overrides.get("linkpath") or _text(block[157:257]),
                reader=self,
            )
            overrides = {}
            for _ in self.content():
                pass

    def content(self) -> Iterator[bytes]:
        """Yield the rest of the current member's content."""
        while self._left:
            chunk = self._source.read(min(self._left, CHUNK_BYTES))
            if not chunk:
                raise TarError("ends in the middle of a file: it is incomplete")
            self._left -= len(chunk)
            yield chunk
        padding, self._padding = self._padding, 0
        self._exactly(padding)

    def _extended(self) -> bytes:
        if self._left > _MAX_HEADER_BYTES:
            raise TarError(f"has an extended header of {self._left} bytes")
        return b"".join(self.content())

    def _read_header(self) -> bytes | None:
        """Return the next header; None at the end of the archive."""
        block = self._exactly(BLOCK, may_end=True)
        if not block.strip(b"\0"):
            return None
        stored = _number(block[_CHECKSUM])
        if sum(block) - sum(block[_CHECKSUM]) + 8 * 0x20 != stored:
            raise TarError("is not a tar archive, or is damaged")
        return block

    def _exactly(self, size: int, *, may_end: bool = False) -> bytes:
        data = b""
        while len(data) < size:
            part = self._source.read(size - len(data))
            if not part:
                if may_end and not data:
                    return b""
                raise TarError("ends too early: it is incomplete, or not a tar archive")
            data += part
        return data


def _ustar_name(block: bytes) -> str:
    name = _text(block[:100])
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _number(field: bytes) -> int:
    """Return an octal number, or one in GNU's binary encoding."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.split(b"\0")[0].strip() or b"0"
    try:
        return int(digits, 8)
    except ValueError:
        raise TarError("is not a tar archive, or is damaged") from None


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise TarError("has an invalid extended header")
    return int(text)


def _pax(data: bytes) -> dict[str, str]:
    """Return path, linkpath and size of an extended header: records of `LENGTH KEY=VALUE\\n`."""
    found = {}
    while data:
        length, space, _ = data.partition(b" ")
        if not space or not length.isdigit() or not len(length) + 1 < int(length[:8]) <= len(data):
            raise TarError("has an invalid extended header")
        record, data = data[len(length) + 1 : int(length[:8])], data[int(length[:8]) :]
        key, _, value = record.removesuffix(b"\n").partition(b"=")
        if key in (b"path", b"linkpath", b"size"):
            found[key.decode()] = _text(value)
    return found


def _text(field: bytes) -> str:
    text = field.partition(b"\0")[0]
    if len(text) > MAX_NAME_BYTES:
        raise TarError(f"has a name of more than {MAX_NAME_BYTES} bytes")
    return text.decode(errors="surrogateescape")
