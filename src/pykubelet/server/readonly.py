"""`/pods` on the read-only port: the pods of this node as a v1 PodList.

The port needs no authentication (standalone it listens on loopback only), so nothing that changes
anything belongs here.
"""

from __future__ import annotations

from aiohttp import web

from pykubelet.server.pods import PodsView, pod_list_json


def read_only_routes(view: PodsView) -> list[web.RouteDef]:
    """Routes that tell which pods there are and how they are."""

    async def pods(_: web.Request) -> web.Response:
        return web.Response(body=pod_list_json(view.pods()), content_type="application/json")

    return [web.get("/pods", pods)]
