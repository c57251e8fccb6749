"""Routes of the control socket on the node itself, for the command line.

| request | response |
|---|---|
| `GET /node` | `NodeInfo`: name, paths and endpoints of this node |
| `GET /events?log=…&after=…&wait` | `EventPage`: events after a cursor; `wait` waits for one some seconds |
| `GET /configz` | the effective configuration, as on the API |
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from pykubelet.api.meta import to_json
from pykubelet.podconfig.event_log import EventLog
from pykubelet.server.node_info import NodeInfo
from pykubelet.server.pods import ErrorResponse

MAX_WAIT_SECONDS = 20
"""Longest wait of one request for an event."""
MAX_WAITERS = 32
"""Concurrent waits for events; one more is rejected."""
_MAX_DIGITS = 18


def node_routes(info: NodeInfo) -> list[web.RouteDef]:
    """Return the route of the node's paths and names."""
    body = to_json(info)

    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    return [web.get("/node", respond)]


def event_routes(events: EventLog) -> list[web.RouteDef]:
    """Return the route of the recent events of all pods and of the node."""
    waiters = asyncio.Semaphore(MAX_WAITERS)

    async def respond(request: web.Request) -> web.Response:
        log, after = request.query.get("log", ""), request.query.get("after", "")
        cursor = int(after) if after.isascii() and after.isdigit() and len(after) <= _MAX_DIGITS else 0
        if "wait" in request.query:
            if waiters.locked():
                message = f"{MAX_WAITERS} commands follow the events already: end one of them"
                return _json(to_json(ErrorResponse(message=message)), 503)
            async with waiters:
                for _ in range(MAX_WAIT_SECONDS):
                    # A client that has gone must not keep its place, nor delay the kubelet's stop.
                    if await events.wait(log, cursor, 1.0) or request.transport is None:
                        break
        return _json(to_json(events.page(log, cursor)))

    return [web.get("/events", respond)]


def configz_routes(configz: Callable[[], Any]) -> list[web.RouteDef]:
    """Return the route of the effective configuration."""

    async def configuration(_: web.Request) -> web.Response:
        return _json(json.dumps(configz()).encode())

    return [web.get("/configz", configuration)]


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
