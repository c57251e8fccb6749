"""What the command line asks of a running agent, over a socket that only root can open.

| request | answer |
|---|---|
| `GET /pods` | `NodePods`: every pod with its status, and where each is in its life |
| `GET /pods/{uid}` | the same for one pod |
| `GET /pods/{uid}/journal` | `PodJournal`: events and timeline |
| `POST /pods/{uid}/restart?container=…` | `Restarted`: the containers that will restart in place |

`/manifests/` is there, too (see `manifests.py`). Answers are JSON; a pod or container that is not there is
a 404 with a `Refusal`.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pykubelet.api.meta import to_json
from pykubelet.api.pod import Pod
from pykubelet.logs import get_logger
from pykubelet.server.pods import NodePods, PodJournal, PodsView, Refusal, Restarted

log = get_logger(__name__)


def control_routes(view: PodsView) -> list[web.RouteDef]:
    """Routes for the command line."""

    def chosen(request: web.Request) -> list[Pod]:
        uid = request.match_info["uid"]
        return [pod for pod in view.pods() if pod.uid == uid]

    def told(pods: list[Pod]) -> web.Response:
        return _answer(NodePods(pods=pods, states={pod.uid: view.state(pod.uid) for pod in pods}))

    async def everything(_: web.Request) -> web.Response:
        return told(view.pods())

    async def one(request: web.Request) -> web.Response:
        pods = chosen(request)
        return told(pods) if pods else _no_such_pod(request)

    async def journal(request: web.Request) -> web.Response:
        if not chosen(request):
            return _no_such_pod(request)
        events, timeline = view.journal(request.match_info["uid"])
        return _answer(PodJournal(events=events, timeline=timeline))

    async def restart(request: web.Request) -> web.Response:
        pods = chosen(request)
        if not pods:
            return _no_such_pod(request)
        container = request.query.get("container") or None
        try:
            names = view.restart(pods[0].uid, container)
        except LookupError as err:
            return _answer(Refusal(message=str(err.args[0]) if err.args else "no such container"), 404)
        log.info("Restart requested", pod=pods[0].full_name, podUID=pods[0].uid, containers=names)
        return _answer(Restarted(containers=names))

    return [
        web.get("/pods", everything),
        web.get("/pods/{uid}", one),
        web.get("/pods/{uid}/journal", journal),
        web.post("/pods/{uid}/restart", restart),
    ]


def _no_such_pod(request: web.Request) -> web.Response:
    return _answer(Refusal(message=f"there is no pod with uid {request.match_info['uid']}"), 404)


def _answer(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=to_json(document), status=status, content_type="application/json")
