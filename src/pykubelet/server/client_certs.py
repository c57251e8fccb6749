"""Users by the certificates that they show, verified against a file of authorities.

Verified on each request and not once per connection: an authority that was taken out of the file, or a
certificate that has expired since, counts from then on. The file is read again when it changes.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from pykubelet.kube.certificates import lifetime
from pykubelet.kube.watched_file import WatchedFile
from pykubelet.logs import get_logger
from pykubelet.server.identity import BadCredentials, Shown, User, certificate_user
from pykubelet.server.metrics import ServerMetrics
from pykubelet.server.openssl import Authorities, NoAuthorities

log = get_logger(__name__)


class BadAuthorities(Exception):
    """The file of authorities cannot be used; one line with the cause."""


class ClientCertificates:
    """Judges certificates by the authorities in a file."""

    def __init__(self, path: Path, metrics: ServerMetrics) -> None:
        """Read the file; raises BadAuthorities, and OpensslMissing."""
        self._file = WatchedFile(path)
        self._metrics = metrics
        try:
            self._contents = self._file.contents(time.monotonic())
            self._authorities = Authorities(self._contents)
        except (OSError, NoAuthorities) as err:
            raise BadAuthorities(
                f"clientCAFile {path} cannot be used: {getattr(err, 'strerror', None) or err}"
            ) from None

    def user(self, shown: Shown) -> User | None:
        """The user whose certificate is shown; None for nobody's. Raises BadCredentials."""
        if not shown.chain:
            return None
        self._metrics.certificate_shown(_seconds_left(shown.chain[0]))
        fingerprint = hashlib.sha256(shown.chain[0]).hexdigest()
        if problem := self._current().problem(shown.chain):
            raise BadCredentials(f"the client's certificate {fingerprint[:16]} is not accepted: {problem}")
        return certificate_user(shown.subject, fingerprint)

    def _current(self) -> Authorities:
        contents = self._file.contents(time.monotonic())
        if contents != self._contents:
            # Not looked at again until it changes, also when it is no good.
            self._contents = contents
            try:
                self._authorities = Authorities(contents)
                log.info("Read the authorities of clients' certificates again", path=str(self._file.path))
            except NoAuthorities as err:
                log.error(
                    err, "Keeping the former authorities of clients' certificates", path=str(self._file.path)
                )
        return self._authorities


def _seconds_left(der: bytes) -> float:
    try:
        return lifetime(der).ends.timestamp() - time.time()
    except ValueError:
        return 0.0
