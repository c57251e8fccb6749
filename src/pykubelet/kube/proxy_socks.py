"""Connections through a SOCKS5 proxy (RFC 1928, with the passwords of RFC 1929).

The HTTP library knows only HTTP proxies, so its connector is taught here: the proxy is asked for a way
to the API server's name, which it resolves itself, and TLS begins where its word ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver

from pykubelet.api.ip import parse_ip

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.tracing import Trace

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
    """The proxy answered, and gave no way."""


class SocksConnector(aiohttp.BaseConnector):
    """Connects through the proxy of a URL such as `socks5://user:password@proxy:1080`."""

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
        """Connect to the first address of the proxy that answers; raises OSError."""
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
                # asyncio's own words tell the address instead of the reason.
                failure = OSError(err.errno, os.strerror(err.errno)) if err.errno else err
            except BaseException:
                made.close()
                raise
        raise failure or OSError(f"{self._host} has no address")


async def socks_handshake(connection: socket.socket, host: str, port: int, login: tuple[str, str]) -> None:
    """Ask the proxy at the other end for a way to a host; raises SocksError and other OSErrors."""
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
    # Where it connects from is nobody's business, but must be read.
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
    """Read exactly so much, because what follows belongs to TLS."""
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
