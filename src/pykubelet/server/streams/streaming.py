"""`/exec`, `/attach` and `/portForward` on the runtime's streaming server; limits on streams.

The CRI call (Exec, Attach, PortForward) returns a URL that is valid once, for a minute; it is never sent
to the client. The client requests an upgrade:

- SPDY, and WebSocket with the protocols that runtimes implement (v4 and older): tunnelled byte for byte
  (`proxy`);
- WebSocket with `v5.channel.k8s.io` (exec, attach) or `SPDY/3.1+portforward.k8s.io`: terminated here and
  translated to the runtime's SPDY (`translator`), if the gate ExtendWebSocketsToKubelet is
  enabled. The API server passes such requests through to nodes that declare the feature.

`StreamLimits` bounds the long-running responses (followed logs, exec, attach, port-forward), in total and
per user; a request above the limit gets 429.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from aiohttp import web
from multidict import MultiMapping

from pykubelet.api.pod import Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.server.auth.identity import HttpError, user_name
from pykubelet.server.lookup import PodLookup, find_container, runtime_http_error
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.pipeline import is_websocket
from pykubelet.server.streams.proxy import proxy_stream
from pykubelet.server.streams.translator import (
    RemoteCommandOptions,
    requests_stream_close,
    requests_tunnel,
    translate_remote_command,
    tunnel_port_forward,
)
from pykubelet.transport.errors import CriError

MAX_STREAMS = 800

# The API server is one user and sends the requests of all cluster users, so this is most of `MAX_STREAMS`.
MAX_STREAMS_PER_USER = 600


class StreamLimits:
    """Limits on concurrent streams, in total and per user."""

    def __init__(self, max_streams: int = MAX_STREAMS, max_per_user: int = MAX_STREAMS_PER_USER) -> None:
        self._max_streams = max_streams
        self._max_per_user = max_per_user
        self._open: Counter[str] = Counter()

    @contextmanager
    def acquire(self, user: str) -> Iterator[None]:
        """Acquire a stream slot until the block ends. Raises HttpError (429) if none is free."""
        if self._open.total() >= self._max_streams or self._open[user] >= self._max_per_user:
            raise HttpError(429, "Too many streams are open, try again later\n", {"Retry-After": "1"})
        self._open[user] += 1
        try:
            yield
        finally:
            self._open[user] -= 1
            if not self._open[user]:
                del self._open[user]


def parse_ports(query: MultiMapping[str]) -> list[int]:
    """Return the ports in the query of a WebSocket client. Raises HttpError (400)."""
    found = query.getall("port", [])
    if not found:
        raise HttpError(400, 'query parameter "port" is required')
    ports = []
    for text in ",".join(found).split(","):
        if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65536):
            raise HttpError(400, f'unable to parse "{text}" as a port')
        ports.append(int(text))
    return ports


class StreamingEndpoints:
    """Endpoints `/exec`, `/attach` and `/portForward`."""

    def __init__(
        self,
        lookup: PodLookup,
        limits: StreamLimits,
        metrics: ServerMetrics,
        *,
        idle_seconds: float,
        translate_websockets: bool,
    ) -> None:
        """Initialize; `translate_websockets` is the gate ExtendWebSocketsToKubelet."""
        self._lookup = lookup
        self._limits = limits
        self._metrics = metrics
        self._idle_seconds = idle_seconds
        self._translate_websockets = translate_websockets

    def routes(self) -> list[web.RouteDef]:
        """Return all routes, with and without the pod's UID, for SPDY (POST) and WebSocket (GET)."""
        pod, container = "/{namespace}/{pod}", "/{container}"
        endpoints = [
            ("/exec", self._exec, [pod + container, pod + "/{uid}" + container]),
            ("/attach", self._attach, [pod + container, pod + "/{uid}" + container]),
            ("/portForward", self._port_forward, [pod, pod + "/{uid}"]),
        ]
        return [
            method(root + path, handler)
            for root, handler, paths in endpoints
            for path in paths
            for method in (_get, web.post)
        ]

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        options = RemoteCommandOptions.from_query(request.query)
        pod = self._pod(request)

        async def prepare() -> str:
            container = await self._running_container(request, pod, 'container not found ("{}")')
            return await self._lookup.runtime.exec(
                pb.ExecRequest(
                    container_id=container,
                    cmd=request.query.getall("command", []),
                    tty=options.tty,
                    stdin=options.stdin,
                    stdout=options.stdout,
                    stderr=options.stderr,
                )
            )

        return await self._command(request, "exec", options, prepare)

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        options = RemoteCommandOptions.from_query(request.query)
        pod = self._pod(request)
        name = request.match_info["container"]
        spec = find_container(pod, name)
        if spec is not None:
            # The TTY of the process was fixed when it was started.
            options = replace(options, tty=spec.tty, stderr=options.stderr and not spec.tty)

        async def prepare() -> str:
            missing = f"container {{}} not found in pod {pod.metadata.name}_{pod.metadata.namespace}"
            container = await self._running_container(request, pod, missing)
            if spec is None:
                raise HttpError(500, missing.format(name))
            return await self._lookup.runtime.attach(
                pb.AttachRequest(
                    container_id=container,
                    tty=options.tty,
                    stdin=options.stdin,
                    stdout=options.stdout,
                    stderr=options.stderr,
                )
            )

        return await self._command(request, "attach", options, prepare)

    async def _command(
        self,
        request: web.Request,
        name: str,
        options: RemoteCommandOptions,
        prepare: Callable[[], Awaitable[str]],
    ) -> web.StreamResponse:
        with self._limits.acquire(user_name(request)):
            url = await _prepared(prepare)
            if self._translate_websockets and requests_stream_close(request):
                self._metrics.websocket(name)
                return await translate_remote_command(request, url, options, idle_seconds=self._idle_seconds)
            return await proxy_stream(request, url, idle_seconds=self._idle_seconds)

    async def _port_forward(self, request: web.Request) -> web.StreamResponse:
        tunnel = self._translate_websockets and requests_tunnel(request)
        ports = parse_ports(request.query) if is_websocket(request) and not tunnel else []
        pod = self._pod(request)
        if not self._lookup.matches_uid(pod, request.match_info.get("uid", "")):
            raise HttpError(404, "pod not found")

        async def prepare() -> str:
            sandbox = await self._lookup.ready_sandbox(pod)
            if sandbox is None:
                raise HttpError(500, f'pod not found ("{pod.metadata.name}_{pod.metadata.namespace}")')
            return await self._lookup.runtime.port_forward(
                pb.PortForwardRequest(pod_sandbox_id=sandbox, port=ports)
            )

        with self._limits.acquire(user_name(request)):
            url = await _prepared(prepare)
            if tunnel:
                self._metrics.websocket("portforward")
                return await tunnel_port_forward(request, url, idle_seconds=self._idle_seconds)
            return await proxy_stream(request, url, idle_seconds=self._idle_seconds)

    def _pod(self, request: web.Request) -> Pod:
        pod = self._lookup.pod(request.match_info["namespace"], request.match_info["pod"])
        if pod is None:
            raise HttpError(404, "pod does not exist")
        return pod

    async def _running_container(self, request: web.Request, pod: Pod, missing: str) -> str:
        name = request.match_info["container"]
        if self._lookup.matches_uid(pod, request.match_info.get("uid", "")):
            container = await self._lookup.running_container(pod, name)
            if container is not None:
                return container
        raise HttpError(500, missing.format(name))


async def _prepared(prepare: Callable[[], Awaitable[str]]) -> str:
    try:
        return await prepare()
    except CriError as err:
        raise runtime_http_error(err) from err


def _get(path: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.RouteDef:
    return web.get(path, handler, allow_head=False)
