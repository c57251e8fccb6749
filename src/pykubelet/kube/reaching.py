"""Why the API server could not be reached, in words for people.

One pure function from what the HTTP library threw to our own tree of errors, so that the cause is
named the same whatever the agent was about to do.
"""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlsplit

import aiohttp

from pykubelet.host.http_answer import WireError
from pykubelet.kube.access import Access
from pykubelet.kube.errors import BadAnswer, KubeError, TimedOut, TlsError, Unreachable
from pykubelet.kube.kept import HungUp, Interrupted, NoConnectionInTime
from pykubelet.kube.tls import explain_tls

FAILURES = (aiohttp.ClientError, OSError, TimeoutError, WireError)
"""What asking over the network can throw."""


def explain(err: BaseException, access: Access, certificate_problem: str = "") -> KubeError:
    """Make an error of our own of what the HTTP library threw.

    `certificate_problem` is what is known to be wrong with our own certificate.
    """
    server = access.server
    hint = f" ({certificate_problem})" if certificate_problem else ""
    if (tls := _find_tls(err)) is not None:
        name = access.tls_server_name or urlsplit(server).hostname or server
        why = explain_tls(tls, name)
        return TlsError(server, why + hint)
    if isinstance(err, aiohttp.ClientHttpProxyError):
        return Unreachable(server, f"the proxy refused with {err.status} {err.message}".rstrip())
    if isinstance(err, aiohttp.ClientProxyConnectionError):
        return Unreachable(server, f"the proxy cannot be reached: {_words(err.os_error)}")
    if isinstance(err, aiohttp.ClientConnectorDNSError):
        return Unreachable(server, f"the name {err.host} cannot be resolved: {_words(err.os_error)}")
    if isinstance(err, socket.gaierror):
        return Unreachable(server, f"the name {urlsplit(server).hostname} cannot be resolved: {_words(err)}")
    if isinstance(err, aiohttp.ConnectionTimeoutError | NoConnectionInTime):
        return TimedOut(server, "no connection could be made in time")
    if isinstance(err, TimeoutError):
        return TimedOut(server, "there was no answer in time")
    if isinstance(err, aiohttp.ClientConnectorError):
        return Unreachable(server, _words(err.os_error))
    if isinstance(err, aiohttp.ClientPayloadError | Interrupted):
        return Unreachable(server, "the connection broke in the middle of an answer")
    if isinstance(err, aiohttp.ServerDisconnectedError | HungUp):
        return Unreachable(server, f"the connection was closed without an answer{hint}")
    if isinstance(err, aiohttp.ClientResponseError | WireError):
        words = err.message if isinstance(err, aiohttp.ClientResponseError) else err
        return BadAnswer(f"{server} does not answer as an API server does: {words}")
    if isinstance(err, OSError):
        # A server that does not want our certificate may hang up before its reason gets through.
        return Unreachable(server, _words(err) + hint)
    return Unreachable(server, str(err) or type(err).__name__)


def _find_tls(err: BaseException | None) -> ssl.SSLError | None:
    """Look for a failed handshake; servers tell theirs late, when the first answer is read."""
    while err is not None:
        # The HTTP library's own errors claim to be the TLS library's, without its words.
        if isinstance(err, ssl.SSLError) and not isinstance(err, aiohttp.ClientError):
            return err
        err = err.__cause__
    return None


def _words(err: OSError) -> str:
    return (err.strerror or str(err) or type(err).__name__).strip()
