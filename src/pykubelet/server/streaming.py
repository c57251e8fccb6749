"""`/exec`, `/attach` and `/portForward`: the runtime serves these streams, the agent opens the door.

The runtime is asked to prepare the stream and gives an address that is good once, for a minute; the
client's connection is handed on to it. The address itself is never told to the client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web
from multidict import MultiMapping

from pykubelet.api.pod import Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.errors import CriError
from pykubelet.server.lookup import Lookup, container_of, runtime_refusal
from pykubelet.server.metrics import ServerMetrics
from pykubelet.server.pipeline import is_websocket, user_name
from pykubelet.server.refused import Refused
from pykubelet.server.stream_limits import StreamLimits
from pykubelet.server.tunnel import pass_through


@dataclass(frozen=True, slots=True)
class StreamWish:
    """Which of a command's streams a client wants."""

    stdin: bool
    stdout: bool
    stderr: bool
    tty: bool

    @classmethod
    def of(cls, query: Mapping[str, str]) -> StreamWish:
        """Read the wish from a query; raises Refused when it is for nothing."""
        stdin, stdout, stderr, tty = (query.get(key) == "1" for key in ("input", "output", "error", "tty"))
        # A terminal has one stream for both.
        stderr = stderr and not tty
        if not (stdin or stdout or stderr):
            raise Refused(400, "you must specify at least 1 of stdin, stdout, stderr")
        return cls(stdin, stdout, stderr, tty)


def ports_of(query: MultiMapping[str]) -> list[int]:
    """The ports that a WebSocket client names in its query; raises Refused."""
    found = query.getall("port", [])
    if not found:
        raise Refused(400, 'query parameter "port" is required')
    ports = []
    for text in ",".join(found).split(","):
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
            raise Refused(400, f'unable to parse "{text}" as a port')
        ports.append(int(text))
    return ports


class Streams:
    """The streaming endpoints."""

    def __init__(
        self, lookup: Lookup, limits: StreamLimits, metrics: ServerMetrics, *, idle_seconds: float
    ) -> None:
        self._lookup = lookup
        self._limits = limits
        self._metrics = metrics
        self._idle_seconds = idle_seconds

    def routes(self) -> list[web.RouteDef]:
        """All of them, with and without the pod's uid, for SPDY (POST) and WebSocket (GET)."""
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
        wish = StreamWish.of(request.query)
        pod = self._pod(request)

        async def prepare() -> str:
            container = await self._running(request, pod, 'container not found ("{}")')
            return await self._lookup.runtime.exec(
                pb.ExecRequest(
                    container_id=container,
                    cmd=request.query.getall("command", []),
                    tty=wish.tty,
                    stdin=wish.stdin,
                    stdout=wish.stdout,
                    stderr=wish.stderr,
                )
            )

        return await self._stream(request, "exec", prepare)

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        wish = StreamWish.of(request.query)
        pod = self._pod(request)

        async def prepare() -> str:
            missing = f"container {{}} not found in pod {pod.metadata.name}_{pod.metadata.namespace}"
            container = await self._running(request, pod, missing)
            spec = container_of(pod, request.match_info["container"])
            if spec is None:
                raise Refused(500, missing.format(request.match_info["container"]))
            # Whether the process has a terminal was decided when it was started.
            return await self._lookup.runtime.attach(
                pb.AttachRequest(
                    container_id=container,
                    tty=spec.tty,
                    stdin=wish.stdin,
                    stdout=wish.stdout,
                    stderr=wish.stderr and not spec.tty,
                )
            )

        return await self._stream(request, "attach", prepare)

    async def _port_forward(self, request: web.Request) -> web.StreamResponse:
        ports = ports_of(request.query) if is_websocket(request) else []
        pod = self._pod(request)
        if not self._lookup.is_meant(pod, request.match_info.get("uid", "")):
            raise Refused(404, "pod not found")

        async def prepare() -> str:
            sandbox = await self._lookup.ready_sandbox(pod)
            if sandbox is None:
                raise Refused(500, f'pod not found ("{pod.metadata.name}_{pod.metadata.namespace}")')
            return await self._lookup.runtime.port_forward(
                pb.PortForwardRequest(pod_sandbox_id=sandbox, port=ports)
            )

        return await self._stream(request, "portforward", prepare)

    async def _stream(
        self, request: web.Request, name: str, prepare: Callable[[], Awaitable[str]]
    ) -> web.StreamResponse:
        with self._limits.one_more(user_name(request)):
            try:
                url = await prepare()
            except CriError as err:
                raise runtime_refusal(err) from err
            if is_websocket(request):
                self._metrics.websocket(name)
            return await pass_through(request, url, idle_seconds=self._idle_seconds)

    def _pod(self, request: web.Request) -> Pod:
        pod = self._lookup.pod(request.match_info["namespace"], request.match_info["pod"])
        if pod is None:
            raise Refused(404, "pod does not exist")
        return pod

    async def _running(self, request: web.Request, pod: Pod, missing: str) -> str:
        name = request.match_info["container"]
        if self._lookup.is_meant(pod, request.match_info.get("uid", "")):
            container = await self._lookup.running_container(pod, name)
            if container is not None:
                return container
        raise Refused(500, missing.format(name))


def _get(path: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.RouteDef:
    return web.get(path, handler, allow_head=False)
