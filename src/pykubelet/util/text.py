"""Safe rendering of untrusted text in messages, sizes, and the FNV-1a hash of containers and state files."""

from __future__ import annotations

import re

LONGEST_SHOWN = 60
_NO_TEXT = re.compile("[\ud800-\udfff]")


def quoted(text: str) -> str:
    """Quote a text for a message: control characters are escaped, a long text is shortened in the middle."""
    if len(text) > LONGEST_SHOWN:
        half = LONGEST_SHOWN // 2
        text = f"{text[:half]}…{text[-half:]}"
    return repr(text)


def readable(text: str) -> str:
    """Replace lone surrogates (undecodable bytes, as `surrogateescape` keeps them) by U+FFFD."""
    return _NO_TEXT.sub("\ufffd", text)


def format_size(size: int) -> str:
    """Format bytes as upstream's event does, such as `1.5 GiB`."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def escape_unprintable(text: str, *, lines: bool = True) -> str:
    """Escape characters that are not printable; `lines` keeps line breaks and tabs."""
    allowed = "\n\t" if lines else ""
    return "".join(
        character if character.isprintable() or character in allowed else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()


_OFFSET = 0x811C9DC5
_PRIME = 0x01000193


def fnv1a_32(data: bytes) -> int:
    """Return the 32-bit FNV-1a hash, which Kubernetes uses for container specs and checkpoints."""
    value = _OFFSET
    for byte in data:
        value = (value ^ byte) * _PRIME & 0xFFFFFFFF
    return value
