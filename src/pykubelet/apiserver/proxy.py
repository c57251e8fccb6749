"""Proxy between the kubelet and the API server: selection, and the connector through a SOCKS5 proxy.

A kubeconfig can set it (`proxy-url`); otherwise the environment does, interpreted as in Go: `HTTPS_PROXY` or
`HTTP_PROXY` by the scheme of the server, and `NO_PROXY` with names, suffixes, addresses and networks, which
Python's own implementation lacks. HTTP and HTTPS proxies are handled by aiohttp; an HTTPS proxy is verified
with the API server's TLS context, as in client-go.

aiohttp has no SOCKS support, so `SocksConnector` connects with python-socks, which is imported with the first
such proxy. The proxy resolves the API server's name, and TLS starts after the handshake.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver

from pykubelet.api.ip import parse_cidr, parse_ip

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.tracing import Trace

_PORTS = {"https": 443, "http": 80}
_SOCKS = ("socks5", "socks5h")
_SCHEMES = ("http", "https", *_SOCKS)


def proxy_problem(url: str) -> str | None:
    """Return why a proxy URL is invalid, without the URL itself; None if it is valid."""
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good, parts = False, urlsplit("")
    if not good or parts.scheme not in _SCHEMES:
        return (
            "is not the URL of a proxy: write one such as http://proxy.example.com:3128, "
            "or with https:// or socks5://"
        )
    return None


def is_socks(url: str) -> bool:
    """Return whether the URL is of a SOCKS proxy; with both schemes the proxy resolves names."""
    return urlsplit(url).scheme in _SOCKS


def proxy_from_environment(server: str, environ: Mapping[str, str]) -> str:
    """Return the proxy URL that the environment sets for this server, or an empty string."""
    parts = urlsplit(server)
    host = parts.hostname or ""
    name = f"{parts.scheme}_proxy"
    proxy = environ.get(name.upper()) or environ.get(name) or ""
    exempt = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    if not proxy or _is_exempt(host, parts.port or _PORTS[parts.scheme], exempt):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_exempt(host: str, port: int, exempt: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = parse_ip(host)
    except ValueError:
        address = None
    if address is not None and address.is_loopback:
        return True
    for entry in filter(None, (part.strip().lower() for part in exempt.split(","))):
        if entry == "*":
            return True
        try:
            if "/" in entry:
                if address is not None and address in parse_cidr(entry):
                    return True
                continue
        except ValueError:
            continue
        name, entry_port = _split_port(entry)
        if entry_port is not None and entry_port != port:
            continue
        if address is not None:
            try:
                if parse_ip(name) == address:
                    return True
            except ValueError:
                pass
        elif _name_matches(host.lower(), name):
            return True
    return False


def _name_matches(host: str, entry: str) -> bool:
    """Match a NO_PROXY entry: `example.com` includes subdomains, `.example.com` matches only subdomains."""
    if entry.startswith("*."):
        entry = entry[1:]
    if entry.startswith("."):
        return host.endswith(entry)
    return host == entry or host.endswith(f".{entry}")


def _split_port(entry: str) -> tuple[str, int | None]:
    if entry.startswith("["):
        name, _, rest = entry[1:].partition("]")
        port = rest.removeprefix(":")
    elif entry.count(":") == 1:
        name, _, port = entry.partition(":")
    else:
        name, port = entry, ""
    return name, int(port) if port.isascii() and port.isdigit() else None


_PORT = 1080
_LONGEST = 255
"""Maximum bytes of a user name, a password or a host name in SOCKS5."""
_REFUSALS = {
    1: "it failed",
    2: "its rules forbid it",
    3: "the network cannot be reached",
    4: "the host cannot be reached",
    5: "the connection was refused",
    6: "it took too long",
    7: "it does not know how to connect",
    8: "it does not know this kind of address",
}
_LOGIN_NEEDED = "the proxy refused: it wants to know who asks: give user and password in the proxy's URL"
# Errors without a reply code, by the start of python-socks' message: it has no attribute for them.
_FAILURES = {
    "Unexpected SOCKS version": "the proxy does not speak SOCKS5",
    "No acceptable authentication": _LOGIN_NEEDED,
    "Unexpected SOCKS authentication": _LOGIN_NEEDED,
    "Invalid authentication method": _LOGIN_NEEDED,
    "Username and password": "the proxy refused: user or password are wrong",
    "Connection closed": "the proxy closed the connection without an answer",
}
_UNKNOWN_CODE = "Invalid reply code: "


class SocksError(OSError):
    """The SOCKS5 handshake failed or the proxy rejected the connection."""


class SocksConnector(aiohttp.BaseConnector):
    """aiohttp connector through a SOCKS5 proxy, such as `socks5://user:password@proxy:1080`."""

    def __init__(
        self,
        proxy: str,
        resolver: AbstractResolver,
        set_options: Callable[[socket.socket], None],
        *,
        keepalive_timeout: float,
    ) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_timeout)
        parts = urlsplit(proxy)
        self._host, self._port = parts.hostname or "", parts.port or _PORT
        self._login = (unquote(parts.username or ""), unquote(parts.password or ""))
        self._resolver = resolver
        self._set_options = set_options

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        loop = asyncio.get_running_loop()
        host = req.host
        assert host is not None
        connection = await self._connect(req, host)
        try:
            self._set_options(connection)
            context = req.ssl if isinstance(req.ssl, ssl.SSLContext) else None
            _, protocol = await loop.create_connection(
                self._factory,
                sock=connection,
                ssl=context if req.is_ssl() else None,
                server_hostname=(req.server_hostname or host) if req.is_ssl() else None,
            )
        except BaseException:
            connection.close()
            raise
        return protocol

    async def _connect(self, req: ClientRequest, host: str) -> socket.socket:
        """Connect to a host through the first reachable address of the proxy.

        Raises ClientProxyConnectionError if the proxy cannot be reached, SocksError if it rejects the
        connection.
        """
        # Imported lazily to save memory: few nodes have a SOCKS proxy.
        from python_socks import ProxyConnectionError

        failure = OSError(f"{self._host} has no address")
        try:
            addresses = await self._resolver.resolve(self._host, self._port, socket.AF_UNSPEC)
        except OSError as err:
            raise aiohttp.ClientProxyConnectionError(req.connection_key, err) from err
        for found in addresses:
            try:
                return await connect_through(found["host"], found["port"], host, req.port or 443, self._login)
            except ProxyConnectionError as err:
                # python-socks' message contains the address as well as the reason.
                failure = OSError(err.errno, os.strerror(err.errno)) if err.errno else err
        raise aiohttp.ClientProxyConnectionError(req.connection_key, failure) from failure


async def connect_through(
    proxy_host: str, proxy_port: int, host: str, port: int, login: tuple[str, str]
) -> socket.socket:
    """Connect to a host through the SOCKS5 proxy at an IP address.

    Raises python-socks' ProxyConnectionError if the proxy cannot be reached, SocksError if it rejects the
    connection.
    """
    from python_socks import ProxyError, ProxyType
    from python_socks.async_.asyncio import Proxy

    if not "".join(login).isascii():
        raise SocksError("the proxy's user name or password has a character that is not ASCII")
    if max(map(len, login)) > _LONGEST:
        raise SocksError("the proxy's user name or password is longer than 255 bytes")
    if len(host) > _LONGEST:
        raise SocksError("the API server's name is longer than 255 bytes")
    user, password = login
    proxy = Proxy(ProxyType.SOCKS5, proxy_host, proxy_port, user or None, password or None, rdns=True)
    try:
        return await proxy.connect(host, port)
    except ProxyError as err:
        raise SocksError(_explain_socks(str(err), err.error_code)) from err
    except ConnectionError as err:
        raise SocksError("the proxy closed the connection without an answer") from err
    except ValueError as err:
        raise SocksError(f"the API server's name cannot be sent to the proxy: {err}") from err


def _explain_socks(message: str, code: int | None) -> str:
    """Return the error message for an error of python-socks; `code` is the proxy's reply code, if any."""
    if message.startswith(_UNKNOWN_CODE):
        code = int(message.removeprefix(_UNKNOWN_CODE), 16)
    if code is not None:
        return f"the proxy refused: {_REFUSALS.get(code, f'code {code}')}"
    known = (text for start, text in _FAILURES.items() if message.startswith(start))
    return next(known, f"the proxy refused: {message}")
