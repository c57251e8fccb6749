import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from pykubelet.api.duration import Duration
from pykubelet.podconfig import url_source
from pykubelet.podconfig.url_source import UrlSource
from pykubelet.util import backoff
from tests.support.waiting import until
from tests.unit.podconfig.making import NODE, Heard, document, manifest

OFTEN = Duration.from_seconds(0.1)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """A real web server whose answer can be changed."""

    def __init__(self) -> None:
        self.requests: list[web.Request] = []
        self.answer: Handler | str = manifest("web")
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        return web.Response(text=self.answer) if isinstance(self.answer, str) else await self.answer(request)

    def status(self, status: int) -> None:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(status=status)

        self.answer = answer


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/pods"
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def asking(url: str, headers: dict[str, list[str]] | None = None) -> AsyncIterator[Heard]:
    heard = Heard()
    task = asyncio.ensure_future(UrlSource(url, headers or {}, OFTEN, NODE, heard).run())
    try:
        yield heard
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def rounds(server: Server, count: int) -> None:
    """Wait until the source asked so many times more, and took the answers."""
    wanted = len(server.requests) + count
    await until(lambda: len(server.requests) >= wanted)
    await asyncio.sleep(0.05)


async def test_url_source_pod_and_pod_list_are_reported(server: Server) -> None:
    async with asking(server.url) as heard:
        await until(lambda: heard.sets)
        assert heard.source == "http"
        assert heard.names == ["web-node-1"]
        pod = heard.sets[0][0][0]
        assert pod.metadata.annotations["kubernetes.io/config.source"] == "http"
        assert pod.spec.tolerations == []
        server.answer = json.dumps(
            {
                "apiVersion": "v1",
                "kind": "PodList",
                "items": [document("web"), document("two"), document("two")],
            }
        )
        await until(lambda: len(heard.sets) == 2)
        assert heard.names == ["web-node-1", "two-node-1"]
        assert heard.sets[1][0][0].uid == pod.uid
        assert "is already in" in heard.problems[0]
        server.answer = "apiVersion: v1\nkind: PodList\nitems: []\n"
        await until(lambda: len(heard.sets) == 3)
        assert heard.sets[2] == ([], [])


async def test_url_source_unchanged_response_is_reported_once(server: Server) -> None:
    async with asking(server.url) as heard:
        await rounds(server, 4)
        assert len(heard.sets) == 1


async def test_url_source_headers_sent_with_every_request(server: Server) -> None:
    headers = {"X-Token": ["secret"], "Accept": ["application/json", "application/yaml"]}
    async with asking(server.url, headers):
        await rounds(server, 2)
    for request in server.requests:
        assert request.headers["X-Token"] == "secret"
        assert request.headers.getall("Accept") == ["application/json", "application/yaml"]


async def slow(_: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(1000):
        await response.write(b"#")
        await asyncio.sleep(0.05)
    return response


async def huge(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(11):
        await response.write(b"#" * 1024**2)
    return response


async def bomb(_: web.Request) -> web.Response:
    block = gzip.compress(b"#" * 1024**2, 1)
    return web.Response(body=block * 100, headers={"Content-Encoding": "gzip"})


async def cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(manifest("web").encode())
    assert request.transport is not None
    request.transport.abort()
    return response


async def around(request: web.Request) -> web.Response:
    raise web.HTTPFound(request.path)


async def elsewhere(_: web.Request) -> web.Response:
    raise web.HTTPFound("file:///etc/passwd")


BAD: list[tuple[Handler | str | int, str]] = [
    (500, "it answered 500 Internal Server Error"),
    (404, "it answered 404 Not Found"),
    (204, "it answered 204 No Content"),
    ("", "gave an empty answer"),
    ("kind: [", "is neither YAML nor JSON"),
    (manifest("web", restartPolicy="x"), "spec.restartPolicy"),
    (manifest("../../etc"), "metadata.name"),
    (slow, "gave no answer within"),
    (drip, "gave no answer within"),
    (huge, "its answer is larger than 10 MiB"),
    (bomb, "its answer is larger than 10 MiB"),
    (cut, "could not be read"),
    (around, "could not be read"),
    (elsewhere, "could not be read"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[message for _, message in BAD])
async def test_url_source_invalid_response_keeps_last_pods(
    server: Server, monkeypatch: pytest.MonkeyPatch, bad: Handler | str | int, message: str
) -> None:
    monkeypatch.setattr(url_source, "TIMEOUT_SECONDS", 0.5 if "no answer" in message else 30.0)
    async with asking(server.url) as heard:
        await until(lambda: heard.sets)
        good = heard.sets[0][0]
        if isinstance(bad, int):
            server.status(bad)
        else:
            server.answer = bad
        await until(lambda: len(heard.sets) == 2)
        assert heard.sets[1][0] == good
        assert message in heard.problems[0]
        server.answer = manifest("web")
        await until(lambda: len(heard.sets) == 3)
        assert [pod.uid for pod in heard.sets[2][0]] == [pod.uid for pod in good]
        assert heard.problems == []


async def test_url_source_only_errors_reports_nothing(server: Server) -> None:
    server.status(503)
    async with asking(server.url) as heard:
        await rounds(server, 3)
        assert heard.sets == []
        server.answer = manifest("web")
        await until(lambda: heard.names == ["web-node-1"])


async def test_url_source_connection_refused_reports_nothing() -> None:
    async with asking("http://127.0.0.1:1/") as heard:
        await asyncio.sleep(0.2)
        assert heard.sets == []


async def test_url_source_empty_first_response_reports_no_pods(server: Server) -> None:
    server.answer = ""
    async with asking(server.url) as heard:
        await until(lambda: heard.sets)
        assert heard.names == []
        assert "gave an empty answer" in heard.problems[0]


async def test_url_source_follows_redirects_with_headers(server: Server) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/pods":
            raise web.HTTPMovedPermanently("/there")
        return web.Response(text=manifest("there"))

    server.answer = answer
    async with asking(server.url, {"X-Token": ["secret"]}) as heard:
        await until(lambda: heard.sets)
        assert heard.names == ["there-node-1"]
        assert {request.headers["X-Token"] for request in server.requests} == {"secret"}


async def test_url_source_failure_logged_on_change_and_periodically(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> int:
        return sum("Failed to read" in record.message for record in caplog.records)

    server.status(500)
    async with asking(server.url):
        await rounds(server, 4)
        assert told() == 1
        server.status(501)
        await rounds(server, 3)
        assert told() == 2
        monkeypatch.setattr(backoff, "REPEAT_SECONDS", 0.0)
        server.status(502)
        await rounds(server, 4)
        assert told() >= 4


@pytest.mark.parametrize(
    "url", ["not a url", "http://", "ftp://x/", "http://[::1/", "http://user:hunter2@[x"]
)
async def test_url_source_invalid_url_logged_without_password(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(url) as heard:
        await until(lambda: any("Failed to read" in record.message for record in caplog.records))
        assert heard.sets == []
    assert "hunter2" not in str([vars(record) for record in caplog.records])


async def test_url_source_password_in_url_is_sent_but_not_reported(server: Server) -> None:
    url = server.url.replace("http://", "http://user:hunter2@")
    server.answer = "kind: ["
    async with asking(url) as heard:
        await rounds(server, 2)
        assert server.requests[0].headers["Authorization"].startswith("Basic ")
        server.answer = manifest("web")
        await until(lambda: heard.sets)
        server.answer = "kind: ["
        await until(lambda: len(heard.sets) == 2)
        assert heard.problems[0].startswith(f"{server.url}: ")
    assert "hunter2" not in str(heard.sets)
