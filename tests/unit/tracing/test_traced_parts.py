"""What is traced: calls to the runtime, requests to the kubelet and to the API server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.apiserver.client import PODS, ApiClient, Resource
from pykubelet.apiserver.errors import NotFound
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.apiserver.transport import Transport
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import connect
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.pipeline import counting_middleware, tracing_middleware
from pykubelet.tracing.span import Span, SpanContext, SpanKind, Tracer, parse_traceparent
from pykubelet.transport.errors import CriError
from pykubelet.util.rate_limiter import TokenBucket
from tests.support.api_server import refuse, serving
from tests.support.cri import folder, scripted
from tests.support.cri_servers import Refuse, Runtime
from tests.support.watch_events import pod

__all__ = ["folder", "scripted"]
REMOTE = SpanContext(b"t" * 16, b"s" * 8, True)


class Sink:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def record(self, span: Span) -> None:
        self.spans.append(span)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def tracer(sink: Sink) -> Tracer:
    return Tracer(sink, 1.0)


async def test_channel_call_has_span_and_passes_its_context(
    scripted: Runtime, sink: Sink, tracer: Tracer
) -> None:
    metrics = CriMetrics(CollectorRegistry())
    timeout = Duration.from_seconds(5)
    async with await connect(str(scripted.path), timeout=timeout, metrics=metrics, tracer=tracer) as cri:
        sink.spans.clear()
        with tracer.start("syncPod") as sync:
            await cri.runtime.stop_container("c1", 0)
        call, _ = sink.spans
        assert call.name == "runtime.v1.RuntimeService/StopContainer"
        assert (call.kind, call.parent_id, call.error) == (SpanKind.CLIENT, sync.context.span_id, None)
        assert call.attributes["rpc.response.status_code"] == "OK"
        assert call.attributes["containerID"] == "c1"
        assert scripted.seen[-1].metadata["traceparent"] == call.context.traceparent
        scripted.answers["StopContainer"] = Refuse("NOT_FOUND", "no such container")
        with pytest.raises(CriError):
            await cri.runtime.stop_container("c1", 0)
        failed = sink.spans[-1]
        assert (failed.error, failed.attributes["rpc.response.status_code"]) == (
            "no such container",
            "NotFound",
        )


async def test_channel_call_cancelled_span_has_failed(scripted: Runtime, sink: Sink, tracer: Tracer) -> None:
    metrics = CriMetrics(CollectorRegistry())
    timeout = Duration.from_seconds(60)
    async with await connect(str(scripted.path), timeout=timeout, metrics=metrics, tracer=tracer) as cri:
        sink.spans.clear()
        call = asyncio.ensure_future(cri.runtime.stop_container("c1", 0))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    (span,) = sink.spans
    assert (span.error, span.attributes["rpc.response.status_code"]) == ("cancelled", "Canceled")


async def test_channel_without_tracer_sends_no_context(scripted: Runtime) -> None:
    metrics = CriMetrics(CollectorRegistry())
    async with await connect(str(scripted.path), timeout=Duration.from_seconds(5), metrics=metrics) as cri:
        await cri.runtime.stop_container("c1", 0)
    assert "traceparent" not in scripted.seen[-1].metadata


@pytest.fixture
async def site(tracer: Tracer) -> AsyncIterator[str]:
    async def logs(request: web.Request) -> web.Response:
        return web.Response(text=request.match_info["pod"])

    async def fails(request: web.Request) -> web.Response:
        raise RuntimeError("a bug")

    layers = [
        *tracing_middleware(tracer),
        counting_middleware(ServerMetrics(CollectorRegistry()), "readwrite"),
    ]
    app = web.Application(middlewares=layers)
    app.add_routes([web.get("/logs/{pod}", logs), web.get("/fails", fails)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_server_request_is_a_new_trace_linked_to_the_clients(site: str, sink: Sink) -> None:
    headers = {"traceparent": REMOTE.traceparent}
    async with aiohttp.ClientSession() as session, session.get(f"{site}/logs/web", headers=headers) as got:
        assert await got.text() == "web"
    (span,) = sink.spans
    assert (span.name, span.kind, span.link, span.parent_id) == ("/logs/{pod}", SpanKind.SERVER, REMOTE, b"")
    assert span.context.trace_id != REMOTE.trace_id
    assert span.attributes["http.request.method"] == "GET"
    assert span.attributes["url.path"] == "/logs/web"
    assert span.attributes["http.response.status_code"] == 200


@pytest.mark.parametrize(("path", "name", "code"), [("/none", "HTTP GET", 404), ("/fails", "/fails", 500)])
async def test_server_failed_request_has_its_status(
    site: str, sink: Sink, path: str, name: str, code: int
) -> None:
    headers = {"traceparent": "nonsense"}
    async with aiohttp.ClientSession() as session, session.get(f"{site}{path}", headers=headers):
        pass
    (span,) = sink.spans
    assert (span.name, span.attributes["http.response.status_code"], span.link) == (name, code, None)
    assert (span.error is not None) == (code == 500)


def test_server_without_tracer_has_no_middleware() -> None:
    assert tracing_middleware(None) == ()


async def test_api_client_request_has_span_and_passes_its_context(sink: Sink, tracer: Tracer) -> None:
    async with serving(None) as server, Transport(RestConfig(server=server.url)) as transport:
        client = ApiClient(transport, TokenBucket(-1, 0), tracer=tracer)

        async def give(_: web.Request) -> web.Response:
            return web.json_response(pod("a"))

        server.say(give, refuse(404, "NotFound", "none"))
        await client.get(PODS, "a", "default")
        with pytest.raises(NotFound):
            await client.get(PODS, "b", "default")
        first, second = sink.spans
        assert (first.name, first.kind, first.error) == ("HTTP GET", SpanKind.CLIENT, None)
        assert first.attributes["url.path"] == "/api/v1/namespaces/default/pods/a"
        assert second.attributes["http.response.status_code"] == 404
        assert second.error is not None
        assert parse_traceparent(server.seen[0].header("Traceparent")) == first.context


async def test_api_client_without_tracer_builds_path_once(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []
    build = Resource.path

    def path(self: Resource[Any], *parts: str) -> str:
        paths.append(build(self, *parts))
        return paths[-1]

    monkeypatch.setattr(Resource, "path", path)
    async with serving(None) as server, Transport(RestConfig(server=server.url)) as transport:

        async def give(_: web.Request) -> web.Response:
            return web.json_response(pod("a"))

        server.say(give)
        await ApiClient(transport, TokenBucket(-1, 0)).get(PODS, "a", "default")
    assert paths == ["/api/v1/namespaces/default/pods/a"]
