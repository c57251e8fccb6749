"""The certificate by which the agent's own HTTPS server is known, wherever it comes from.

    requested      from the cluster (`serverTLSBootstrap`), for the node's addresses as they are now
    files          given by an administrator (`tlsCertFile`), who may replace them
    self-signed    made here once and kept in the certificate folder, when nothing else is configured

Each gives `current()`, the two files to serve with, tells `listen`ers when they have changed, and does
its work in `run()`. The files are told only when certificate and key fit together.
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

log = get_logger(__name__)
SERVER_PREFIX = "kubelet-server"
WAIT_SECONDS = 900.0
LOOK_SECONDS = 10.0
"""How often files are looked at."""
_RENEW_BEFORE = timedelta(days=1)
Files = tuple[Path, Path]


class ServingCertificate(Protocol):
    """What the HTTPS server needs to know."""

    def current(self) -> Files | None:
        """Give the files of certificate and key; None while there is nothing valid to serve with."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Have the listener called after each change."""

    async def run(self) -> NoReturn:
        """Do what is needed to stay valid, until cancelled."""


def serving_subject(
    node_name: str, addresses: Iterable[NodeAddress], *, dns_only: bool = False
) -> Subject | None:
    """Give the names that a serving certificate needs.

    None without an IP address, since API servers ask for the node by address; `dns_only` (the gate
    AllowDNSOnlyNodeCSR) is content with a name.
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
    """A serving certificate that the cluster issues.

    `addresses` gives the node's, which may be none yet; `given` are an administrator's files to serve
    with until the first certificate was issued.
    """

    def __init__(
        self,
        client: ApiClient,
        cert_dir: Path,
        node_name: str,
        addresses: Callable[[], Iterable[NodeAddress]],
        *,
        given: Files | None = None,
        dns_only: bool = False,
        metrics: CertificateMetrics | None = None,
        clock: Clock = utc_now,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._given = given
        self._clock = clock
        self._store = CertificateStore(cert_dir, SERVER_PREFIX, clock)
        try:
            self._store.recover()
        except OSError as err:
            log.error(err, "Failed to recover the serving certificate", path=str(cert_dir))
        self._rotation = Rotation(
            "serving",
            self._store.current,
            lambda: serving_subject(node_name, addresses(), dns_only=dns_only),
            self._obtain,
            metrics=metrics,
            clock=clock,
            chance=chance,
        )

    def current(self) -> Files | None:
        """Give the files; None until a certificate was issued, and after it has expired."""
        if (pair := self._rotation.current()) is not None:
            return pair.certificate, pair.key
        return self._given

    def listen(self, listener: Callable[[], None]) -> None:
        """Have the listener called after each change."""
        self._rotation.listen(listener)

    async def run(self) -> NoReturn:
        """Request and renew until cancelled."""
        await self._rotation.run()

    async def _obtain(self, subject: Subject) -> StoredPair:
        draft = await draft_request(subject)
        certificate = await request_certificate(
            self._client, draft, SERVING_SIGNER, self._clock(), seconds=WAIT_SECONDS
        )
        return self._store.update(certificate, draft.key.encode())


class CertificateFiles:
    """A serving certificate in files that others may replace; raises StoreError when they are unusable.

    `prepare` is awaited before each look at them.
    """

    def __init__(
        self, certificate: Path, key: Path, prepare: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._files = (certificate, key)
        self._prepare = prepare
        self._listeners: list[Callable[[], None]] = []
        self._seen = self._look()
        self._digest = read_pair(certificate, key).digest

    def current(self) -> Files:
        """Give the files."""
        return self._files

    def listen(self, listener: Callable[[], None]) -> None:
        """Have the listener called after each change."""
        self._listeners.append(listener)

    async def run(self) -> NoReturn:
        """Look for changes until cancelled."""
        clock = asyncio.get_running_loop().time
        complaints = ErrorLogLimiter(
            log, "Failed to renew the self-signed certificate", path=str(self._files[0])
        )
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._prepare is not None:
                try:
                    await self._prepare()
                except (KeyGenerationError, OSError) as err:
                    complaints.failed(err, clock())
                else:
                    complaints.succeeded(clock())
            self._check()

    def _check(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            digest = read_pair(*self._files).digest
        except StoreError as err:
            log.error(err, "Failed to use the changed serving certificate, keeping the one before")
            return
        if digest != self._digest:
            self._digest = digest
            log.info("Loaded certificate and key pair", path=str(self._files[0]))
            for listener in self._listeners:
                listener()

    def _look(self) -> list[tuple[int, ...] | None]:
        marks: list[tuple[int, ...] | None] = []
        for path in self._files:
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
    """Give the self-signed certificate of the folder, made if need be; raises MakingError, OSError.

    What an administrator put there (`kubelet.crt` and `kubelet.key`) is used as it is, one that was
    made for this host is made anew a day before it ends. While the agent runs, files that cannot be used
    are left alone: somebody may be about to replace them.
    """
    files = cert_dir / "kubelet.crt", cert_dir / "kubelet.key"

    async def make() -> None:
        dns, addresses = _host_names(host, ips)
        made = await self_signed(host, dns=dns, ips=addresses)
        # In this order: a certificate without its key is made anew at the next start.
        write_file(files[1], made.key.encode(), 0o600)
        write_file(files[0], made.certificate.encode(), 0o644)
        log.v(4).info("Using self-signed cert", tlsCertFile=str(files[0]), tlsPrivateKeyFile=str(files[1]))

    async def renew() -> None:
        try:
            ending = _is_ending(read_pair(*files), host, clock)
        except StoreError:
            return
        if ending:
            await make()

    try:
        ending = _is_ending(read_pair(*files), host, clock)
    except StoreError as err:
        log.v(2).info("Making a self-signed certificate", why=str(err))
        ending = True
    if ending:
        await make()
    return CertificateFiles(*files, renew)


def _is_ending(pair: StoredPair, host: str, clock: Clock) -> bool:
    """Whether a certificate is one that was made here, and it ends soon."""
    ours = re.fullmatch(re.escape(host[:40]) + r".*@[0-9]+", pair.subject.common_name)
    return ours is not None and pair.expired(clock() + _RENEW_BEFORE)


def _host_names(host: str, ips: Sequence[str]) -> tuple[list[str], list[str]]:
    try:
        return [], list(dict.fromkeys([str(parse_ip(host)), *ips]))
    except ValueError:
        return [host], list(ips)
