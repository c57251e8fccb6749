"""Showing a stranger's text in a message of ours: on one line, and never a page of it.

The hash that Kubernetes marks containers and state files with: FNV-1a of 32 bits.
"""

from __future__ import annotations

import re

LONGEST_SHOWN = 60
_NO_TEXT = re.compile("[\ud800-\udfff]")


def quoted(text: str) -> str:
    """Quote a text for a message; line breaks are escaped and a long middle is left out."""
    if len(text) > LONGEST_SHOWN:
        half = LONGEST_SHOWN // 2
        text = f"{text[:half]}…{text[-half:]}"
    return repr(text)


def readable(text: str) -> str:
    """Give a text that can be sent: bytes that were none, kept as `surrogateescape` does, become U+FFFD."""
    return _NO_TEXT.sub("\ufffd", text)


_OFFSET = 0x811C9DC5
_PRIME = 0x01000193


def fnv1a_32(data: bytes) -> int:
    """The 32-bit FNV-1a hash."""
    value = _OFFSET
    for byte in data:
        value = (value ^ byte) * _PRIME & 0xFFFFFFFF
    return value
