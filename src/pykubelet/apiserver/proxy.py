"""Proxy between the kubelet and the API server: selection, and the SOCKS5 connector.

A kubeconfig can set it (`proxy-url`); otherwise the environment does, interpreted as in Go: `HTTPS_PROXY` or
`HTTP_PROXY` by the scheme of the server, and `NO_PROXY` with names, suffixes, addresses and networks, which
Python's own implementation lacks. HTTP and HTTPS proxies are handled by aiohttp; an HTTPS proxy is verified
with the API server's TLS context, as in client-go.

aiohttp has no SOCKS support, so `SocksConnector` implements SOCKS5 (RFC 1928, passwords of RFC 1929). The
proxy resolves the API server's name, and TLS starts after the handshake.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
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
_VERSION = 5
_NO_LOGIN, _PASSWORD = 0, 2
_CONNECT = 1
_IPV4, _NAME, _IPV6 = 1, 3, 4
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


class SocksError(OSError):
    """The SOCKS5 handshake failed or the proxy rejected the connection."""


class SocksConnector(aiohttp.BaseConnector):
    """aiohttp connector through a SOCKS5 proxy, such as `socks5://user:password@proxy:1080`."""

    def __init__(
        self,
        proxy: str,
        resolver: AbstractResolver,
        new_socket: Callable[[tuple[Any, ...]], socket.socket],
        *,
        keepalive_timeout: float,
    ) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_timeout)
        parts = urlsplit(proxy)
        self._host, self._port = parts.hostname or "", parts.port or _PORT
        self._login = (unquote(parts.username or ""), unquote(parts.password or ""))
        self._resolver = resolver
        self._new_socket = new_socket

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        loop = asyncio.get_running_loop()
        host = req.host
        assert host is not None
        try:
            connection = await self._connect()
        except OSError as err:
            raise aiohttp.ClientProxyConnectionError(req.connection_key, err) from err
        try:
            await socks_handshake(connection, host, req.port or 443, self._login)
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

    async def _connect(self) -> socket.socket:
        """Connect to the first reachable address of the proxy. Raises OSError."""
        loop = asyncio.get_running_loop()
        failure: OSError | None = None
        for found in await self._resolver.resolve(self._host, self._port, socket.AF_UNSPEC):
            address = (found["host"], found["port"])
            made = self._new_socket((found["family"], socket.SOCK_STREAM, found["proto"], "", address))
            try:
                made.setblocking(False)
                await loop.sock_connect(made, address)
                return made
            except OSError as err:
                made.close()
                # asyncio's message contains the address instead of the reason.
                failure = OSError(err.errno, os.strerror(err.errno)) if err.errno else err
            except BaseException:
                made.close()
                raise
        raise failure or OSError(f"{self._host} has no address")


async def socks_handshake(connection: socket.socket, host: str, port: int, login: tuple[str, str]) -> None:
    """Request a connection to a host from the SOCKS5 proxy. Raises SocksError and other OSErrors."""
    user, password = (text.encode() for text in login)
    methods = [_NO_LOGIN, _PASSWORD] if user or password else [_NO_LOGIN]
    await _send(connection, bytes([_VERSION, len(methods), *methods]))
    version, method = await _receive(connection, 2)
    if version != _VERSION:
        raise SocksError("the proxy does not speak SOCKS5")
    if method not in methods:
        raise SocksError(
            "the proxy refused: it wants to know who asks: give user and password in the proxy's URL"
        )
    if method == _PASSWORD:
        if max(len(user), len(password)) > 255:
            raise SocksError("the proxy's user name or password is longer than 255 bytes")
        await _send(connection, bytes([1, len(user)]) + user + bytes([len(password)]) + password)
        _, refused = await _receive(connection, 2)
        if refused:
            raise SocksError("the proxy refused: user or password are wrong")
    await _send(connection, bytes([_VERSION, _CONNECT, 0]) + _place(host) + port.to_bytes(2))
    _, code, _, kind = await _receive(connection, 4)
    if code:
        raise SocksError(f"the proxy refused: {_REFUSALS.get(code, f'code {code}')}")
    # The bound address in the reply is not used, but must be consumed.
    length = (await _receive(connection, 1))[0] if kind == _NAME else {_IPV4: 4, _IPV6: 16}.get(kind, 0)
    await _receive(connection, length + 2)


def _place(host: str) -> bytes:
    try:
        address = parse_ip(host)
    except ValueError:
        name = host.encode("idna") if not host.isascii() else host.encode()
        if len(name) > 255:
            raise SocksError("the API server's name is longer than 255 bytes") from None
        return bytes([_NAME, len(name)]) + name
    return bytes([_IPV4 if address.version == 4 else _IPV6]) + address.packed


async def _send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def _receive(connection: socket.socket, length: int) -> bytes:
    """Read exactly `length` bytes: the bytes after them belong to TLS."""
    data = b""
    while len(data) < length:
        try:
            chunk = await asyncio.get_running_loop().sock_recv(connection, length - len(data))
        except ConnectionError:
            chunk = b""
        if not chunk:
            raise SocksError("the proxy closed the connection without an answer")
        data += chunk
    return data
