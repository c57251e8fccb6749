"""The agent's server before a streaming server that a test plays, and connections to it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.client import RuntimeClient
from pykubelet.server.api import https_server
from pykubelet.server.auth.request_auth import AlwaysAllow, Authenticator
from pykubelet.server.lookup import PodLookup
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.streams.streaming import StreamingEndpoints, StreamLimits
from pykubelet.server.tls import ServingTls, TlsSettings
from pykubelet.transport.errors import CriError
from tests.support.certs import Authority, Pair
from tests.support.pod_view import ScriptedView, pod_of
from tests.support.server_clients import client_context

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class FakeRuntime(RuntimeClient):
    """A runtime that remembers what it was asked, with a streaming server that a test plays."""

    url: str = ""
    containers: dict[str, list[pb.Container]] = field(default_factory=dict)
    sandboxes: list[pb.PodSandbox] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    play: Play | None = None
    error: CriError | None = None

    async def list_containers(self, filter: pb.ContainerFilter | None = None) -> list[pb.Container]:
        assert filter is not None
        assert filter.state.state == pb.CONTAINER_RUNNING
        labels = dict(filter.label_selector)
        key = f"{labels['io.kubernetes.pod.uid']}/{labels['io.kubernetes.container.name']}"
        return self.containers.get(key, [])

    async def list_pod_sandbox(self, filter: pb.PodSandboxFilter | None = None) -> list[pb.PodSandbox]:
        assert filter is not None
        assert filter.state.state == pb.SANDBOX_READY
        wanted = dict(filter.label_selector).items()
        return [sandbox for sandbox in self.sandboxes if wanted <= dict(sandbox.labels).items()]

    async def container_status(
        self, container_id: str, *, verbose: bool = False
    ) -> pb.ContainerStatusResponse:
        raise NotImplementedError

    async def exec(self, request: pb.ExecRequest) -> str:
        return self._prepared(request)

    async def attach(self, request: pb.AttachRequest) -> str:
        return self._prepared(request)

    async def port_forward(self, request: pb.PortForwardRequest) -> str:
        return self._prepared(request)

    async def exec_sync(self, container_id: str, command: Any, timeout_seconds: int = 0) -> Any:
        raise NotImplementedError

    async def checkpoint_container(self, container_id: str, location: str, timeout_seconds: int = 0) -> None:
        raise NotImplementedError

    def _prepared(self, request: Any) -> str:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        return self.url

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            assert self.play is not None
            await self.play(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


UPGRADED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Odd: kept\r\n\r\n"
)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(UPGRADED)
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


def saying(answer: bytes) -> Play:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return play


@dataclass
class Door:
    """The agent's server, and connections to it."""

    port: int
    authority: Authority
    runtime: FakeRuntime
    view: ScriptedView
    registry: CollectorRegistry

    @asynccontextmanager
    async def connection(
        self, path: str, upgrade: str = "SPDY/3.1", method: str = "POST", extra: str = ""
    ) -> AsyncIterator[tuple[str, asyncio.StreamReader, asyncio.StreamWriter]]:
        """Request an upgrade; returns the head of the answer and the connection."""
        reader, writer = await asyncio.open_connection(
            "localhost", self.port, ssl=client_context(self.authority), limit=2**20
        )
        try:
            lines = f"{method} {path} HTTP/1.1\r\nHost: node\r\n"
            if upgrade:
                lines += f"Connection: Upgrade\r\nUpgrade: {upgrade}\r\n"
            writer.write(f"{lines}{extra}\r\n".encode(errors="surrogateescape"))
            async with asyncio.timeout(120):
                yield (await reader.readuntil(b"\r\n\r\n")).decode(), reader, writer
        finally:
            writer.close()

    async def refusal(self, path: str, **options: Any) -> tuple[int, str]:
        async with self.connection(path, **options) as (head, reader, _):
            length = next(line for line in head.split("\r\n") if line.lower().startswith("content-length"))
            body = await reader.readexactly(int(length.partition(":")[2]))
            return int(head.split()[1]), body.decode()


def on_uvloop(authority: Authority, pair: Pair, test: Callable[..., Awaitable[None]]) -> None:
    """Run a test on the agent's own loop: how it closes, pauses and tells is not quite as with asyncio's."""

    async def run() -> None:
        async with doors(authority, pair) as start:
            await test(start)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@asynccontextmanager
async def doors(authority: Authority, pair: Pair) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def start(
            idle_seconds: float = 60, limits: StreamLimits | None = None, translate_websockets: bool = True
        ) -> Door:
            registry = CollectorRegistry()
            metrics = ServerMetrics(registry)
            runtime = FakeRuntime(play=echo)
            backend = await asyncio.start_server(runtime.serve, "127.0.0.1", 0)
            stack.callback(backend.close)
            runtime.url = f"http://127.0.0.1:{backend.sockets[0].getsockname()[1]}/exec/token-7?x=y"
            web_pod = pod_of(
                "web", "u1", node="", spec={"containers": [{"name": "main", "image": "i", "tty": True}]}
            )
            view = ScriptedView([web_pod])
            runtime.containers["u1/main"] = [
                pb.Container(id="old", created_at=1),
                pb.Container(id="c1", created_at=2),
            ]
            runtime.sandboxes = [pb.PodSandbox(id="s1", created_at=5, labels={"io.kubernetes.pod.uid": "u1"})]
            lookup = PodLookup(view, runtime, lambda uid: {"mirror": "u1"}.get(uid, uid))
            streams = StreamingEndpoints(
                lookup,
                limits or StreamLimits(),
                metrics,
                idle_seconds=idle_seconds,
                translate_websockets=translate_websockets,
            )
            port = await stack.enter_async_context(
                https_server(
                    "127.0.0.1",
                    0,
                    streams.routes(),
                    tls=ServingTls(TlsSettings(), lambda: (pair.certificate, pair.key)),
                    authenticator=Authenticator(None, None, anonymous=True),
                    authorizer=AlwaysAllow(),
                    metrics=metrics,
                )
            )
            return Door(port, authority, runtime, view, registry)

        yield start
