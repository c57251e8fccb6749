"""The three things that Python's `ssl` cannot do and a Kubernetes server needs, asked of its OpenSSL.

1. A client's certificate is requested but does not decide over the connection: whoever shows a bad one
   gets an answer (401, or 200 when there is also a good token), not a broken handshake. It is
   verified later, on each request, against the authorities as they are then. That the client has the
   certificate's key is still proven by the handshake itself.
2. The key exchanges ("curves") to offer, in order.
3. The ciphers of TLS 1.3, in order: OpenSSL puts the slower one first, Go's servers the quicker one.

The functions are found through Python's own `_ssl` module, so they are of the very library it uses.
Nothing here keeps a secret or touches a private key.
"""

from __future__ import annotations

import _ssl
import ctypes
import functools
import ssl
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from ctypes import CFUNCTYPE, byref, c_char_p, c_int, c_long, c_ulong, c_void_p

from pykubelet.kube.certificates import certificates

_PARTIAL_CHAIN = 0x80000
_FOR_CLIENTS = 1
# Refuses keys and signatures that can be forged today (SHA-1, RSA below 1024 bits), as Go does.
_SECURITY_LEVEL = 1
_SET_GROUPS_LIST = 92
_NO_MEMORY = 17

_Callback = CFUNCTYPE(c_int, c_void_p, c_void_p)
# Kept here because OpenSSL keeps only its address.
_accept = _Callback(lambda _chain, _argument: 1)


class OpensslMissing(Exception):
    """This Python does not show its OpenSSL."""


class NoAuthorities(ValueError):
    """A bundle of authorities without a certificate."""


@functools.cache
def _library() -> ctypes.CDLL:
    """OpenSSL, with the types of what is used of it; raises OpensslMissing."""
    where = getattr(_ssl, "__file__", None)
    try:
        if sys.implementation.name != "cpython":
            raise OSError("not CPython")
        library = ctypes.CDLL(where)
        for name, (answer, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = answer, arguments
    except (OSError, AttributeError) as err:
        raise OpensslMissing(
            "this Python hides its OpenSSL, which is needed to check clients' certificates: "
            f"use the Python of a distribution ({err})"
        ) from None
    return library


_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "d2i_X509": (c_void_p, [c_void_p, c_void_p, c_long]),
    "X509_free": (None, [c_void_p]),
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
    "SSL_CTX_set_cert_verify_callback": (None, [c_void_p, _Callback, c_void_p]),
    "SSL_CTX_set_ciphersuites": (c_int, [c_void_p, c_char_p]),
    "SSL_CTX_ctrl": (c_long, [c_void_p, c_int, c_long, c_char_p]),
}


class Authorities:
    """Certificates of authorities, and the judgement whether a client's chain leads to one of them."""

    def __init__(self, pem: bytes) -> None:
        """Take the certificates of a bundle; raises NoAuthorities, OpensslMissing."""
        library = _library()
        self._store = library.X509_STORE_new()
        library.X509_STORE_set_flags(self._store, _PARTIAL_CHAIN)
        taken = 0
        for der in certificates(pem):
            certificate = _read(library, der)
            # Go skips blocks that it cannot read; so do we.
            if certificate is not None:
                taken += library.X509_STORE_add_cert(self._store, certificate)
                library.X509_free(certificate)
        if not taken:
            raise NoAuthorities("the file holds no certificate in PEM")

    def __del__(self) -> None:
        if store := getattr(self, "_store", None):
            _library().X509_STORE_free(store)

    def problem(self, chain: Sequence[bytes]) -> str | None:
        """Say why a chain (DER, the client's own certificate first) is not trusted now; None when it is."""
        library = _library()
        with ExitStack() as stack:
            read = [_read(library, der) for der in chain]
            for certificate in read:
                stack.callback(library.X509_free, certificate)
            if not read or read[0] is None:
                return "this is not a certificate"
            between = library.OPENSSL_sk_new_null()
            stack.callback(library.OPENSSL_sk_free, between)
            for certificate in filter(None, read[1:]):
                library.OPENSSL_sk_push(between, certificate)
            context = library.X509_STORE_CTX_new()
            stack.callback(library.X509_STORE_CTX_free, context)
            error = _NO_MEMORY
            if library.X509_STORE_CTX_init(context, self._store, read[0], between) == 1:
                library.X509_STORE_CTX_set_purpose(context, _FOR_CLIENTS)
                parameters = library.X509_STORE_CTX_get0_param(context)
                library.X509_VERIFY_PARAM_set_auth_level(parameters, _SECURITY_LEVEL)
                if library.X509_verify_cert(context) == 1:
                    return None
                error = library.X509_STORE_CTX_get_error(context)
            # What stands in OpenSSL's queue would be taken for a failure of the next connection.
            library.ERR_clear_error()
            words: bytes = library.X509_verify_cert_error_string(error)
            return words.decode(errors="replace")


def request_certificates(context: ssl.SSLContext) -> None:
    """Ask clients for a certificate and take whichever they show; raises OpensslMissing.

    It must be verified before anything is concluded from it.
    """
    library = _library()
    context.verify_mode = ssl.CERT_OPTIONAL
    library.SSL_CTX_set_cert_verify_callback(_address(context), _accept, None)


def set_key_exchanges(context: ssl.SSLContext, names: Iterable[str]) -> list[str]:
    """Offer these key exchanges in this order; gives those that this OpenSSL does not know."""
    library = _library()

    def offer(wanted: Sequence[str], to: ssl.SSLContext) -> bool:
        done: int = library.SSL_CTX_ctrl(_address(to), _SET_GROUPS_LIST, 0, ":".join(wanted).encode())
        library.ERR_clear_error()
        return done == 1

    wanted = list(names)
    unknown = [name for name in wanted if not offer([name], ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))]
    if known := [name for name in wanted if name not in unknown]:
        offer(known, context)
    return unknown


def set_new_ciphers(context: ssl.SSLContext, names: Iterable[str]) -> None:
    """Have these ciphers of TLS 1.3, the preferred first."""
    library = _library()
    if library.SSL_CTX_set_ciphersuites(_address(context), ":".join(names).encode()) != 1:
        library.ERR_clear_error()


def peer_chain(connection: ssl.SSLObject | ssl.SSLSocket) -> tuple[bytes, ...]:
    """The certificates that the other side has shown, its own first, in DER; empty when it showed none."""
    if connection.getpeercert(binary_form=True) is None:
        return ()
    if sys.version_info >= (3, 13):
        return tuple(connection.get_unverified_chain())
    # The same, before it got its public name.
    chain = connection._sslobj.get_unverified_chain()  # type: ignore[union-attr]
    return tuple(certificate.public_bytes(_ssl.ENCODING_DER) for certificate in chain or ())


def _read(library: ctypes.CDLL, der: bytes) -> int | None:
    data = ctypes.create_string_buffer(der, len(der))
    where = c_void_p(ctypes.addressof(data))
    certificate: int | None = library.d2i_X509(None, byref(where), len(der))
    if certificate is None:
        library.ERR_clear_error()
    return certificate


def _address(context: ssl.SSLContext) -> int | None:
    # A context object is Python's object header and then OpenSSL's pointer.
    return c_void_p.from_address(id(context) + object.__basicsize__).value
