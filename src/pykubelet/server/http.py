"""Starting and stopping a plain HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Middleware

from pykubelet.logs import get_logger
from pykubelet.server.connections import app_runner, serve_connections
from pykubelet.server.sockets import PortError, listening_socket

__all__ = ["PortError", "http_server"]

log = get_logger(__name__)


@asynccontextmanager
async def http_server(
    name: str,
    address: str,
    port: int,
    routes: Iterable[web.AbstractRouteDef],
    middlewares: Iterable[Middleware] = (),
) -> AsyncIterator[None]:
    """Serve the routes on `address:port` while inside; raises PortError when that is impossible."""
    app = web.Application(client_max_size=64 * 1024, middlewares=tuple(middlewares))
    app.add_routes(routes)
    with listening_socket(name, address, port) as listener:
        async with app_runner(app) as server, serve_connections(server, listener):
            log.info("Listening", server=name, address=address, port=listener.getsockname()[1])
            yield
