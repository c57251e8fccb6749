"""Minimal X.509 parser: PEM blocks, validity, names and public keys.

The validity explains why an API server rejects a certificate; the names show whether a certificate is
still the one that the node requires. Python's ssl module exposes them only for peers, and a complete X.509
library would increase the kubelet's memory by a tenth.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

_BLOCK = re.compile(
    rb"-----BEGIN (CERTIFICATE|CERTIFICATE REQUEST)-----\s([A-Za-z0-9+/=\s]++)-----END \1-----"
)
_OBJECT_ID = 0x06
_OCTET_STRING = 0x04
_SEQUENCE = 0x30
_SET = 0x31
_VERSION = 0xA0
_EXTENSIONS = 0xA3
_UTC_TIME = 0x17
_GENERALIZED_TIME = 0x18
_COMMON_NAME = b"\x55\x04\x03"
_ORGANIZATION = b"\x55\x04\x0a"
_ALTERNATIVE_NAMES = b"\x55\x1d\x11"
_DNS_NAME = 0x82
_IP_ADDRESS = 0x87


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Validity period of a certificate."""

    begins: datetime
    ends: datetime

    def problem(self, now: datetime) -> str | None:
        """Describe why the certificate is not valid at this time; None if it is valid."""
        if now > self.ends:
            return f"expired at {self.ends:%Y-%m-%dT%H:%M:%SZ}"
        if now < self.begins:
            return f"is not valid before {self.begins:%Y-%m-%dT%H:%M:%SZ}, check this machine's clock"
        return None


@dataclass(frozen=True, slots=True)
class Subject:
    """Subject of a certificate, in a stable order; `dns` and `ips` are alternative names."""

    common_name: str
    organizations: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    ips: tuple[str, ...] = ()

    def covers(self, required: Subject) -> bool:
        """Return whether this certificate has all names of `required`; additional names are allowed."""
        return self.common_name == required.common_name and all(
            set(needed) <= set(present)
            for needed, present in (
                (required.organizations, self.organizations),
                (required.dns, self.dns),
                (required.ips, self.ips),
            )
        )


def certificates(pem: bytes) -> list[bytes]:
    """Return the certificates of a PEM file in DER, in order; other blocks and text are skipped."""
    return _blocks(pem, b"CERTIFICATE")


def lifetime(der: bytes) -> Lifetime:
    """Return the validity period of a certificate. Raises ValueError if it is malformed."""
    try:
        dates = _Reader(_up_to_dates(der).take(_SEQUENCE))
        return Lifetime(dates.take_time(), dates.take_time())
    except IndexError:
        raise ValueError("the certificate is cut off") from None


def subject(der: bytes) -> Subject:
    """Return the subject of a certificate. Raises ValueError if it is malformed."""
    try:
        fields = _up_to_dates(der)
        fields.skip()
        common_name, organizations = _read_name(fields.take(_SEQUENCE))
        dns: list[str] = []
        ips: list[str] = []
        while not fields.at_end:
            if fields.tag != _EXTENSIONS:
                fields.skip()
                continue
            for name, value in _read_extensions(fields.skip()):
                if name == _ALTERNATIVE_NAMES:
                    _read_alternatives(value, dns, ips)
        return Subject(common_name, tuple(organizations), tuple(sorted(dns)), tuple(sorted(ips)))
    except IndexError:
        raise ValueError("the certificate is cut off") from None


def read_request(pem: bytes) -> tuple[Subject, bytes]:
    """Return the subject and the public key, in DER, of a certificate request. Raises ValueError.

    Alternative names are not parsed.
    """
    found = _blocks(pem, b"CERTIFICATE REQUEST")
    if not found:
        raise ValueError("there is no certificate request")
    try:
        fields = _Reader(_Reader(_Reader(found[0]).take(_SEQUENCE)).take(_SEQUENCE))
        fields.skip()
        common_name, organizations = _read_name(fields.take(_SEQUENCE))
        return Subject(common_name, tuple(organizations)), fields.take_element(_SEQUENCE)
    except IndexError:
        raise ValueError("the certificate request is cut off") from None


def _blocks(pem: bytes, kind: bytes) -> list[bytes]:
    found = []
    for block in _BLOCK.finditer(pem):
        if block[1] == kind:
            try:
                found.append(base64.b64decode(b"".join(block[2].split()), validate=True))
            except binascii.Error:
                continue
    return found


def _up_to_dates(der: bytes) -> _Reader:
    fields = _Reader(_Reader(_Reader(der).take(_SEQUENCE)).take(_SEQUENCE))
    if fields.tag == _VERSION:
        fields.skip()
    for _ in ("serial number", "signature", "issuer"):
        fields.skip()
    return fields


def _read_name(data: bytes) -> tuple[str, list[str]]:
    common_name, organizations = "", []
    parts = _Reader(data)
    while not parts.at_end:
        attributes = _Reader(parts.take(_SET))
        while not attributes.at_end:
            attribute = _Reader(attributes.take(_SEQUENCE))
            kind, text = attribute.take(_OBJECT_ID), attribute.skip().decode(errors="replace")
            if kind == _COMMON_NAME:
                common_name = text
            elif kind == _ORGANIZATION:
                organizations.append(text)
    return common_name, organizations


def _read_extensions(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    extensions = _Reader(_Reader(data).take(_SEQUENCE))
    while not extensions.at_end:
        extension = _Reader(extensions.take(_SEQUENCE))
        kind = extension.take(_OBJECT_ID)
        # An optional critical flag precedes the value.
        while extension.tag != _OCTET_STRING:
            extension.skip()
        yield kind, extension.skip()


def _read_alternatives(data: bytes, dns: list[str], ips: list[str]) -> None:
    names = _Reader(_Reader(data).take(_SEQUENCE))
    while not names.at_end:
        tag, value = names.tag, names.skip()
        if tag == _DNS_NAME:
            dns.append(value.decode("ascii", errors="replace"))
        elif tag == _IP_ADDRESS and len(value) in (4, 16):
            ips.append(str(ipaddress.ip_address(value)))


class _Reader:
    """Reader of the elements of a DER structure."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def at_end(self) -> bool:
        return self._position >= len(self._data)

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

    def take_element(self, tag: int) -> bytes:
        """Consume and return an element including its header."""
        start = self._position
        self.take(tag)
        return self._data[start : self._position]

    def take_time(self) -> datetime:
        tag, text = self.tag, self.skip().decode("ascii", errors="replace")
        if tag == _UTC_TIME:
            # Two-digit years mean 1950 to 2049 (RFC 5280).
            text = ("19" if text[:2] >= "50" else "20") + text
        elif tag != _GENERALIZED_TIME:
            raise ValueError("this is not a certificate")
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
