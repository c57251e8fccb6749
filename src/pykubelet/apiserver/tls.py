"""Client TLS for the API server, and reloading of the certificate and token files.

Keys and certificates are passed to the TLS library as bytes through a memfd, never through a file on disk.
Trust follows Kubernetes: every certificate of the configured authority file is trusted, including
certificates that are not self-signed; without such a file, the host's authorities are.

`WatchedFile` caches the contents of a small file that other processes replace. Each access costs one
`stat`; the file is read again if that shows a change, and every minute in case it does not. If the file
vanishes or becomes unreadable, this is logged once and its last contents stay in use, because a
replacement may be in progress.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from pykubelet.apiserver.certificates.x509 import certificates
from pykubelet.logs import get_logger

log = get_logger(__name__)


class BadMaterial(ValueError):
    """A certificate or key is not usable; the text contains none of its contents."""


def client_context(*, ca: bytes | None, insecure: bool, identity: bytes | None) -> ssl.SSLContext:
    """Return the TLS context of a client. Raises BadMaterial.

    `ca` and `identity` (certificates and key, in this order) are PEM.
    """
    context = ssl.create_default_context(cadata=_authorities(ca)) if ca else ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # Recent Python versions require extensions that many cluster authorities omit.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(["http/1.1"])
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if identity:
        _load_identity(context, identity)
    return context


def check_identity(identity: bytes) -> None:
    """Verify that a certificate and a key, both PEM, belong together. Raises BadMaterial."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_identity(context, identity, certificate="the certificate", key="the key")


def explain_tls(err: ssl.SSLError, server_name: str) -> str:
    """Describe in one line why the TLS handshake failed, with a remedy."""
    if isinstance(err, ssl.SSLCertVerificationError):
        message = err.verify_message or str(err)
        code = err.verify_code
        if code in _NAME_MISMATCH:
            return (
                f"its certificate is for another name than {server_name} ({message}): "
                "correct the server or set tls-server-name in the kubeconfig"
            )
        if code in _UNTRUSTED:
            return (
                f"its certificate is not signed by the kubeconfig's certificate-authority ({message}): "
                "give the authority of this cluster"
            )
        if code in _DATES:
            return f"its certificate is not valid now ({message}): renew it, or check this machine's clock"
        return f"its certificate is not accepted ({message})"
    reason = (err.reason or str(err)).lower()
    for word, meaning in _ALERTS.items():
        if word in reason:
            return meaning
    return f"the TLS handshake failed ({reason.replace('_', ' ')})"


# OpenSSL's X509_V_ERR_* codes, which Python exposes as `verify_code`.
_NAME_MISMATCH = (62, 64)
_UNTRUSTED = (2, 18, 19, 20, 21)
_DATES = (9, 10)
_ALERTS = {
    "certificate_expired": "it says that our client certificate has expired: renew it",
    "certificate_required": "it wants a client certificate and the kubeconfig has none that fits",
    "unknown_ca": "it does not trust the authority of our client certificate",
    "bad_certificate": "it does not accept our client certificate",
    "certificate_unknown": "it does not accept our client certificate",
    "certificate_revoked": "it says that our client certificate is revoked: get a new one",
    "wrong_version_number": "it does not speak TLS: check the server's port, or write http:// for it",
    "http_request": "it does not speak TLS: check the server's port, or write http:// for it",
    "unsupported_protocol": "it speaks no TLS version that is still safe (1.2 or 1.3)",
    "protocol_version": "it speaks no TLS version that is still safe (1.2 or 1.3)",
}


def _authorities(ca: bytes) -> bytes:
    # Go skips unreadable blocks: one invalid block among valid ones must not disconnect the node.
    good = []
    for der in certificates(ca):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=der)
        except ssl.SSLError:
            continue
        good.append(der)
    if not good:
        raise BadMaterial("certificate-authority holds no certificate in PEM")
    return b"".join(good)


def _load_identity(
    context: ssl.SSLContext,
    identity: bytes,
    certificate: str = "client-certificate",
    key: str = "client-key",
) -> None:
    def no_password() -> str:
        raise BadMaterial(f"{key} is encrypted: give a key without a password")

    fd = os.memfd_create("identity", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(identity)
        context.load_cert_chain(f"/proc/self/fd/{fd}", password=no_password)
    except ssl.SSLError as err:
        if err.reason == "KEY_VALUES_MISMATCH":
            raise BadMaterial(f"{key} does not belong to {certificate}") from None
        raise BadMaterial(f"{certificate} and {key} are not a certificate and a key in PEM") from None
    finally:
        os.close(fd)


READ_AGAIN_SECONDS = 60.0
MAX_BYTES = 1024 * 1024


class WatchedFile:
    """Cached contents of one file; times are seconds of a monotonic clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_fingerprint: tuple[int, ...] | None = None
        self._contents: bytes | None = None
        self._read_at = 0.0
        self._logged_reason = ""

    def contents(self, now: float) -> bytes:
        """Return the contents. Raises OSError while the file has never been read.

        These files are a few kilobytes on a local disk, which does not justify a thread.
        """
        try:
            fingerprint = self._fingerprint()
            if (
                self._contents is None
                or fingerprint != self._last_fingerprint
                or now - self._read_at >= READ_AGAIN_SECONDS
            ):
                with self.path.open("rb") as file:
                    self._contents = file.read(MAX_BYTES)
                self._last_fingerprint, self._read_at = fingerprint, now
        except OSError as err:
            if self._contents is None:
                raise
            if (reason := err.strerror or str(err)) != self._logged_reason:
                log.error(reason, "Failed to reread file, keeping its previous contents", path=str(self.path))
                self._logged_reason = reason
        else:
            self._logged_reason = ""
        return self._contents

    def forget(self) -> None:
        """Force a reread at the next access, regardless of `stat`."""
        self._last_fingerprint = None

    def _fingerprint(self) -> tuple[int, ...]:
        found = self.path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
