"""Certificates of the node on disk, in upstream's layout, and their metrics.

    kubelet-client-current.pem -> /var/lib/kubelet/pki/kubelet-client-2026-07-24-08-30-00.pem

Each file contains certificates and key; the symlink is replaced atomically, so that readers always find a
matching pair, even after a crash of the kubelet or the host. If the symlink leads to nothing usable,
`recover` points it to the newest pair that has not expired. The upstream kubelet can take over the directory
and return it.

The metrics use the caller's registry, because several kubelets can run in one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge, Histogram

from pykubelet.apiserver.certificates.x509 import Lifetime, Subject, certificates, lifetime, subject
from pykubelet.apiserver.tls import BadMaterial, check_identity
from pykubelet.logs import get_logger
from pykubelet.util.files import fsync_directory, write_atomically
from pykubelet.util.metrics import PlainCounter

log = get_logger(__name__)


class StoreError(Exception):
    """A certificate cannot be read or stored: one line."""


class UnfitPair(StoreError):
    """The data is not a certificate with its matching key."""


@dataclass(frozen=True, slots=True)
class StoredPair:
    """A matching certificate and key, with their paths."""

    certificate: Path
    key: Path
    life: Lifetime
    subject: Subject
    digest: str
    """SHA-256 of the leaf certificate."""

    def expired(self, now: datetime) -> bool:
        """Return whether it has expired. A future `begins` is ignored: the local clock may be slow."""
        return now > self.life.ends


def utc_now() -> datetime:
    """Return the current time; the default clock."""
    return datetime.now(UTC)


def read_pair(certificate: Path, key: Path) -> StoredPair:
    """Read a certificate and its key, which may be in one file. Raises StoreError."""
    try:
        parts = [path.read_bytes() for path in dict.fromkeys((certificate, key))]
    except OSError as err:
        raise StoreError(f"{err.filename} cannot be read: {err.strerror}") from None
    return _validated_pair(b"\n".join(parts), certificate, key)


def write_file(path: Path, data: bytes, mode: int, temporary: Path | None = None) -> None:
    """Write a file atomically and durably, and create its directory. Raises OSError.

    The data is first written to `temporary`, which a crash may leave behind.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    temporary = temporary or path.with_name(f".{path.name}.tmp")
    write_atomically(path, data, mode, temporary=temporary, sync_directory=True)


class CertificateStore:
    """The certificates of one purpose: `CertificateStore(cert_dir, "kubelet-client")`."""

    def __init__(self, directory: Path, prefix: str, clock: Callable[[], datetime] = utc_now) -> None:
        self._directory = directory.absolute()
        self._prefix = prefix
        self._clock = clock
        self.current_path = self._named("current")

    def current(self) -> StoredPair | None:
        """Return the pair in use, even if expired; None if there is no usable pair."""
        try:
            return read_pair(self.current_path, self.current_path)
        except StoreError as err:
            log.v(4).info("No stored certificate", err=err)
            return None

    def recover(self) -> None:
        """Complete an update that an earlier kubelet process did not finish. Raises OSError."""
        if self.current() is not None:
            return
        if self.current_path.is_symlink() or self.current_path.exists():
            log.warning("Stored certificate is not usable", path=str(self.current_path))
        older = sorted(self._directory.glob(f"{self._prefix}-[0-9]*.pem"), reverse=True)
        updated = self._named("updated")
        for path in ([updated] if updated.is_symlink() else []) + older:
            try:
                pair = read_pair(path, path)
            except StoreError:
                continue
            if not pair.expired(self._clock()):
                target = path.resolve()
                log.info("Recovered certificate", path=str(target))
                self._switch(target)
                return

    def update(self, certificate: bytes, key: bytes) -> StoredPair:
        """Store a new pair and make it the current one. Raises StoreError and then changes nothing."""
        # Local time, as upstream.
        path = self._named(f"{self._clock().astimezone():%Y-%m-%d-%H-%M-%S}")
        pem = certificate.rstrip() + b"\n" + key.rstrip() + b"\n"
        pair = _validated_pair(pem, self.current_path, self.current_path)
        try:
            write_file(path, pem, 0o600, self._directory / f".{self._prefix}.tmp")
            self._switch(path)
        except OSError as err:
            raise StoreError(f"{err.filename or path} cannot be written: {err.strerror}") from None
        return pair

    def _switch(self, target: Path) -> None:
        updated = self._named("updated")
        updated.unlink(missing_ok=True)
        updated.symlink_to(target)
        updated.replace(self.current_path)
        fsync_directory(self._directory)

    def _named(self, what: str) -> Path:
        return self._directory / f"{self._prefix}-{what}.pem"


def _validated_pair(pem: bytes, certificate: Path, key: Path) -> StoredPair:
    try:
        check_identity(pem)
        leaf = certificates(pem)[0]
        digest = hashlib.sha256(leaf).hexdigest()
        return StoredPair(certificate, key, lifetime(leaf), subject(leaf), digest)
    except (BadMaterial, ValueError, IndexError) as err:
        raise UnfitPair(f"{certificate}: {err}") from None


_LIVES = [60, 3600, 14400, 86400, 604800, 2592000, 7776000, 15552000, 31104000, 124416000]
_ERRORS = {
    "client": "kubelet_certificate_manager_client_expiration_renew_errors",
    "server": "kubelet_server_expiration_renew_errors",
}


class CertificateMetrics:
    """Metrics of the client or the serving certificate."""

    def __init__(self, registry: CollectorRegistry, kind: Literal["client", "server"]) -> None:
        self._left = Gauge(
            f"kubelet_certificate_manager_{kind}_ttl_seconds",
            f"Seconds until the {kind} certificate expires, negative when it has; +Inf without one.",
            registry=registry,
        )
        self._errors = PlainCounter(
            _ERRORS[kind], "Attempts to renew the certificate that failed.", registry=registry
        )
        self._ages: Histogram | None = None
        if kind == "server":
            self._ages = Histogram(
                "kubelet_certificate_manager_server_rotation_seconds",
                "Ages in seconds at which serving certificates were replaced.",
                buckets=_LIVES,
                registry=registry,
            )

    def export(self, seconds_left: Callable[[], float]) -> None:
        """Export the remaining validity, in seconds."""
        self._left.set_function(seconds_left)

    def failed(self) -> None:
        """Count a failed attempt."""
        self._errors.inc()

    def replaced(self, age_seconds: float) -> None:
        """Observe the age, in seconds, of a replaced certificate."""
        if self._ages is not None:
            self._ages.observe(age_seconds)
