"""Starting and stopping a plain HTTP server, with an error that says who holds the port."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from pykubelet.host.ports import port_holder
from pykubelet.logs import get_logger

log = get_logger(__name__)


class PortError(Exception):
    """A port could not be opened; the text says why and what to do."""


@asynccontextmanager
async def http_server(
    name: str, address: str, port: int, routes: Iterable[web.AbstractRouteDef]
) -> AsyncIterator[None]:
    """Serve the routes on `address:port` while inside; raises PortError when that is impossible."""
    app = web.Application(client_max_size=64 * 1024)
    app.add_routes(routes)
    # Two seconds for answers under way: the agent must stop within five.
    runner = web.AppRunner(
        app, access_log=None, handle_signals=False, keepalive_timeout=30, shutdown_timeout=2
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, address, port)
        try:
            await site.start()
        except OSError as err:
            raise PortError(_why(name, address, port, err)) from err
        log.info("Listening", server=name, address=address, port=port)
        yield
    finally:
        await runner.cleanup()


def _why(name: str, address: str, port: int, err: OSError) -> str:
    where = f"the {name} server cannot listen on {address}:{port}"
    if err.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        by = f" by {holder}" if holder else ""
        return f"{where}: the port is taken{by}; stop that program or choose another port"
    if err.errno == errno.EADDRNOTAVAIL:
        return f"{where}: this machine has no such address; choose one that `ip address` shows"
    return f"{where}: {err.strerror or err}"
