"""Routes of the page: HTML of each view, data of its charts, live updates, static files. All are GET.

The permission of a path follows from `server.identity`: `/pods` needs `nodes/pods` or `nodes/proxy`, all
other paths need `nodes/proxy`, because the page of a pod shows the end of its logs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import HttpError
from pykubelet.server.page.agent_view import SERIES as AGENT_SERIES
from pykubelet.server.page.agent_view import agent_sections
from pykubelet.server.page.events import Broadcaster, Rendered, TooManyClients
from pykubelet.server.page.facts import PageSource, PodFacts
from pykubelet.server.page.history import AGENT, NODE
from pykubelet.server.page.html import Html, Section, tag
from pykubelet.server.page.images_view import images_sections
from pykubelet.server.page.layout import FILES, STATIC, document, static_version, theme_of
from pykubelet.server.page.node_view import node_sections
from pykubelet.server.page.parts import chart_data, latest
from pykubelet.server.page.pod_view import pod_sections, series_of
from pykubelet.server.page.pods_view import EVERYTHING, PodQuery, pod_row, pods_form, pods_section, select
from pykubelet.server.page.security import HEADERS
from pykubelet.server.pipeline import plain_text
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
NODE_SERIES = ("cpu", "memory", "received", "sent", "pressure-cpu", "pressure-memory", "pressure-io")
WRITE_SECONDS = 10.0
"""Seconds for which a client may not read before its connection is closed."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ROWS_PER_TURN = 16
"""Pods that are rendered before other tasks run."""
_TITLES = {"node": "Node", "pods": "Pods", "images": "Images and disk", "agent": "Kubelet"}


@dataclass(frozen=True, slots=True)
class View:
    """What a client looks at."""

    kind: str
    namespace: str = ""
    name: str = ""
    query: PodQuery = EVERYTHING

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> View | None:
        """Return the view of the query of `/events`; None if there is no such view."""
        kind = query.get("view", "")
        if kind == "pod":
            return cls(kind, query.get("namespace", ""), query.get("name", ""))
        if kind == "pods":
            return cls(kind, query=PodQuery.parse(query))
        return cls(kind) if kind in _TITLES else None


class Page:
    """Handlers of the page; `close` ends its live updates."""

    def __init__(self, source: PageSource, tasks: TaskScope) -> None:
        """Initialize; the updates run in `tasks`."""
        self._source = source
        self._round_pods: list[PodFacts] | None = None
        """The pods of the current round of updates, once a view has needed them."""
        self.updates: Broadcaster[View] = Broadcaster(
            self._render, source.sample, tasks, finish=self._finish_round
        )

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/", self._view(View("node"))),
            web.get("/pods", self._pods),
            web.get("/pod/{namespace}/{name}", self._pod),
            web.get("/images", self._view(View("images"))),
            web.get("/agent", self._view(View("agent"))),
            web.get("/events", self._events, allow_head=False),
            web.get("/data/node", self._data(NODE, NODE_SERIES)),
            web.get("/data/agent", self._data(AGENT, AGENT_SERIES)),
            web.get("/data/pod/{namespace}/{name}", self._pod_data),
            web.get("/static/{name}", self._static),
        ]

    def close(self) -> None:
        """End the live updates of all clients."""
        self.updates.close()

    # Views

    def _pods_of_round(self) -> list[PodFacts]:
        """Return all pods, diagnosed once per round for all views."""
        if self._round_pods is None:
            self._round_pods = self._source.pods()
        return self._round_pods

    def _finish_round(self) -> None:
        self._round_pods = None

    async def _sections(
        self, view: View, list_pods: Callable[[], Sequence[PodFacts]]
    ) -> Sequence[Section] | None:
        """Return the sections of a view; None for a pod that does not exist."""
        source, now = self._source, time.time()
        settings, history = source.settings, source.history
        match view.kind:
            case "node":
                return node_sections(settings, await source.node(), list_pods(), history, now)
            case "pods":
                pods = list_pods()
                rows = await self._rows(select(pods, view.query), now)
                return [pods_section(settings, rows, len(pods))]
            case "pod":
                details = await source.pod(view.namespace, view.name)
                return pod_sections(settings, details, history, now) if details is not None else None
            case "images":
                return images_sections(settings, await source.images())
        return agent_sections(settings, await source.agent(), history, now)

    async def _rows(self, pods: Sequence[PodFacts], now: float) -> list[Html]:
        rows = []
        for number, each in enumerate(pods, 1):
            rows.append(pod_row(each, self._source.history, now))
            if number % _ROWS_PER_TURN == 0:
                await asyncio.sleep(0)
        return rows

    async def _render(self, view: View) -> Rendered | None:
        """Return the live sections of a view and the current values of its charts."""
        sections = await self._sections(view, self._pods_of_round)
        if sections is None:
            return None
        cards = [card for each in sections for card in (each if isinstance(each, tuple) else (each,))]
        return Rendered({id: card for card in cards if (id := _live_id(card))}, self._sample(view))

    def _sample(self, view: View) -> dict[str, object]:
        now, history = time.time(), self._source.history
        names: Sequence[str] = {"node": NODE_SERIES, "agent": AGENT_SERIES}.get(view.kind, ())
        owner = AGENT if view.kind == "agent" else NODE
        if view.kind == "pod":
            pod = self._source.find_pod(view.namespace, view.name)
            if pod is None:
                return {}
            names, owner = series_of(pod), pod.uid
        return {"time": round(now, 1), "values": latest(history, owner, names, now)} if names else {}

    # Handlers

    def _view(self, view: View) -> _Handler:
        async def respond(request: web.Request) -> web.Response:
            return await self._document(request, view, f"view={view.kind}")

        return respond

    async def _pods(self, request: web.Request) -> web.Response:
        query = PodQuery.parse(request.query)
        params = {"view": "pods", "q": query.text, "state": query.level, "sort": query.sort}
        events = request.rel_url.with_query({key: value for key, value in params.items() if value})
        form = [tag("h1", "Pods", class_="hidden"), pods_form(query)]
        return await self._document(request, View("pods", query=query), events.raw_query_string, form)

    async def _pod(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        events = request.rel_url.with_query({"view": "pod", "namespace": namespace, "name": name})
        return await self._document(request, View("pod", namespace, name), events.raw_query_string)

    async def _document(
        self, request: web.Request, view: View, events: str, before: Sequence[Html] = ()
    ) -> web.Response:
        status, title = 200, view.name or _TITLES[view.kind]
        sections = await self._sections(view, self._source.pods)
        if sections is None:
            sections, status, events = (_missing(view),), 404, ""
        theme = theme_of(request.cookies.get("theme"))
        path = request.path
        body = document(self._source.settings, title, path, events, [*before, *sections], theme)
        return web.Response(
            status=status,
            body=body,
            content_type="text/html",
            charset="utf-8",
            headers={hdrs.CACHE_CONTROL: "no-store"},
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        view = View.parse(request.query)
        if view is None:
            raise HttpError(404, "404: no such view\n")
        try:
            with self.updates.connect(view) as client:
                response = web.StreamResponse(headers={**HEADERS, hdrs.CACHE_CONTROL: "no-store"})
                response.content_type = "text/event-stream"
                await response.prepare(request)
                await _write(request, response, b"retry: 2000\n\n")
                async for message in client.messages():
                    await _write(request, response, message)
                return response
        except TooManyClients:
            raise HttpError(
                503, "too many pages are open; this one is not updated\n", {"Retry-After": "10"}
            ) from None

    def _data(self, owner: str, names: Sequence[str]) -> _Handler:
        async def respond(_: web.Request) -> web.Response:
            return _json(chart_data(self._source.history, owner, names, time.time()))

        return respond

    async def _pod_data(self, request: web.Request) -> web.Response:
        pod = self._source.find_pod(request.match_info["namespace"], request.match_info["name"])
        if pod is None:
            raise HttpError(404, "404: no such pod\n")
        return _json(chart_data(self._source.history, pod.uid, series_of(pod), time.time()))

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        kind = FILES.get(name)
        if kind is None:
            raise HttpError(404, "404: Page Not Found\n")
        is_versioned = request.query.get("v") == static_version()
        cache = "public, max-age=31536000, immutable" if is_versioned else "no-cache"
        return web.Response(
            body=(STATIC / name).read_bytes(),
            content_type=kind,
            charset="utf-8",
            headers={hdrs.CACHE_CONTROL: cache},
        )


def error_responses() -> Middleware:
    """Return the middleware that turns errors into responses, for a server without `counting_middleware`."""

    @web.middleware
    async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except HttpError as error:
            response = plain_text(error.status, error.text)
            response.headers.update(error.headers)
            return response
        except web.HTTPNotFound:
            return plain_text(404, "404: Page Not Found\n")
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as err:  # a failing view must not affect the rest of the kubelet
            log.error(err, "Failed to render the page", path=request.path[:253])
            return plain_text(500, "Internal Server Error\n")

    return middleware


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write to a client. Raises ConnectionError if it does not read."""
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read") from None


def _json(body: object) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers={hdrs.CACHE_CONTROL: "no-store"},
    )


def _live_id(section: Html) -> str:
    """Return the id of a section that is updated live; empty for others."""
    head = section[: section.find(">")]
    if "data-live" not in head:
        return ""
    return head.partition(' id="')[2].partition('"')[0]


def _missing(view: View) -> Html:
    return tag(
        "section",
        tag("h1", "This pod is not on this node"),
        tag(
            "p",
            f"{view.namespace}/{view.name} has left it, or never was here. ",
            tag("a", "All pods", href="/pods"),
        ),
        class_="summary wide",
    )
