"""Reading certificates as far as the agent needs it: the PEM blocks of a file, and their dates.

The dates are what a person needs to hear when the API server refuses a certificate. They are read
from the certificate's own structure, because Python's TLS tells them only of its peers.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from datetime import UTC, datetime

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----\s+([A-Za-z0-9+/=\s]+?)-----END CERTIFICATE-----")
_SEQUENCE = 0x30
_VERSION = 0xA0
_UTC_TIME = 0x17
_GENERALIZED_TIME = 0x18


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a certificate is valid."""

    begins: datetime
    ends: datetime

    def problem(self, now: datetime) -> str | None:
        """Say that the certificate is not valid at this time; None when it is."""
        if now > self.ends:
            return f"expired at {self.ends:%Y-%m-%dT%H:%M:%SZ}"
        if now < self.begins:
            return f"is not valid before {self.begins:%Y-%m-%dT%H:%M:%SZ}, check this machine's clock"
        return None


def certificates(pem: bytes) -> list[bytes]:
    """Give the certificates of a PEM file in DER, in their order; other blocks and text are skipped."""
    found = []
    for block in _BLOCK.finditer(pem):
        try:
            found.append(base64.b64decode(b"".join(block[1].split()), validate=True))
        except binascii.Error:
            continue
    return found


def lifetime(der: bytes) -> Lifetime:
    """Give the lifetime of a certificate; raises ValueError when it is none."""
    try:
        fields = _Reader(_Reader(_Reader(der).take(_SEQUENCE)).take(_SEQUENCE))
        if fields.tag == _VERSION:
            fields.skip()
        for _ in ("serial number", "signature", "issuer"):
            fields.skip()
        dates = _Reader(fields.take(_SEQUENCE))
        return Lifetime(dates.take_time(), dates.take_time())
    except IndexError:
        raise ValueError("the certificate is cut off") from None


class _Reader:
    """Goes through the elements of a DER structure."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def tag(self) -> int:
        return self._data[self._position]

    def skip(self) -> bytes:
        length = self._data[self._position + 1]
        start = self._position + 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(self._data[start : start + size])
            start += size
        self._position = start + length
        if self._position > len(self._data):
            raise IndexError
        return self._data[start : self._position]

    def take(self, tag: int) -> bytes:
        if self.tag != tag:
            raise ValueError("this is not a certificate")
        return self.skip()

    def take_time(self) -> datetime:
        tag, text = self.tag, self.skip().decode("ascii", errors="replace")
        if tag == _UTC_TIME:
            # Two digits of the year: from 1950 to 2049, by the standard.
            text = ("19" if text[:2] >= "50" else "20") + text
        elif tag != _GENERALIZED_TIME:
            raise ValueError("this is not a certificate")
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
