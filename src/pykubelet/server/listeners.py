"""Listening sockets, the plain HTTP servers, and the server of the control socket.

If a port is in use, `PortError` names the process that owns it, if known.

The control socket is a Unix socket of mode 0600. The mode is set before the socket is bound, so that other
users can never connect. It is bound to a hidden name and renamed to its path, which replaces a stale socket
of a killed kubelet; if another process still accepts connections there, `PortError` is raised.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from pykubelet.linux.port_owner import find_port_owner
from pykubelet.logs import get_logger
from pykubelet.server.connections import app_runner, remove_server_header, serve_connections
from pykubelet.transport.endpoint import MAX_PATH_BYTES

log = get_logger(__name__)
_BACKLOG = 1024


class PortError(Exception):
    """Raised when a port or socket cannot be opened; the message has cause and remedy."""


def listening_socket(name: str, address: str, port: int) -> socket.socket:
    """Return a socket that listens on `address:port` for the server `name`. Raises PortError.

    The unspecified address of either family listens on both families.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        raise PortError(
            f"the {name} server cannot listen on {address!r}: that is not an IP address"
        ) from None
    try:
        if ip.is_unspecified:
            try:
                return _listen(socket.AF_INET6, "::", port, dual_stack=True)
            except OSError as err:
                # IPv6 is not compiled in or is disabled.
                if err.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                return _listen(socket.AF_INET, "0.0.0.0", port)
        return _listen(socket.AF_INET6 if ip.version == 6 else socket.AF_INET, str(ip), port)
    except OSError as err:
        raise PortError(_listen_error(name, address, port, err)) from err


def _listen(
    family: socket.AddressFamily, address: str, port: int, *, dual_stack: bool = False
) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual_stack else 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _listen_error(name: str, address: str, port: int, err: OSError) -> str:
    prefix = f"the {name} server cannot listen on {address}:{port}"
    if err.errno == errno.EADDRINUSE:
        owner = find_port_owner(port)
        owner_text = f" by {owner}" if owner else ""
        return f"{prefix}: the port is taken{owner_text}; stop that program or choose another port"
    if err.errno == errno.EADDRNOTAVAIL:
        return f"{prefix}: this machine has no such address; choose one that `ip address` shows"
    return f"{prefix}: {err.strerror or err}"


__all__ = ["PortError", "http_server"]


@asynccontextmanager
async def http_server(
    name: str,
    address: str,
    port: int,
    routes: Iterable[web.AbstractRouteDef],
    middlewares: Iterable[Middleware] = (),
) -> AsyncIterator[None]:
    """Serve the routes on `address:port` while the context is open. Raises PortError."""
    app = web.Application(client_max_size=64 * 1024, middlewares=tuple(middlewares))
    app.add_routes(routes)
    with listening_socket(name, address, port) as listener:
        async with app_runner(app) as server, serve_connections(server, listener):
            log.info("Listening", server=name, address=address, port=listener.getsockname()[1])
            yield


_MODE = 0o600
_SHUTDOWN_SECONDS = 2.0


@asynccontextmanager
async def unix_server(path: Path, routes: Iterable[web.AbstractRouteDef]) -> AsyncIterator[None]:
    """Serve the routes on a Unix socket at `path` while the context is open; its directory must exist.

    Raises PortError: one line with cause and remedy.
    """
    app = web.Application(client_max_size=64 * 1024)
    app.add_routes(routes)
    runner = web.AppRunner(
        app, access_log=None, handle_signals=False, keepalive_timeout=30, shutdown_timeout=_SHUTDOWN_SECONDS
    )
    await runner.setup()
    assert runner.server is not None
    remove_server_header(runner.server)
    try:
        listener = _listen_unix(path)
        identity = path.lstat()
        server = await asyncio.get_running_loop().create_unix_server(runner.server, sock=listener)
        log.info("Listening", server="control", path=str(path))
        try:
            yield
        finally:
            server.close()
            with suppress(OSError):
                # A later kubelet process may have replaced the socket.
                if os.path.samestat(identity, path.lstat()):
                    path.unlink()
    finally:
        await runner.cleanup()


def _listen_unix(path: Path) -> socket.socket:
    temporary_path = path.with_name(f".{path.name}")
    if len(os.fsencode(temporary_path)) > MAX_PATH_BYTES:
        allowed = MAX_PATH_BYTES - 1
        raise PortError(
            f"the path of the control socket {path} is too long (at most {allowed} bytes): "
            "choose a shorter --root-dir or --data-dir"
        )
    _require_free(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), _MODE)
        temporary_path.unlink(missing_ok=True)
        listener.bind(str(temporary_path))
        listener.listen(128)
        listener.setblocking(False)
        temporary_path.replace(path)
    except OSError as err:
        listener.close()
        with suppress(OSError):
            temporary_path.unlink()
        raise PortError(f"the control socket {path} cannot be made: {err.strerror or err}") from err
    return listener


def _require_free(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise PortError(f"the control socket {path} cannot be made: something else is there, remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError as err:
            # A full backlog or a timeout means that a busy process is listening.
            if err.errno not in (errno.EAGAIN, None):
                return
        raise PortError(f"another agent answers on {path}: stop that one first, or choose another --root-dir")
