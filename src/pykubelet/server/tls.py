"""TLS of the API: configured versions, cipher suites and curves, and the current serving certificate.

Each new connection uses the certificate that the files contain at that time; checking costs two `stat` calls.
Established connections are not affected by a change. Unusable files (missing, or half replaced) are logged
once and the last valid certificate stays in use; without one, connections are closed until there is one.

Four features that Python's `ssl` lacks are implemented with ctypes calls into OpenSSL:

1. A client certificate is requested but not verified in the handshake: a client with an invalid one gets a
   response (401, or 200 with a valid token), not a failed handshake. `Authorities` verifies it on each
   request against the current CAs. The handshake still proves possession of the certificate's key.
2. The curves (key exchange groups) to offer, in order.
3. The names of the CAs in `clientCAFile` are sent with the request for a certificate: clients written in Go
   send only a certificate of one of these, and choose it among several.
4. The order of the TLS 1.3 cipher suites: OpenSSL prefers AES-256, Go servers the faster AES-128.

The functions are resolved through Python's `_ssl` module, so they belong to the same OpenSSL library that
`ssl` uses. The ctypes calls store no secrets and do not access private keys.
"""

from __future__ import annotations

import _ssl
import ctypes
import functools
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from ctypes import CFUNCTYPE, byref, c_char_p, c_int, c_long, c_ulong, c_void_p
from dataclasses import dataclass
from pathlib import Path

from pykubelet.apiserver.certificates.x509 import certificates
from pykubelet.apiserver.tls import WatchedFile
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validation.validate_serving import CURVES, WEAK_CIPHER_SUITES
from pykubelet.logs import get_logger

log = get_logger(__name__)
_PARTIAL_CHAIN = 0x80000
_PURPOSE_SSL_CLIENT = 1

# Rejects keys and signatures that can be forged today (SHA-1, RSA below 1024 bits), as Go does.
_SECURITY_LEVEL = 1
_SET_GROUPS_LIST = 92
_NO_MEMORY = 17
_MAX_AUTHORITIES_BYTES = 60_000
"""Bytes of names of CAs; the message of TLS has two bytes for their length."""
_LENGTH_BYTES = 2
_Callback = CFUNCTYPE(c_int, c_void_p, c_void_p)

# A module global, because OpenSSL stores only the callback's address.
_accept = _Callback(lambda _chain, _argument: 1)


class OpensslMissing(Exception):
    """Raised when the OpenSSL functions of this Python cannot be resolved."""


class NoAuthorities(ValueError):
    """Raised when a CA bundle contains no certificate."""


@functools.cache
def _library() -> ctypes.CDLL:
    """Return OpenSSL with the types of the functions used. Raises OpensslMissing."""
    path = getattr(_ssl, "__file__", None)
    try:
        if sys.implementation.name != "cpython":
            raise OSError("not CPython")
        library = ctypes.CDLL(path)
        for name, (result_type, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result_type, arguments
    except (OSError, AttributeError) as err:
        raise OpensslMissing(
            "this Python hides its OpenSSL, which is needed to check clients' certificates: "
            f"use the Python of a distribution ({err})"
        ) from None
    return library


_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "d2i_X509": (c_void_p, [c_void_p, c_void_p, c_long]),
    "X509_free": (None, [c_void_p]),
    "X509_get_subject_name": (c_void_p, [c_void_p]),
    "i2d_X509_NAME": (c_int, [c_void_p, c_void_p]),
    "X509_STORE_new": (c_void_p, []),
    "X509_STORE_free": (None, [c_void_p]),
    "X509_STORE_add_cert": (c_int, [c_void_p, c_void_p]),
    "X509_STORE_set_flags": (c_int, [c_void_p, c_ulong]),
    "X509_STORE_CTX_new": (c_void_p, []),
    "X509_STORE_CTX_free": (None, [c_void_p]),
    "X509_STORE_CTX_init": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "X509_STORE_CTX_set_purpose": (c_int, [c_void_p, c_int]),
    "X509_STORE_CTX_get0_param": (c_void_p, [c_void_p]),
    "X509_STORE_CTX_get_error": (c_int, [c_void_p]),
    "X509_VERIFY_PARAM_set_auth_level": (None, [c_void_p, c_int]),
    "X509_verify_cert": (c_int, [c_void_p]),
    "X509_verify_cert_error_string": (c_char_p, [c_long]),
    "OPENSSL_sk_new_null": (c_void_p, []),
    "OPENSSL_sk_push": (c_int, [c_void_p, c_void_p]),
    "OPENSSL_sk_free": (None, [c_void_p]),
    "ERR_clear_error": (None, []),
    "SSL_CTX_add_client_CA": (c_int, [c_void_p, c_void_p]),
    "SSL_CTX_set_cert_verify_callback": (None, [c_void_p, _Callback, c_void_p]),
    "SSL_CTX_set_ciphersuites": (c_int, [c_void_p, c_char_p]),
    "SSL_CTX_ctrl": (c_long, [c_void_p, c_int, c_long, c_char_p]),
}


class Authorities:
    """Trusted CA certificates, and verification of client certificate chains against them."""

    def __init__(self, pem: bytes) -> None:
        """Load the certificates of a PEM bundle. Raises NoAuthorities, OpensslMissing."""
        library = _library()
        self._store = library.X509_STORE_new()
        library.X509_STORE_set_flags(self._store, _PARTIAL_CHAIN)
        added = 0
        for der in certificates(pem):
            certificate = _read(library, der)
            # Blocks that cannot be parsed are skipped, as in Go.
            if certificate is not None:
                added += library.X509_STORE_add_cert(self._store, certificate)
                library.X509_free(certificate)
        if not added:
            raise NoAuthorities("the file holds no certificate in PEM")

    def __del__(self) -> None:
        if store := getattr(self, "_store", None):
            _library().X509_STORE_free(store)

    def problem(self, chain: Sequence[bytes]) -> str | None:
        """Return why a chain (DER, leaf certificate first) is not trusted now; None if it is."""
        library = _library()
        with ExitStack() as stack:
            parsed = [_read(library, der) for der in chain]
            for certificate in parsed:
                stack.callback(library.X509_free, certificate)
            if not parsed or parsed[0] is None:
                return "this is not a certificate"
            intermediates = library.OPENSSL_sk_new_null()
            stack.callback(library.OPENSSL_sk_free, intermediates)
            for certificate in filter(None, parsed[1:]):
                library.OPENSSL_sk_push(intermediates, certificate)
            context = library.X509_STORE_CTX_new()
            stack.callback(library.X509_STORE_CTX_free, context)
            error = _NO_MEMORY
            if library.X509_STORE_CTX_init(context, self._store, parsed[0], intermediates) == 1:
                library.X509_STORE_CTX_set_purpose(context, _PURPOSE_SSL_CLIENT)
                parameters = library.X509_STORE_CTX_get0_param(context)
                library.X509_VERIFY_PARAM_set_auth_level(parameters, _SECURITY_LEVEL)
                if library.X509_verify_cert(context) == 1:
                    return None
                error = library.X509_STORE_CTX_get_error(context)
            # Errors left in OpenSSL's queue would be attributed to the next connection.
            library.ERR_clear_error()
            message: bytes = library.X509_verify_cert_error_string(error)
            return message.decode(errors="replace")


def request_certificates(context: ssl.SSLContext) -> None:
    """Request client certificates and accept them without verification. Raises OpensslMissing.

    Callers must verify a certificate before they trust it.
    """
    library = _library()
    context.verify_mode = ssl.CERT_OPTIONAL
    library.SSL_CTX_set_cert_verify_callback(_address(context), _accept, None)


def send_authorities(context: ssl.SSLContext, authorities: Iterable[bytes]) -> None:
    """Send the names of these CA certificates (DER) to clients. Raises OpensslMissing.

    If the names do not fit into the message, none are sent: then clients send any certificate.
    """
    library = _library()
    with ExitStack() as stack:
        parsed = []
        for der in dict.fromkeys(authorities):
            if (certificate := _read(library, der)) is not None:
                stack.callback(library.X509_free, certificate)
                parsed.append(certificate)
        sizes = [library.i2d_X509_NAME(library.X509_get_subject_name(each), None) for each in parsed]
        if sum(sizes) + _LENGTH_BYTES * len(sizes) > _MAX_AUTHORITIES_BYTES:
            log.warning("Names of client CAs are not sent, there are too many", certificates=len(parsed))
            return
        for certificate in parsed:
            library.SSL_CTX_add_client_CA(_address(context), certificate)


class ClientAuthorities:
    """CA certificates of `clientCAFile`, whose names are sent to clients."""

    def __init__(self, path: Path, *, reloads: bool) -> None:
        """Read the file; without `reloads` it is not read again. Raises OSError."""
        self._file = WatchedFile(path)
        self._reloads = reloads
        self._contents = self._file.contents(time.monotonic())
        self._certificates = tuple(certificates(self._contents))

    def current(self) -> tuple[bytes, ...]:
        """Return the certificates in DER; the same object while they have not changed.

        A file without a certificate is not used.
        """
        if self._reloads:
            contents = self._file.contents(time.monotonic())
            if contents != self._contents:
                self._contents = contents
                self._certificates = tuple(certificates(contents)) or self._certificates
        return self._certificates


def client_authorities(config: KubeletConfiguration, gates: FeatureGates) -> ClientAuthorities | None:
    """Return the CAs of client certificates, None if none are accepted. Raises OSError.

    Certificates are always verified by the current file; the feature gate is for the names.
    """
    path = config.authentication.x509.client_ca_file
    return ClientAuthorities(Path(path), reloads=gates.enabled("ReloadKubeletClientCAFile")) if path else None


def set_key_exchanges(context: ssl.SSLContext, names: Iterable[str]) -> list[str]:
    """Offer these curves in this order and return those that this OpenSSL does not support."""
    library = _library()

    def offer(names: Sequence[str], target: ssl.SSLContext) -> bool:
        done: int = library.SSL_CTX_ctrl(_address(target), _SET_GROUPS_LIST, 0, ":".join(names).encode())
        library.ERR_clear_error()
        return done == 1

    curves = list(names)
    unknown = [name for name in curves if not offer([name], ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))]
    if known := [name for name in curves if name not in unknown]:
        offer(known, context)
    return unknown


def set_tls13_ciphers(context: ssl.SSLContext, names: Iterable[str]) -> None:
    """Set the TLS 1.3 cipher suites, in order of preference."""
    library = _library()
    if library.SSL_CTX_set_ciphersuites(_address(context), ":".join(names).encode()) != 1:
        library.ERR_clear_error()


def peer_chain(connection: ssl.SSLObject | ssl.SSLSocket) -> tuple[bytes, ...]:
    """Return the peer's certificate chain in DER, leaf first; empty if it sent none."""
    if connection.getpeercert(binary_form=True) is None:
        return ()
    if sys.version_info >= (3, 13):
        return tuple(connection.get_unverified_chain())
    # The same method, private before Python 3.13.
    chain = connection._sslobj.get_unverified_chain()  # type: ignore[union-attr]
    return tuple(certificate.public_bytes(_ssl.ENCODING_DER) for certificate in chain or ())


def _read(library: ctypes.CDLL, der: bytes) -> int | None:
    data = ctypes.create_string_buffer(der, len(der))
    pointer = c_void_p(ctypes.addressof(data))
    certificate: int | None = library.d2i_X509(None, byref(pointer), len(der))
    if certificate is None:
        library.ERR_clear_error()
    return certificate


def _address(context: ssl.SSLContext) -> int | None:
    # The C struct of an SSLContext is Python's object header followed by the SSL_CTX pointer.
    return c_void_p.from_address(id(context) + object.__basicsize__).value


# IANA names of the cipher suites up to TLS 1.2, mapped to OpenSSL's names.
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
"""ALPN protocol name of HTTP/2."""


class TlsProblem(Exception):
    """Raised when OpenSSL does not support the configured TLS; one line with cause and remedy."""


class NoCertificate(Exception):
    """Raised when no serving certificate is available yet."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """TLS settings of the server."""

    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    cipher_suites: Sequence[str] = _DEFAULT_SUITES
    """IANA names of the suites up to TLS 1.2; those of TLS 1.3 are all secure and not configurable."""
    curves: Sequence[str] = ()
    request_certificates: bool = False

    @classmethod
    def from_config(cls, config: KubeletConfiguration, *, request_certificates: bool) -> TlsSettings:
        """Return the settings of the configuration."""
        weak = [suite for suite in config.tls_cipher_suites if suite in WEAK_CIPHER_SUITES]
        if weak:
            log.warning("Use of insecure cipher detected.", ciphers=weak)
        return cls(
            min_version=_VERSIONS[config.tls_min_version],
            cipher_suites=tuple(config.tls_cipher_suites) or _DEFAULT_SUITES,
            curves=tuple(CURVES[number] for number in config.tls_curve_preferences),
            request_certificates=request_certificates,
        )


_TLS13_CIPHERS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""Cipher suites of TLS 1.3, which are not configurable, in upstream's order."""


def server_context(settings: TlsSettings) -> ssl.SSLContext:
    """Return a server context without a certificate. Raises TlsProblem, OpensslMissing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = settings.min_version
    suites = [name for suite in settings.cipher_suites if (name := _OPENSSL_NAMES.get(suite))]
    if suites:
        # Weak suites are used only if configured by name; OpenSSL then needs security level 0.
        weak = any(suite in WEAK_CIPHER_SUITES for suite in settings.cipher_suites)
        try:
            context.set_ciphers(":".join([*suites, *(["@SECLEVEL=0"] if weak else [])]))
        except ssl.SSLError:
            raise TlsProblem(
                f"tlsCipherSuites: this machine's OpenSSL knows none of {', '.join(settings.cipher_suites)}: "
                "choose others"
            ) from None
    set_tls13_ciphers(context, _TLS13_CIPHERS)
    # A resumed session would lack the client's certificate chain; tickets also need a long-lived secret.
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
            log.warning("Ignored TLS curves that this host's OpenSSL does not support", unknown=unknown)
    if settings.request_certificates:
        request_certificates(context)
    return context


def reloads_certificate(config: KubeletConfiguration, gates: FeatureGates) -> bool:
    """Return whether changed files of the serving certificate are used; `tlsCertFile` has a feature gate."""
    has_files = config.tls_cert_file and config.tls_private_key_file and not config.server_tls_bootstrap
    return not has_files or gates.enabled("ReloadKubeletServerCertificateFile")


Files = tuple[Path, Path]


class ServingTls:
    """TLS context of new connections, with the certificate and key from two files (or one).

    `files` returns their current paths (`apiserver.certificates.serving.ServingCertificate`), or None.
    """

    def __init__(
        self,
        settings: TlsSettings,
        files: Callable[[], Files | None],
        *,
        reloads: bool = True,
        authorities: ClientAuthorities | None = None,
    ) -> None:
        """Check the settings. The files need not exist yet. Raises TlsProblem, OpensslMissing.

        Without `reloads` files are read again only if their paths or the settings change. The names of
        `authorities` are sent to clients.
        """
        self._authorities = authorities
        self._sent: tuple[bytes, ...] = ()
        """CA certificates whose names the context sends."""
        self._reloads = reloads
        self._settings = settings
        self._files = files
        self._loaded_identity: object = None
        self._last_error = ""
        self._context: ssl.SSLContext | None = None
        server_context(settings)

    @property
    def settings(self) -> TlsSettings:
        """The settings of new connections."""
        return self._settings

    def set_settings(self, settings: TlsSettings) -> None:
        """Use other settings for new connections; `server_context` must accept them."""
        self._settings = settings
        self._loaded_identity = None

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection. Raises NoCertificate."""
        if (files := self._files()) is not None:
            try:
                self._reload(files)
            except (OSError, ValueError) as err:
                self._log_error(err, files)
        if self._context is None:
            raise NoCertificate("no serving certificate available for the kubelet")
        return self._context

    def _reload(self, files: Files) -> None:
        identity = [(path, *(_file_identity(path) if self._reloads else ())) for path in files]
        authorities = self._authorities.current() if self._authorities is not None else ()
        if identity == self._loaded_identity and authorities == self._sent:
            return
        context = server_context(self._settings)
        context.load_cert_chain(*files, password=_no_password)
        if authorities:
            send_authorities(context, authorities)
        if self._context is not None and identity != self._loaded_identity:
            log.info("Reloaded serving certificate", path=str(files[0]))
        self._sent = authorities
        self._context, self._loaded_identity, self._last_error = context, identity, ""

    def _log_error(self, err: Exception, files: Files) -> None:
        reason = err.reason if isinstance(err, ssl.SSLError) else getattr(err, "strerror", None)
        message = str(reason or err)
        if message != self._last_error:
            self._last_error = message
            fallback = "keeping the previous one" if self._context else "rejecting connections"
            paths = [str(path) for path in files]
            log.error(message, f"Failed to load serving certificate, {fallback}", paths=paths)


def _file_identity(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _no_password() -> str:
    raise ValueError("the key is encrypted: give a key without a password")
