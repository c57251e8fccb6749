"""Serving certificate of the kubelet's HTTPS server.

    requested      issued by the cluster (`serverTLSBootstrap`) for the node's current addresses
    files          configured by an administrator (`tlsCertFile`), who may replace them
    self-signed    generated once and stored in the certificate directory, if nothing else is configured

Each implements `current()`, the two files to serve with, calls its listeners after a change, and does its
work in `run()`. A change is announced only if certificate and key match.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Protocol

from pykubelet.api.certificates import SERVING_SIGNER
from pykubelet.api.ip import parse_ip
from pykubelet.api.node import NodeAddress
from pykubelet.apiserver.certificates.bootstrap import Clock, request_certificate
from pykubelet.apiserver.certificates.key_generation import KeyGenerationError, draft_request, self_signed
from pykubelet.apiserver.certificates.rotation import Rotation
from pykubelet.apiserver.certificates.store import (
    CertificateMetrics,
    CertificateStore,
    StoredPair,
    StoreError,
    read_pair,
    utc_now,
    write_file,
)
from pykubelet.apiserver.certificates.x509 import Subject
from pykubelet.apiserver.client import ApiClient
from pykubelet.logs import get_logger
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
SERVER_PREFIX = "kubelet-server"
WAIT_SECONDS = 900.0
CHECK_SECONDS = 10.0
"""Seconds between checks of the files."""
_RENEW_BEFORE = timedelta(days=1)
Files = tuple[Path, Path]


class ServingCertificate(Protocol):
    """Source of the certificate for the HTTPS server."""

    def current(self) -> Files | None:
        """Return the paths of certificate and key; None while there is no valid certificate."""

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Add a listener that is called after each change."""

    async def run(self) -> NoReturn:
        """Keep the certificate valid until cancelled."""


def serving_subject(
    node_name: str, addresses: Iterable[NodeAddress], *, dns_only: bool = False
) -> Subject | None:
    """Return the subject of the serving certificate.

    None without an IP address, since API servers connect to the node by address; with `dns_only` (the feature
    gate AllowDNSOnlyNodeCSR) a DNS name suffices.
    """
    dns, ips = set(), set()
    for address in addresses:
        if address.type in ("ExternalDNS", "InternalDNS"):
            dns.add(address.address)
        elif address.type in ("Hostname", "ExternalIP", "InternalIP"):
            try:
                ips.add(str(parse_ip(address.address)))
            except ValueError:
                if address.type == "Hostname":
                    dns.add(address.address)
    dns.discard("")
    if not ips and not (dns_only and dns):
        return None
    return Subject(f"system:node:{node_name}", ("system:nodes",), tuple(sorted(dns)), tuple(sorted(ips)))


class RequestedCertificate:
    """A serving certificate issued by the cluster.

    `addresses` returns the node's addresses, possibly empty; `fallback` are an administrator's files to serve
    with while there is no valid issued certificate.
    """

    def __init__(
        self,
        client: ApiClient,
        cert_dir: Path,
        node_name: str,
        addresses: Callable[[], Iterable[NodeAddress]],
        *,
        fallback: Files | None = None,
        dns_only: bool = False,
        metrics: CertificateMetrics | None = None,
        clock: Clock = utc_now,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._fallback = fallback
        self._clock = clock
        self._store = CertificateStore(cert_dir, SERVER_PREFIX, clock)
        try:
            self._store.recover()
        except OSError as err:
            log.error(err, "Failed to recover serving certificate", path=str(cert_dir))
        self._rotation = Rotation(
            "serving",
            self._store.current,
            lambda: serving_subject(node_name, addresses(), dns_only=dns_only),
            self._obtain,
            metrics=metrics,
            clock=clock,
            rng=rng,
        )

    def set_fallback(self, files: Files | None) -> None:
        """Replace the files to serve with while there is no valid issued certificate."""
        self._fallback = files

    def current(self) -> Files | None:
        """Return the issued certificate while it is valid, else the administrator's files, or None."""
        if (pair := self._rotation.current()) is not None:
            return pair.certificate, pair.key
        return self._fallback

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Add a listener that is called after each change."""
        self._rotation.add_listener(listener)

    async def run(self) -> NoReturn:
        """Request and renew until cancelled."""
        await self._rotation.run()

    async def _obtain(self, subject: Subject) -> StoredPair:
        draft = await draft_request(subject)
        certificate = await request_certificate(
            self._client, draft, SERVING_SIGNER, self._clock(), seconds=WAIT_SECONDS
        )
        return self._store.update(certificate, draft.key.encode())


class SwitchableCertificate:
    """A serving certificate whose source can be replaced by another one."""

    def __init__(self, source: ServingCertificate) -> None:
        self._source = source
        self._listeners: list[Callable[[], None]] = []
        self._switched = asyncio.Event()
        source.add_listener(self._notify)

    def switch(self, source: ServingCertificate) -> None:
        """Use another source from now on; the previous one ends."""
        self._source = source
        source.add_listener(self._notify)
        self._switched.set()
        self._notify()

    def current(self) -> Files | None:
        """Return the paths of certificate and key; None while there is no valid certificate."""
        return self._source.current()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Add a listener that is called after each change."""
        self._listeners.append(listener)

    async def run(self) -> NoReturn:
        """Keep the certificate of the current source valid until cancelled."""
        while True:
            self._switched.clear()
            async with TaskScope() as scope:
                scope.start(self._source.run(), name="serving-certificate-source")
                await self._switched.wait()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


class CertificateFiles:
    """A serving certificate in files that other processes may replace.

    `prepare` is awaited before each check of the files. Raises StoreError if they are not usable initially.
    """

    def __init__(
        self, certificate: Path, key: Path, prepare: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._files = (certificate, key)
        self._prepare = prepare
        self._listeners: list[Callable[[], None]] = []
        self._last_fingerprint = _fingerprint(self._files)
        self._digest = read_pair(certificate, key).digest

    def current(self) -> Files:
        """Return the files."""
        return self._files

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Add a listener that is called after each change."""
        self._listeners.append(listener)

    async def run(self) -> NoReturn:
        """Check for changes until cancelled."""
        clock = asyncio.get_running_loop().time
        error_log = ErrorLogLimiter(
            log, "Failed to renew the self-signed certificate", path=str(self._files[0])
        )
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self._prepare is not None:
                try:
                    await self._prepare()
                except (KeyGenerationError, OSError) as err:
                    error_log.failed(err, clock())
                else:
                    error_log.succeeded(clock())
            self._check()

    def _check(self) -> None:
        fingerprint = _fingerprint(self._files)
        if fingerprint == self._last_fingerprint:
            return
        self._last_fingerprint = fingerprint
        try:
            digest = read_pair(*self._files).digest
        except StoreError as err:
            log.error(err, "Failed to load changed serving certificate, keeping the previous one")
            return
        if digest != self._digest:
            self._digest = digest
            log.info("Loaded certificate and key pair", path=str(self._files[0]))
            for listener in self._listeners:
                listener()


def _fingerprint(files: Iterable[Path]) -> list[tuple[int, ...] | None]:
    """Return what changes when a file is replaced or written, for each file."""
    marks: list[tuple[int, ...] | None] = []
    for path in files:
        try:
            found = path.stat()
        except OSError:
            marks.append(None)
        else:
            marks.append((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
    return marks


async def self_signed_certificate(
    cert_dir: Path, host: str, *, ips: Sequence[str] = (), clock: Clock = utc_now
) -> CertificateFiles:
    """Return the self-signed certificate of the directory, generated if necessary.

    An administrator's files there (`kubelet.crt` and `kubelet.key`) are used unchanged; a certificate
    generated for this host is regenerated a day before it expires. While the kubelet runs, unusable files are
    left alone: a replacement may be in progress. Raises KeyGenerationError and OSError.
    """
    files = cert_dir / "kubelet.crt", cert_dir / "kubelet.key"

    async def generate() -> None:
        dns, addresses = _host_names(host, ips)
        generated = await self_signed(host, dns=dns, ips=addresses)
        # In this order: if only the key was written, the pair is regenerated at the next start.
        write_file(files[1], generated.key.encode(), 0o600)
        write_file(files[0], generated.certificate.encode(), 0o644)
        log.v(4).info("Using self-signed cert", tlsCertFile=str(files[0]), tlsPrivateKeyFile=str(files[1]))

    fingerprint = _fingerprint(files)
    pair: StoredPair | None = None

    async def renew() -> None:
        nonlocal fingerprint, pair
        before, fingerprint = fingerprint, _fingerprint(files)
        try:
            # Parsed again only if the files have changed: this is called every few seconds.
            pair = pair if pair is not None and fingerprint == before else read_pair(*files)
        except StoreError:
            pair = None
            return
        if _expires_soon(pair, host, clock):
            await generate()

    try:
        pair = read_pair(*files)
        expires_soon = _expires_soon(pair, host, clock)
    except StoreError as err:
        log.v(2).info("Generating self-signed certificate", err=str(err))
        expires_soon = True
    if expires_soon:
        await generate()
    return CertificateFiles(*files, renew)


def _expires_soon(pair: StoredPair, host: str, clock: Clock) -> bool:
    """Return whether the certificate was generated by the kubelet and expires within a day."""
    ours = re.fullmatch(re.escape(host[:40]) + r".*@[0-9]+", pair.subject.common_name)
    return ours is not None and pair.expired(clock() + _RENEW_BEFORE)


def _host_names(host: str, ips: Sequence[str]) -> tuple[list[str], list[str]]:
    try:
        return [], list(dict.fromkeys([str(parse_ip(host)), *ips]))
    except ValueError:
        return [host], list(ips)
