"""TLS towards the API server: whom we trust, who we are, and what it means when it fails.

Keys and certificates come as bytes and are handed to the TLS library through memory, never through
a file of ours on disk. Trust is as in all of Kubernetes: every certificate of the given authority
file is trusted, also one that is not self-signed; without one, the machine's authorities are.

A small file whose contents others replace: certificates and tokens that are renewed.

Looking at it costs one `stat`; it is read again when that shows a change, and each minute in case a
change did not show. A file that vanishes or cannot be read later is told once, and its last contents
stay in use: whoever replaces it may be half-way.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from pykubelet.apiserver.certificates.x509 import certificates
from pykubelet.logs import get_logger

log = get_logger(__name__)


class BadMaterial(ValueError):
    """A certificate or key that cannot be used; the text names none of its contents."""


def client_context(*, ca: bytes | None, insecure: bool, identity: bytes | None) -> ssl.SSLContext:
    """Make the TLS settings of a client; raises BadMaterial.

    `ca` and `identity` (certificates and key, in this order) are PEM.
    """
    context = ssl.create_default_context(cadata=_authorities(ca)) if ca else ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # Newer Pythons insist on extensions that many cluster authorities do not write.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(["http/1.1"])
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if identity:
        _load_identity(context, identity)
    return context


def check_identity(identity: bytes) -> None:
    """Make sure that a certificate and a key, both PEM, can be used together; raises BadMaterial."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_identity(context, identity, certificate="the certificate", key="the key")


def explain_tls(err: ssl.SSLError, server_name: str) -> str:
    """Say in one line why no trusted connection came about, and what can be done."""
    if isinstance(err, ssl.SSLCertVerificationError):
        words = err.verify_message or str(err)
        code = err.verify_code
        if code in _NAME_MISMATCH:
            return (
                f"its certificate is for another name than {server_name} ({words}): "
                "correct the server or set tls-server-name in the kubeconfig"
            )
        if code in _UNTRUSTED:
            return (
                f"its certificate is not signed by the kubeconfig's certificate-authority ({words}): "
                "give the authority of this cluster"
            )
        if code in _DATES:
            return f"its certificate is not valid now ({words}): renew it, or check this machine's clock"
        return f"its certificate is not accepted ({words})"
    reason = (err.reason or str(err)).lower()
    for word, meaning in _ALERTS.items():
        if word in reason:
            return meaning
    return f"the TLS handshake failed ({reason.replace('_', ' ')})"


# OpenSSL's X509_V_ERR_*: what Python gives as `verify_code`.
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
    # Go skips blocks it cannot read; one bad block among good ones must not lock a node out.
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
    """The contents of one file; times are seconds of any steady clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark: tuple[int, ...] | None = None
        self._contents: bytes | None = None
        self._read_at = 0.0
        self._complaint = ""

    def contents(self, now: float) -> bytes:
        """Give the contents; raises OSError while the file has never been read.

        Files such as these are a few kilobytes on a local disk, not worth a thread.
        """
        try:
            mark = self._look()
            if self._contents is None or mark != self._mark or now - self._read_at >= READ_AGAIN_SECONDS:
                with self.path.open("rb") as file:
                    self._contents = file.read(MAX_BYTES)
                self._mark, self._read_at = mark, now
        except OSError as err:
            if self._contents is None:
                raise
            if (complaint := err.strerror or str(err)) != self._complaint:
                log.error(
                    complaint, "Failed to read again, keeping what was read before", path=str(self.path)
                )
                self._complaint = complaint
        else:
            self._complaint = ""
        return self._contents

    def forget(self) -> None:
        """Read the file anew the next time, whatever it looks like."""
        self._mark = None

    def _look(self) -> tuple[int, ...]:
        found = self.path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
