"""`/pods` and `/spec/` on the read-only port: the pods of this node as a v1 PodList, and its machine.

The port needs no authentication (standalone it listens on loopback only), so nothing that changes
anything belongs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from aiohttp import web

from pykubelet.api.meta import to_json
from pykubelet.host.hardware import Hardware, read_hardware
from pykubelet.server.pods import PodsView, pod_list_json


def read_only_routes(view: PodsView) -> list[web.RouteDef]:
    """Routes that tell which pods there are and how they are."""

    async def pods(_: web.Request) -> web.Response:
        return web.Response(body=pod_list_json(view.pods()), content_type="application/json")

    return [web.get("/pods", pods)]


def spec_routes(read: Callable[[str], Hardware] = read_hardware) -> list[web.RouteDef]:
    """A route that tells what the machine is made of; `read` is given the time as text, and may block."""

    async def spec(_: web.Request) -> web.Response:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return web.Response(body=to_json(await asyncio.to_thread(read, now)), content_type="application/json")

    return [web.get("/spec/", spec), web.get("/spec", spec)]
