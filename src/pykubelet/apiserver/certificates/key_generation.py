"""Keys, certificate requests and self-signed certificates, had from a short-lived process.

The process (`certificate_worker.py`) gets its order and gives its answer through pipes, so that no key
touches a disk before its owner stores it. It is bounded in time and ends when nobody waits for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from pykubelet.apiserver.certificates.x509 import Subject
from pykubelet.linux.processes import OutputTooLarge, run_bounded

# Making a key takes a fifth of a second; a machine that is starting forty pods can be very slow.
_SECONDS = 60.0
_MAX_BYTES = 1024 * 1024


class KeyGenerationError(Exception):
    """No key or certificate could be made: one line."""


class SigningRequest(msgspec.Struct, frozen=True):
    """A key and a request for a certificate for it, both PEM."""

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
    """Make a request, for this key if it is one and else for a new one; raises MakingError."""
    order = _Order("request", subject.common_name, subject.organizations, subject.dns, subject.ips, key)
    return msgspec.json.decode(await _run(order), type=SigningRequest)


async def self_signed(host: str, *, dns: Sequence[str] = (), ips: Sequence[str] = ()) -> SelfSigned:
    """Make a serving certificate for a host that nobody vouches for; raises MakingError."""
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
    # Without -P a module in the folder where the agent was started could take the library's place.
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
        raise KeyGenerationError(f"no key could be made: {finished.complaint or f'status {finished.status}'}")
    return finished.output
