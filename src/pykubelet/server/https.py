"""The secured server: routes behind TLS, authentication and authorization."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from pykubelet.logs import get_logger
from pykubelet.server.authentication import Authenticator
from pykubelet.server.authorization import Judge
from pykubelet.server.connections import MOST_CONNECTIONS, app_runner, serve_connections
from pykubelet.server.metrics import ServerMetrics
from pykubelet.server.pipeline import counted, guarded
from pykubelet.server.sockets import listening_socket
from pykubelet.server.tls import ServingTls

log = get_logger(__name__)

MOST_BODY_BYTES = 1024 * 1024


@asynccontextmanager
async def https_server(
    address: str,
    port: int,
    routes: Iterable[web.AbstractRouteDef],
    *,
    tls: ServingTls,
    authenticator: Authenticator,
    judge: Judge,
    metrics: ServerMetrics,
    most_connections: int = MOST_CONNECTIONS,
) -> AsyncIterator[int]:
    """Serve the routes while inside and give the port; raises PortError when that is impossible."""
    app = web.Application(
        client_max_size=MOST_BODY_BYTES,
        middlewares=[counted(metrics, "readwrite"), guarded(authenticator, judge)],
    )
    app.add_routes(routes)
    with listening_socket("API", address, port) as listener:
        async with (
            app_runner(app) as server,
            serve_connections(server, listener, tls.context, most=most_connections),
        ):
            opened: int = listener.getsockname()[1]
            log.info("Listening", server="API", address=address, port=opened)
            yield opened
