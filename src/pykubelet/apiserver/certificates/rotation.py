"""Certificate rotation: renewal before expiry, and rotation of the client certificate.

`Rotation` obtains and stores a new certificate when 70 to 90 % of its lifetime are over (random, so that
the nodes of a cluster do not renew simultaneously), when it is missing or expired, or when its names no
longer match. Until then the old one stays in use. Failures are retried with exponential back-off, without
limit.

`ClientCertificateRotation` rotates the node's client certificate (`rotateCertificates`). The kubelet does
not wait for the first certificate: static pods run, and API requests fail until it is issued. It is renewed
with its own identity; if it is missing or expired, with the bootstrap credentials, or without those with
the current contents of the kubeconfig.

    rotation = ClientCertificateRotation(kubeconfig, bootstrap, cert_dir, node_name, load_kubeconfig)
    transport = Transport(rotation.prepare())
    scope.start(rotation.run(), name="client certificate")
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from pykubelet.api.certificates import CLIENT_SIGNER
from pykubelet.apiserver.certificates.bootstrap import (
    CLIENT_PREFIX,
    Clock,
    Load,
    first_certificate,
    kubeconfig_problem,
    material,
    node_subject,
    request_certificate,
    with_certificate,
    write_kubeconfig,
)
from pykubelet.apiserver.certificates.key_generation import KeyGenerationError, draft_request
from pykubelet.apiserver.certificates.store import (
    CertificateMetrics,
    CertificateStore,
    StoredPair,
    StoreError,
    utc_now,
)
from pykubelet.apiserver.certificates.x509 import Subject
from pykubelet.apiserver.client import ApiClient, Limits
from pykubelet.apiserver.errors import KubeconfigError, KubeError
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.transport import Transport
from pykubelet.logs import get_logger
from pykubelet.util.backoff import Backoff, ErrorLogLimiter
from pykubelet.util.tasks import TaskScope, wait_seconds

log = get_logger(__name__)
EARLIEST, LATEST = 0.7, 0.9
"""Fractions of its lifetime between which a certificate is replaced."""
_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS = 2.0, 16.0

# Clocks are set and hosts are suspended: no wait for a date is longer than this.
_CHECK_SECONDS = 10.0
_SUBJECT_POLL_SECONDS = 1.0


def seconds_left(pair: StoredPair | None, required: Subject, now: datetime, fraction: float) -> float:
    """Return the seconds until a certificate is to be replaced; 0 if it is due."""
    if pair is None or not pair.subject.covers(required):
        return 0.0
    life = pair.life
    due = life.begins + (life.ends - life.begins) * fraction
    return max(0.0, (due - now).total_seconds())


class Rotation:
    """Rotation of one stored certificate.

    `stored` returns the pair on disk; `required_subject` returns the subject that the certificate must have,
    None while it is unknown; `obtain` requests and stores a certificate for that subject, and raises
    KubeError, KeyGenerationError, StoreError or OSError. It is cancelled if the required subject changes.
    """

    def __init__(
        self,
        what: str,
        stored: Callable[[], StoredPair | None],
        required_subject: Callable[[], Subject | None],
        obtain: Callable[[Subject], Awaitable[StoredPair]],
        *,
        metrics: CertificateMetrics | None = None,
        clock: Callable[[], datetime] = utc_now,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._what = what
        self._stored = stored
        self._required_subject = required_subject
        self._obtain = obtain
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._pair: StoredPair | None = None
        self._fraction = LATEST
        self._listeners: list[Callable[[], None]] = []
        self._backoff = Backoff(_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS, rng=rng)
        self._error_log = ErrorLogLimiter(log, "Failed to renew a certificate", certificate=what)
        self._set_pair(stored())
        if metrics is not None:
            metrics.export(self._seconds_valid)

    def current(self) -> StoredPair | None:
        """Return the pair in use; None if it is missing or expired."""
        return None if self._pair is None or self._pair.expired(self._clock()) else self._pair

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Add a listener that is called after each change of the pair."""
        self._listeners.append(listener)

    async def run(self, *, at_once: bool = False) -> NoReturn:
        """Rotate until cancelled; `at_once` starts with replacing a certificate that is still valid."""
        log.v(2).info("Certificate rotation is enabled", certificate=self._what)
        while True:
            subject = self._required_subject() if at_once else await self._wait_until_due()
            if subject is None:
                await asyncio.sleep(_SUBJECT_POLL_SECONDS)
                continue
            if await self._renew(subject):
                at_once = False
            if at_once or seconds_left(self._pair, subject, self._clock(), self._fraction) == 0:
                # Also after a useless success, such as a signer that omits names.
                await asyncio.sleep(self._backoff.next(asyncio.get_running_loop().time()))

    async def _wait_until_due(self) -> Subject:
        while True:
            subject = self._required_subject()
            left = math.inf
            if subject is not None:
                left = seconds_left(self._pair, subject, self._clock(), self._fraction)
                if left == 0:
                    # Another process may have stored a newer one.
                    self._set_pair(self._stored())
                    left = seconds_left(self._pair, subject, self._clock(), self._fraction)
                    if left == 0:
                        return subject
            longest = _SUBJECT_POLL_SECONDS if self._pair is None else _CHECK_SECONDS
            await asyncio.sleep(wait_seconds(min(left, longest)))

    async def _renew(self, subject: Subject) -> bool:
        log.v(2).info("Rotating certificates", certificate=self._what)
        async with TaskScope() as scope:
            attempt = scope.start(self._attempt(subject), name=f"{self._what} certificate")
            change = scope.start(
                self._wait_subject_change(subject), name=f"names of the {self._what} certificate"
            )
            await asyncio.wait([attempt, change], return_when=asyncio.FIRST_COMPLETED)
        return not attempt.cancelled() and attempt.result()

    async def _attempt(self, subject: Subject) -> bool:
        loop = asyncio.get_running_loop()
        try:
            pair = await self._obtain(subject)
        except (KubeError, KeyGenerationError, StoreError, OSError) as err:
            if self._metrics is not None:
                self._metrics.failed()
            self._error_log.failed(err, loop.time())
            return False
        self._error_log.succeeded(loop.time())
        log.info("Certificate renewed", certificate=self._what, expires=pair.life.ends.isoformat())
        if self._pair is not None and self._metrics is not None:
            self._metrics.replaced((self._clock() - self._pair.life.begins).total_seconds())
        self._set_pair(pair)
        return True

    async def _wait_subject_change(self, subject: Subject) -> None:
        while True:
            await asyncio.sleep(_SUBJECT_POLL_SECONDS)
            if self._required_subject() != subject:
                log.v(2).info("Certificate names changed, rotating", certificate=self._what)
                return

    def _set_pair(self, pair: StoredPair | None) -> None:
        if pair is None or pair == self._pair:
            return
        self._pair = pair
        self._fraction = EARLIEST + (LATEST - EARLIEST) * self._rng()
        for listener in self._listeners:
            listener()

    def _seconds_valid(self) -> float:
        pair = self.current()
        return math.inf if pair is None else math.trunc((pair.life.ends - self._clock()).total_seconds())


WAIT_SECONDS = 900.0
"""Seconds after which a request without a decision is replaced by a new one."""


class ClientCertificateRotation:
    """Rotation of the client certificate of the node."""

    def __init__(
        self,
        kubeconfig: Path,
        bootstrap: Path | None,
        cert_dir: Path,
        node_name: str,
        load: Load,
        *,
        metrics: CertificateMetrics | None = None,
        clock: Clock = utc_now,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._bootstrap = bootstrap
        self._cert_dir = cert_dir
        self._node_name = node_name
        self._load = load
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._store = CertificateStore(cert_dir, CLIENT_PREFIX, clock)
        self._at_once = False

    def prepare(self) -> RestConfig:
        """Repair kubeconfig and certificate directory, and return the RestConfig to use from now on.

        Raises KubeconfigError if a required file is not usable.
        """
        try:
            self._store.recover()
            if self._bootstrap is not None:
                self._point_to_store(self._bootstrap)
            access = self._load(self._kubeconfig)
            self._adopt(access)
        except OSError as err:
            raise KubeconfigError(f"{err.filename} cannot be written: {err.strerror}") from None
        return with_certificate(access, self._store.current_path)

    async def run(self) -> NoReturn:
        """Rotate the certificate until cancelled."""
        subject = node_subject(self._node_name)
        rotation = Rotation(
            "client",
            self._store.current,
            lambda: subject,
            self._obtain,
            metrics=self._metrics,
            clock=self._clock,
            rng=self._rng,
        )
        await rotation.run(at_once=self._at_once)

    def _point_to_store(self, bootstrap: Path) -> None:
        problem = kubeconfig_problem(self._kubeconfig, self._load, self._clock())
        if problem is not None:
            access = self._load(bootstrap)
            write_kubeconfig(self._kubeconfig, access, self._store.current_path)
            log.info("Bootstrapping in the background", reason=problem)

    def _adopt(self, access: RestConfig) -> None:
        """Import the kubeconfig's own certificate if the store has no valid one.

        A certificate embedded in the kubeconfig may have more permissions than a node should have: it is
        replaced immediately.
        """
        current = self._store.current()
        if current is not None and not current.expired(self._clock()):
            return
        if access.certificate is None or access.key is None or access.certificate == self._store.current_path:
            return
        try:
            pair = self._store.update(material(access.certificate), material(access.key))
        except (OSError, StoreError) as err:
            log.error(err, "Failed to use kubeconfig's certificate", path=str(self._kubeconfig))
            return
        self._at_once = isinstance(access.certificate, bytes)
        log.info("Using kubeconfig's certificate", expires=pair.life.ends.isoformat())

    async def _obtain(self, subject: Subject) -> StoredPair:
        current = self._store.current()
        if current is None or current.expired(self._clock()):
            requester = self._requester()
            return await first_certificate(
                requester, self._store, self._cert_dir, self._node_name, clock=self._clock
            )
        draft = await draft_request(subject)
        access = with_certificate(self._load(self._kubeconfig), self._store.current_path)
        async with Transport(access) as transport:
            client = ApiClient(transport, Limits(0, 0).bucket())
            certificate = await request_certificate(
                client, draft, CLIENT_SIGNER, self._clock(), seconds=WAIT_SECONDS
            )
        return self._store.update(certificate, draft.key.encode())

    def _requester(self) -> RestConfig:
        if self._bootstrap is not None and self._bootstrap.exists():
            return self._load(self._bootstrap)
        return self._load(self._kubeconfig)
