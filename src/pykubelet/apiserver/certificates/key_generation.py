"""Generation of keys, certificate requests and self-signed certificates in a short-lived subprocess.

The subprocess (`key_generation_worker.py`) gets its order and returns its result through pipes, so that
no key is on disk before its owner stores it. Its run time is bounded, and it is killed if the caller is
cancelled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from pykubelet.apiserver.certificates.x509 import Subject
from pykubelet.linux.processes import OutputTooLarge, run_bounded

# Generating a key takes 0.2 s, but much longer on a host that is starting forty pods.
_SECONDS = 60.0
_MAX_BYTES = 1024 * 1024


class KeyGenerationError(Exception):
    """No key or certificate could be generated: one line."""


class SigningRequest(msgspec.Struct, frozen=True):
    """A key and a certificate request for it, both PEM."""

    key: str
    request: str
    rsa: bool = False

    def __repr__(self) -> str:
        return "Draft(…)"


class SelfSigned(msgspec.Struct, frozen=True):
    """A key and its certificate, both PEM."""

    key: str
    certificate: str

    def __repr__(self) -> str:
        return "SelfSigned(…)"


async def draft_request(subject: Subject, key: str = "") -> SigningRequest:
    """Return a request for this key, or for a new one if `key` is not valid. Raises KeyGenerationError."""
    order = _Order("request", subject.common_name, subject.organizations, subject.dns, subject.ips, key)
    return msgspec.json.decode(await _run(order), type=SigningRequest)


class StubRequest(msgspec.Struct, frozen=True):
    """A key as PEM (PKCS#8), and a PKCS#10 request as DER that only proves the possession of the key."""

    key: str
    request: bytes

    def __repr__(self) -> str:
        return "StubRequest(…)"


KEY_TYPES = frozenset(("RSA3072", "RSA4096", "ECDSAP256", "ECDSAP384", "ECDSAP521", "ED25519"))
"""Key types of pod certificates."""


async def draft_stub_request(key_type: str) -> StubRequest:
    """Return a new key of a type of KEY_TYPES and a stub request for it. Raises KeyGenerationError."""
    if key_type not in KEY_TYPES:
        raise KeyGenerationError(f'unknown key type "{key_type}"; known are {", ".join(sorted(KEY_TYPES))}')
    return msgspec.json.decode(await _run(_Order("stub-request", "", key=key_type)), type=StubRequest)


async def self_signed(host: str, *, dns: Sequence[str] = (), ips: Sequence[str] = ()) -> SelfSigned:
    """Return a self-signed serving certificate for a host. Raises KeyGenerationError."""
    order = _Order("self-signed", host, dns=tuple(dns), ips=tuple(ips))
    return msgspec.json.decode(await _run(order), type=SelfSigned)


@dataclass(frozen=True, slots=True)
class _Order:
    make: str
    common_name: str
    organizations: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    ips: tuple[str, ...] = ()
    key: str = field(default="", repr=False)


async def _run(order: _Order) -> bytes:
    # Without -P, a module in the working directory of the kubelet could shadow the library.
    argv = [sys.executable, "-P", "-m", "pykubelet.apiserver.certificates.key_generation_worker"]
    try:
        finished = await run_bounded(
            argv, os.environ, seconds=_SECONDS, max_bytes=_MAX_BYTES, data=msgspec.json.encode(order)
        )
    except TimeoutError:
        raise KeyGenerationError(
            f"no key could be made within {_SECONDS:g} s: the machine is too busy"
        ) from None
    except OSError as err:
        raise KeyGenerationError(f"no key could be made: {argv[0]} cannot be run, {err.strerror}") from None
    except OutputTooLarge:
        raise KeyGenerationError("no key could be made: the program that makes them talks too much") from None
    if finished.status:
        raise KeyGenerationError(f"no key could be made: {finished.stderr or f'status {finished.status}'}")
    return finished.output
