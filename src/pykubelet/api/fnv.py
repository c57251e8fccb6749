"""The hash that Kubernetes marks containers and state files with: FNV-1a of 32 bits."""

from __future__ import annotations

_OFFSET = 0x811C9DC5
_PRIME = 0x01000193


def fnv1a_32(data: bytes) -> int:
    """The 32-bit FNV-1a hash."""
    value = _OFFSET
    for byte in data:
        value = (value ^ byte) * _PRIME & 0xFFFFFFFF
    return value
