"""TLS of the agent's API: versions, ciphers and key exchanges as configured, certificates as they are now.

Each connection is begun with the certificate that the files hold at that time; looking costs two `stat`s.
Connections that stand are not touched when it changes. Files that cannot be used (half-way replaced, not
there yet) are told once, and the last good certificate stays in use; without any, clients are turned away
until there is one.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validate_tls import CURVES, WEAK_CIPHER_SUITES
from pykubelet.logs import get_logger
from pykubelet.server.openssl import request_certificates, set_key_exchanges, set_new_ciphers

log = get_logger(__name__)

# Named as everywhere but in OpenSSL: what its own names are made of.
_OPENSSL_NAMES = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256": "ECDHE-ECDSA-AES128-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA": "ECDHE-ECDSA-RC4-SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA": "ECDHE-RSA-DES-CBC3-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256": "ECDHE-RSA-AES128-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA": "ECDHE-RSA-RC4-SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA": "DES-CBC3-SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256": "AES128-SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_RSA_WITH_RC4_128_SHA": "RC4-SHA",
}
_DEFAULT_SUITES = tuple(
    f"TLS_ECDHE_{key}_WITH_{cipher}"
    for cipher in ("AES_128_GCM_SHA256", "AES_256_GCM_SHA384", "CHACHA20_POLY1305_SHA256")
    for key in ("ECDSA", "RSA")
)
_VERSIONS = {
    "": ssl.TLSVersion.TLSv1_2,
    "VersionTLS10": ssl.TLSVersion.TLSv1,
    "VersionTLS11": ssl.TLSVersion.TLSv1_1,
    "VersionTLS12": ssl.TLSVersion.TLSv1_2,
    "VersionTLS13": ssl.TLSVersion.TLSv1_3,
}


HTTP2 = "h2"
"""HTTP/2, as clients and servers name it when they agree on what to speak."""


class TlsProblem(Exception):
    """The configuration asks for TLS that cannot be spoken here; one line with cause and remedy."""


class NoCertificate(Exception):
    """There is no certificate to show to clients yet."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """How TLS is spoken."""

    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    cipher_suites: Sequence[str] = _DEFAULT_SUITES
    """Up to TLS 1.2, by their standard names; those of TLS 1.3 are all good and not up to choice."""
    curves: Sequence[str] = ()
    request_certificates: bool = False

    @classmethod
    def of(cls, config: KubeletConfiguration, *, request_certificates: bool) -> TlsSettings:
        """Take the settings from the configuration."""
        weak = [suite for suite in config.tls_cipher_suites if suite in WEAK_CIPHER_SUITES]
        if weak:
            log.warning("Use of insecure cipher detected.", ciphers=weak)
        return cls(
            min_version=_VERSIONS[config.tls_min_version],
            cipher_suites=tuple(config.tls_cipher_suites) or _DEFAULT_SUITES,
            curves=tuple(CURVES[number] for number in config.tls_curve_preferences),
            request_certificates=request_certificates,
        )


_NEW_CIPHERS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""Those of TLS 1.3 cannot be chosen by people; the order is that of other kubelets."""


def server_context(settings: TlsSettings) -> ssl.SSLContext:
    """Make the TLS of a server, still without its certificate; raises TlsProblem, OpensslMissing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = settings.min_version
    suites = [name for suite in settings.cipher_suites if (name := _OPENSSL_NAMES.get(suite))]
    if suites:
        # Weak ones are used only when asked for by name, and then OpenSSL must be told that it is meant.
        weak = any(suite in WEAK_CIPHER_SUITES for suite in settings.cipher_suites)
        try:
            context.set_ciphers(":".join([*suites, *(["@SECLEVEL=0"] if weak else [])]))
        except ssl.SSLError:
            raise TlsProblem(
                f"tlsCipherSuites: this machine's OpenSSL knows none of {', '.join(settings.cipher_suites)}: "
                "choose others"
            ) from None
    set_new_ciphers(context, _NEW_CIPHERS)
    # A resumed session would not show the client's whole chain again; nor is one long-lived secret wanted.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    context.set_alpn_protocols([HTTP2, "http/1.1"])
    if settings.curves:
        unknown = set_key_exchanges(context, settings.curves)
        if len(unknown) == len(settings.curves):
            raise TlsProblem(
                f"tlsCurvePreferences: this machine's OpenSSL knows none of {', '.join(unknown)}"
            )
        if unknown:
            log.warning(
                "Key exchanges that this machine's OpenSSL does not know are left out", unknown=unknown
            )
    if settings.request_certificates:
        request_certificates(context)
    return context


Files = tuple[Path, Path]


class ServingTls:
    """The TLS of new connections, with the certificate and key that two files (or one) hold.

    `files` says which they are now (`kube.certificate_serving.ServingCertificate.current`), or None.
    """

    def __init__(self, settings: TlsSettings, files: Callable[[], Files | None]) -> None:
        """Check the settings; raises TlsProblem, OpensslMissing. The files may come later."""
        self._settings = settings
        self._files = files
        self._mark: object = None
        self._complaint = ""
        self._context: ssl.SSLContext | None = None
        server_context(settings)

    def context(self) -> ssl.SSLContext:
        """Give the TLS for a connection that begins now; raises NoCertificate."""
        if (files := self._files()) is not None:
            try:
                self._take(files)
            except (OSError, ValueError) as err:
                self._complain(err, files)
        if self._context is None:
            raise NoCertificate("no serving certificate available for the kubelet")
        return self._context

    def _take(self, files: Files) -> None:
        mark = [(path, *_look(path)) for path in files]
        if mark == self._mark:
            return
        context = server_context(self._settings)
        context.load_cert_chain(*files, password=_no_password)
        if self._context is not None:
            log.info("Serving with another certificate from now on", path=str(files[0]))
        self._context, self._mark, self._complaint = context, mark, ""

    def _complain(self, err: Exception, files: Files) -> None:
        words = err.reason if isinstance(err, ssl.SSLError) else getattr(err, "strerror", None)
        complaint = str(words or err)
        if complaint != self._complaint:
            self._complaint = complaint
            state = "keeping the former one" if self._context else "clients are turned away until it can"
            paths = [str(path) for path in files]
            log.error(complaint, f"The serving certificate cannot be used: {state}", paths=paths)


def _look(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _no_password() -> str:
    raise ValueError("the key is encrypted: give a key without a password")
