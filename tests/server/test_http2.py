"""HTTP/2: the same answers as over HTTP/1.1, in any number at once, to real clients and to odd ones."""

import asyncio
import gc
import gzip
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from pykubelet.server import connections
from pykubelet.server.connections import app_runner, serve_connections
from pykubelet.server.http import http_server
from pykubelet.server.http2_connection import Http2Connection
from pykubelet.server.http2_stream import Stream
from pykubelet.server.http2_wire import MOST_STREAMS
from pykubelet.server.sockets import listening_socket
from pykubelet.server.tls import ServingTls, TlsSettings
from pykubelet.server.unix import unix_server
from pykubelet.tasks import TaskScope
from tests.kube.certs import Authority, Pair
from tests.server import test_api
from tests.server.http2_client import PATIENCE_SECONDS, Client, http2_client
from tests.server.people import client_context
from tests.server.test_api import ENDPOINTS, STAMP, Node, Start, write_log

authority, pairs, start = test_api.authority, test_api.pairs, test_api.start


@asynccontextmanager
async def talking(node: Node, client: str = "admin", **options: Any) -> AsyncIterator[Client]:
    context = client_context(node.authority, node.clients[client].get("pair"))
    async with http2_client(node.port, context, **options) as talk:
        yield talk


def token_of(node: Node, client: str) -> list[tuple[str, str]]:
    token = node.clients[client].get("token")
    return [("authorization", f"Bearer {token}")] if token else []


# Pages whose content is another one each time.
_CHANGING = ("/metrics", "/debug/", "/flagz", "/statusz", "/checkpoint/")


async def test_every_endpoint_answers_as_over_http1(start: Start) -> None:
    node = await start()
    write_log(node, f"{STAMP.format(5)} stdout F hello")
    wrong = []
    for client in ("admin", "token", "no credentials", "bad certificate"):
        async with talking(node, client) as talk:
            for method, path, _, _ in ENDPOINTS:
                status, text, headers = await node.ask(path, client, method)
                answer = await talk.ask(path, method, headers=token_of(node, client))
                dropped = {"date", "transfer-encoding", "connection", "content-length"}
                expected = {name.lower(): value for name, value in headers.items()}
                for name in dropped:
                    expected.pop(name, None)
                    answer.headers.pop(name, None)
                same_text = path.startswith(_CHANGING) or answer.text == text
                if (answer.status, answer.headers) != (status, expected) or not same_text or not answer.ended:
                    wrong.append((method, path, client, answer, status, headers, text[:100]))
    assert wrong == []


async def ask_http1(node: Node, path: str, method: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection(
        "localhost", node.port, ssl=client_context(node.authority, node.clients["admin"]["pair"])
    )
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_SECONDS):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode()
    finally:
        writer.close()


async def test_paths_mean_the_same_as_over_http1(start: Start) -> None:
    node = await start()
    paths = [
        *("//pods", "/pods//", "/./pods", "/pods/../healthz", "/%2e%2e/pods", "/pods/%2E%2E/healthz"),
        *("/pods%2f", "/pods%00", "/p%6fds", "/pods?x=/../y", "/pods?a=%zz&b=%", "/pods#there", "/pods%"),
        *("/\\pods", "/pods;x=1", "/logs/%2e%2e/etc/passwd", "/logs/..%2f..%2fetc/passwd", "/" + "x" * 5000),
        *("/healthz?", "/healthz?a b".replace(" ", "+"), "/%68ealthz", "/héalthz", "*"),
    ]
    async with talking(node) as talk:
        for path in paths:
            for method in ("GET", "HEAD", "OPTIONS", "DELETE"):
                answer = await talk.ask(path, method)
                status, text = await ask_http1(node, path, method)
                # aiohttp answers HEAD for what is no path with a body, which HTTP/2 cannot have.
                assert (answer.status, answer.text) == (status, text if method != "HEAD" else ""), path


async def echo(request: web.Request) -> web.Response:
    body = await request.read()
    headers = {name: request.headers.getall(name) for name in request.headers}
    return web.json_response(
        {"method": request.method, "path": request.raw_path, "headers": headers, "size": len(body)}
    )


async def nothing(request: web.Request) -> web.Response:
    return web.Response(status=int(request.match_info["status"]), headers={"X-Here": "yes"})


async def break_off(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(b"so far")
    if request.match_info["how"] == "abort":
        assert request.transport is not None
        request.transport.abort()
    raise ValueError("a secret of the inside")


async def compressed(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    answer.enable_compression(web.ContentCoding.gzip)
    await answer.prepare(request)
    for _ in range(100):
        await answer.write(b"again " * 1000)
    return answer


async def no_header(_: web.Request) -> web.Response:
    return web.Response(headers={"X-Two": "one\r\nX-Evil: two"})


class Slow:
    """A handler that waits, and counts."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.at_work = self.begun = self.cancelled = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.at_work += 1
        self.begun += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_work -= 1
        return web.Response(text="done")


ROUTES = [
    web.route("*", "/echo{rest:.*}", echo),
    web.get("/status/{status}", nothing),
    web.get("/break/{how}", break_off),
    web.get("/compressed", compressed),
    web.get("/no-header", no_header),
]


class Site:
    """A server for tests with connections of its own settings."""

    def __init__(self, port: int, authority: Authority, slow: Slow) -> None:
        self.port, self.authority, self.slow = port, authority, slow

    def talking(self, **options: Any) -> Any:
        return http2_client(self.port, client_context(self.authority), **options)


@asynccontextmanager
async def site_of(authority: Authority, pairs: dict[str, Pair], *, most: int = 100) -> AsyncIterator[Site]:
    slow, app = Slow(), web.Application()
    app.add_routes([*ROUTES, web.get("/slow", slow.answer)])
    tls = ServingTls(TlsSettings(), lambda: (pairs["server"].certificate, pairs["server"].key))
    with listening_socket("test", "127.0.0.1", 0) as listener:
        async with app_runner(app) as server, serve_connections(server, listener, tls.context, most=most):
            yield Site(listener.getsockname()[1], authority, slow)


@pytest.fixture
async def site(authority: Authority, pairs: dict[str, Pair]) -> AsyncIterator[Site]:
    async with site_of(authority, pairs) as made:
        yield made


async def eventually(condition: Callable[[], Any]) -> None:
    """Wait until something is so that nobody tells."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not become so"
        await asyncio.sleep(0.01)


def alive(kind: type) -> int:
    """How many there are of something; those that only wait for the collector do not count."""
    gc.collect()
    return sum(isinstance(found, kind) for found in gc.get_objects())


def standing() -> list[Http2Connection]:
    """The server's side of the connections that stand."""
    found = [found for found in gc.get_objects() if isinstance(found, Http2Connection)]
    return [connection for connection in found if connection.transport is not None]


async def test_what_a_handler_sees_of_a_request(site: Site) -> None:
    async with site.talking() as talk:
        headers = [
            ("cookie", "a=1"),
            ("cookie", "b=2"),
            ("x-twice", "1"),
            ("x-twice", "2"),
            ("host", "other"),
        ]
        seen = json.loads((await talk.ask("/echo/x?y=%2F", headers=headers)).body)
        assert (seen["method"], seen["path"], seen["size"]) == ("GET", "/echo/x?y=%2F", 0)
        by_name = {name.lower(): values for name, values in seen["headers"].items()}
        assert by_name["cookie"] == ["a=1; b=2"]
        assert by_name["x-twice"] == ["1", "2"]
        assert by_name["host"] == ["node"]
        pseudo = [(":method", "GET"), (":scheme", "https"), (":path", "/echo")]
        seen = json.loads((await talk.ask("", pseudo=pseudo, headers=[("host", "other")])).body)
        assert [values for name, values in seen["headers"].items() if name.lower() == "host"] == [["other"]]


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 300_000, 1024**2])
@pytest.mark.parametrize("told", [True, False])
async def test_bodies(site: Site, size: int, told: bool) -> None:
    headers = [("content-length", str(size))] if told else []
    async with site.talking() as talk:
        answer = await talk.ask("/echo", "POST", b"x" * size, headers=headers)
        assert (answer.status, json.loads(answer.body)["size"]) == (200, size)


async def test_a_body_that_is_too_large(site: Site) -> None:
    async with site.talking() as talk:
        answer = await talk.ask("/echo", "POST", b"x" * (2 * 1024**2))
        assert (answer.status, answer.ended) == (413, True)
        # The client is told to stop sending; there is nothing wrong with the answer.
        assert answer.reset in (None, ErrorCodes.NO_ERROR)
        assert (await talk.ask("/echo")).status == 200


async def test_a_length_that_is_not_true(site: Site) -> None:
    async with site.talking() as talk:
        answer = await talk.ask("/echo", "POST", headers=[("content-length", "5")])
        assert answer.reset == ErrorCodes.PROTOCOL_ERROR
        await talk.ask("/echo", "POST", b"four", headers=[("content-length", "5")])
        await talk.until(lambda: talk.closed)
        assert talk.goodbye == ErrorCodes.PROTOCOL_ERROR


async def test_trailers_are_read_and_forgotten(site: Site) -> None:
    async with site.talking() as talk:
        number = talk.begin("/echo", "POST", body=True)
        await talk.send(number, b"12345")
        talk.wire.send_headers(number, [("x-sum", "15")], end_stream=True)
        talk.flush()
        answer = await talk.whole(number)
        assert json.loads(answer.body)["size"] == 5
        assert "x-sum" not in answer.text.lower()


async def test_a_client_that_asks_before_it_sends(site: Site) -> None:
    async with site.talking() as talk:
        number = talk.begin("/echo", "POST", [("expect", "100-continue")], body=True)
        await talk.until(lambda: talk.answers[number].interim)
        await talk.send(number, b"12345", end=True)
        answer = await talk.whole(number)
        assert (answer.interim, answer.status, json.loads(answer.body)["size"]) == (["100"], 200, 5)


@pytest.mark.parametrize("status", [204, 304, 200])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_answers_without_a_body(site: Site, status: int, method: str) -> None:
    async with site.talking() as talk:
        answer = await talk.ask(f"/status/{status}", method)
        assert (answer.status, bytes(answer.body), answer.ended) == (status, b"", True)
        assert answer.headers["x-here"] == "yes"


async def test_head_tells_the_length(start: Start) -> None:
    node = await start()
    async with talking(node) as talk:
        whole, head = await talk.ask("/pods"), await talk.ask("/pods", "HEAD")
        assert (head.status, bytes(head.body)) == (200, b"")
        assert head.headers["content-length"] == whole.headers["content-length"] == str(len(whole.body))


@pytest.mark.parametrize("how", ["raise", "abort"])
async def test_an_answer_that_breaks_off_does_not_look_complete(site: Site, how: str) -> None:
    async with site.talking() as talk:
        answer = await talk.ask(f"/break/{how}")
        assert (answer.ended, answer.reset) == (False, ErrorCodes.INTERNAL_ERROR)
        # What was written is sent, unless the handler wanted an end at once.
        assert (answer.status, bytes(answer.body)) == ((200, b"so far") if how == "raise" else (0, b""))
        assert (await talk.ask("/echo")).status == 200


async def test_a_header_cannot_become_two(site: Site) -> None:
    async with site.talking() as talk:
        answer = await talk.ask("/no-header")
        assert "x-evil" not in answer.headers
        assert answer.status != 200


async def test_compressed_answers(site: Site) -> None:
    async with site.talking() as talk:
        answer = await talk.ask("/compressed", headers=[("accept-encoding", "gzip")])
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(answer.body) == b"again " * 100_000


GOOD = [(":method", "GET"), (":scheme", "https"), (":authority", "node"), (":path", "/echo")]


@pytest.mark.parametrize(
    "fields",
    [
        GOOD[1:],
        GOOD[:1] + GOOD[2:],
        GOOD[:3],
        [*GOOD[:3], (":path", "")],
        [*GOOD[:3], (":path", "echo")],
        [*GOOD[:3], (":path", "/echo HTTP/1.1\r\nx-more: 1\r\n")],
        [*GOOD[:3], (":path", "/echo x")],
        [*GOOD, (":path", "/echo")],
        [*GOOD, (":status", "200")],
        [*GOOD, (":protocol", "websocket")],
        [*GOOD, ("x", "1"), (":method", "GET")],
        [*GOOD, ("x", "1\r\ny: 2")],
        [*GOOD, ("x", "1\0")],
        [*GOOD, ("x y", "1")],
        [*GOOD, ("x:", "1")],
        [*GOOD, ("X", "1")],
        [*GOOD, ("", "1")],
        [(":method", "GET /evil"), *GOOD[1:]],
        [*GOOD[:1], (":scheme", "ftp"), *GOOD[2:]],
        [(":method", "CONNECT"), *GOOD[1:]],
        [*GOOD, ("content-length", "0"), ("content-length", "0")],
        [*GOOD, ("content-length", "3")],
    ],
)
async def test_what_is_no_request_ends_its_stream_only(site: Site, fields: list[tuple[str, str]]) -> None:
    async with site.talking() as talk:
        answer = await talk.ask("", pseudo=fields)
        assert (answer.reset, answer.status) == (ErrorCodes.PROTOCOL_ERROR, 0)
        assert (await talk.ask("/echo")).status == 200


@pytest.mark.parametrize(
    "header",
    [
        ("connection", "Upgrade"),
        ("upgrade", "SPDY/3.1"),
        ("transfer-encoding", "chunked"),
        ("keep-alive", "timeout=5"),
        ("te", "gzip"),
    ],
)
async def test_what_http2_does_not_have(start: Start, header: tuple[str, str]) -> None:
    """As the reference answers, whoever asks: exec and its like need HTTP/1.1."""
    node = await start()
    async with talking(node) as talk:
        answer = await talk.ask("/exec/default/web/main?output=1", "POST", headers=[header])
        assert (answer.status, answer.ended) == (400, True)
        assert header[0] in answer.text.lower()
        answer = await talk.ask("/healthz", "HEAD", headers=[header])
        assert (answer.status, answer.text, answer.ended) == (400, "", True)
        assert (await talk.ask("/healthz", headers=[("te", "trailers")])).status == 200
    assert node.runtime.asked == []


async def test_a_log_that_is_followed(start: Start) -> None:
    node = await start()
    write_log(node, f"{STAMP.format(5)} stdout F one")
    inflight = node.parts.metrics._inflight.labels("GET", "containerLogs", "readwrite", "false")
    async with talking(node) as talk:
        streams = [talk.begin("/containerLogs/default/web/main?follow=true") for _ in range(3)]
        first = [talk.answers[number] for number in streams]
        await talk.until(lambda: all(answer.text == "one\n" for answer in first))
        with node.runtime.log.open("a") as file:
            file.write(f"{STAMP.format(6)} stdout F two\n")
        await talk.until(lambda: all(answer.text == "one\ntwo\n" for answer in first))
        assert inflight._value.get() == 3
        talk.wire.reset_stream(streams[0], ErrorCodes.CANCEL)
        talk.flush()
        await eventually(lambda: inflight._value.get() == 2)
        # Requests go on beside it.
        assert (await talk.ask("/healthz")).status == 200
    # Whoever hangs up has no followers left.
    await eventually(lambda: inflight._value.get() == 0)
    await eventually(lambda: alive(Stream) == 0 and alive(Http2Connection) == 0)


def write_long_log(node: Node, lines: int = 40_000) -> str:
    texts = [f"line {number} {'x' * 200}" for number in range(lines)]
    write_log(node, *(f"{STAMP.format(5)} stdout F {text}" for text in texts))
    return "".join(f"{text}\n" for text in texts)


async def test_a_slow_reader_costs_no_memory_and_gets_everything(start: Start) -> None:
    node = await start()
    text = write_long_log(node)
    async with talking(node, window=20_000, takes=False) as talk:
        number = talk.begin("/containerLogs/default/web/main")
        answer = talk.answers[number]
        await talk.until(lambda: len(answer.body) == 20_000)
        # Others on the same connection need not wait for it.
        for _ in range(10):
            assert (await talk.ask("/healthz")).status == 200
        [stream] = [found for found in gc.get_objects() if isinstance(found, Stream) and not found.over]
        assert stream.size < 1024**2 < len(text) / 4
        assert len(answer.body) == 20_000
        talk.takes = True
        talk.wire.acknowledge_received_data(20_000, number)
        talk.flush()
        assert (await talk.whole(number)).text == text


async def test_a_client_that_does_not_read_is_not_read_either(start: Start) -> None:
    """Neither answers nor acknowledgements pile up."""
    node = await start()
    write_long_log(node)
    context = client_context(node.authority, node.clients["admin"]["pair"])
    context.set_alpn_protocols(["h2"])
    little = socket.socket()
    # So that the log does not fit between the two.
    little.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    little.connect(("127.0.0.1", node.port))
    _, writer = await asyncio.open_connection(
        sock=little, ssl=context, server_hostname="localhost", limit=1024
    )
    try:
        client = Client(asyncio.StreamReader(), writer, window=2**31 - 1, takes=False)
        client.wire.increment_flow_control_window(2**30)
        client.begin("/containerLogs/default/web/main")
        await eventually(lambda: any(connection._paused for connection in standing()))
        [connection] = standing()
        transport = connection.transport
        assert transport is not None
        for _ in range(2000):
            client.wire.ping(b"12345678")
            client.flush()
        await asyncio.sleep(0.1)
        assert transport.get_write_buffer_size() < 1024**2
    finally:
        writer.transport.abort()


async def test_answers_take_turns(start: Start) -> None:
    node = await start()
    write_long_log(node)
    async with talking(node, window=2**20) as talk:
        talk.wire.increment_flow_control_window(2**24)
        streams = [talk.begin("/containerLogs/default/web/main") for _ in range(4)]
        answers = [await talk.whole(number) for number in streams]
        assert len({bytes(answer.body) for answer in answers}) == 1
        assert all(answer.ended for answer in answers)


async def test_a_stream_that_is_reset_ends_its_handler(site: Site) -> None:
    async with site.talking() as talk:
        numbers = [talk.begin("/slow") for _ in range(20)]
        await eventually(lambda: site.slow.at_work == 20)
        for number in numbers[:15]:
            talk.wire.reset_stream(number, ErrorCodes.CANCEL)
        talk.flush()
        await eventually(lambda: (site.slow.at_work, site.slow.cancelled) == (5, 15))
        site.slow.release.set()
        answers = [await talk.whole(number) for number in numbers[15:]]
        assert [answer.text for answer in answers] == ["done"] * 5
        assert (await talk.ask("/echo")).status == 200


async def test_a_lost_connection_ends_its_handlers(site: Site) -> None:
    async with site.talking() as talk:
        for _ in range(10):
            talk.begin("/slow")
        body = talk.begin("/echo", "POST", body=True)
        await talk.send(body, b"half of it")
        await eventually(lambda: site.slow.at_work == 10)
        talk._writer.transport.abort()
        await eventually(lambda: (site.slow.at_work, site.slow.cancelled) == (0, 10))
    await eventually(lambda: alive(Stream) == 0 and alive(Http2Connection) == 0)


async def test_how_many_streams_there_may_be(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykubelet.server.http2.MOST_STREAMS_OF_ALL", 5)
    async with site.talking() as talk, site.talking() as other:
        await talk.ask("/echo")
        assert talk.wire.remote_settings.max_concurrent_streams == MOST_STREAMS
        assert talk.wire.remote_settings.max_header_list_size == 64 * 1024
        numbers = [talk.begin("/slow") for _ in range(4)] + [other.begin("/slow")]
        await eventually(lambda: site.slow.at_work == 5)
        # Everybody's places are taken; the client may try again.
        assert (await other.ask("/echo")).reset == ErrorCodes.REFUSED_STREAM
        site.slow.release.set()
        for number in numbers[:4]:
            assert (await talk.whole(number)).text == "done"
        await eventually(lambda: site.slow.at_work == 0)
        assert (await other.ask("/echo")).status == 200


async def test_more_streams_than_allowed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykubelet.server.http2_connection.MOST_STREAMS", 3)
    async with site.talking() as talk:
        numbers = [talk.begin("/slow") for _ in range(3)]
        # Sent before this side could know of the bound.
        late = talk.begin("/slow")
        assert (await talk.whole(late)).reset == ErrorCodes.REFUSED_STREAM
        site.slow.release.set()
        assert [(await talk.whole(number)).text for number in numbers] == ["done"] * 3


async def test_answers_that_nobody_takes_make_room(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykubelet.server.http2.MOST_STREAMS_OF_ALL", 5)
    async with site.talking(window=0) as stuck, site.talking() as other:
        for _ in range(5):
            number = stuck.begin("/echo")
            await stuck.until(lambda number=number: stuck.answers[number].status)
        assert (await other.ask("/echo")).status == 200
        await stuck.until(lambda: stuck.closed)


async def test_idle_connections_are_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 1.5)
    async with site.talking() as silent, site.talking() as busy, site.talking(window=0) as stuck:
        number = busy.begin("/slow")
        stuck.begin("/echo")
        await eventually(lambda: site.slow.at_work == 1)
        for talk in (silent, stuck):
            await talk.until(lambda talk=talk: talk.closed)
            assert talk.goodbye == ErrorCodes.NO_ERROR
        assert not busy.closed
        site.slow.release.set()
        assert (await busy.whole(number)).text == "done"
        await busy.until(lambda: busy.closed)


async def test_idle_connections_make_room(authority: Authority, pairs: dict[str, Pair]) -> None:
    async with site_of(authority, pairs, most=5) as site, AsyncExitStack() as stack:
        busy = await stack.enter_async_context(site.talking())
        number = busy.begin("/slow")
        await eventually(lambda: site.slow.at_work == 1)
        others = [await stack.enter_async_context(site.talking()) for _ in range(12)]
        assert (await others[-1].ask("/echo")).status == 200
        await eventually(lambda: sum(talk.closed for talk in others) >= 7)
        site.slow.release.set()
        assert (await busy.whole(number)).text == "done"


async def test_stopping_lets_answers_be_finished(authority: Authority, pairs: dict[str, Pair]) -> None:
    async with TaskScope() as scope, AsyncExitStack() as clients:
        serving = AsyncExitStack()
        site = await serving.enter_async_context(site_of(authority, pairs))
        try:
            talk = await clients.enter_async_context(site.talking())
            idle = await clients.enter_async_context(site.talking())
            assert (await idle.ask("/echo")).status == 200
            number = talk.begin("/slow")
            await eventually(lambda: site.slow.at_work == 1)
        finally:
            stopping = scope.start(serving.aclose(), name="stopping")
        await idle.until(lambda: idle.closed)
        await talk.until(lambda: talk.goodbye is not None)
        assert (talk.goodbye, idle.goodbye) == (ErrorCodes.NO_ERROR, ErrorCodes.NO_ERROR)
        site.slow.release.set()
        assert (await talk.whole(number)).text == "done"
        await talk.until(lambda: talk.closed)
        await stopping


async def test_stopping_does_not_wait_for_ever(authority: Authority, pairs: dict[str, Pair]) -> None:
    async with AsyncExitStack() as clients:
        async with site_of(authority, pairs) as site:
            for _ in range(2):
                talk = await clients.enter_async_context(site.talking())
                for _ in range(3):
                    talk.begin("/slow")
            await eventually(lambda: site.slow.at_work == 6)
            began = time.monotonic()
        assert time.monotonic() - began < 15
        assert (site.slow.at_work, site.slow.cancelled) == (0, 6)


async def test_a_client_that_says_goodbye_gets_its_answers(site: Site) -> None:
    async with site.talking() as talk:
        number = talk.begin("/slow")
        await eventually(lambda: site.slow.at_work == 1)
        talk.raw(GoAwayFrame(0, last_stream_id=0, error_code=0))
        site.slow.release.set()
        assert (await talk.whole(number)).text == "done"
        await talk.until(lambda: talk.closed)


async def test_settings_of_the_client_are_followed(site: Site) -> None:
    async with site.talking(window=100) as talk:
        talk.wire.update_settings({SettingCodes.MAX_FRAME_SIZE: 2**20, SettingCodes.HEADER_TABLE_SIZE: 2**30})
        talk.flush()
        for _ in range(20):
            assert (await talk.ask("/echo", headers=[("x", "y" * 500)])).status == 200
        [connection] = standing()
        # However much the client would remember for us.
        assert connection._wire.encoder.header_table_size == 4096


async def test_what_is_spoken(site: Site, authority: Authority) -> None:
    for offered, agreed in [
        (["h2", "http/1.1"], "h2"),
        (["http/1.1", "h2"], "h2"),
        (["http/1.1"], "http/1.1"),
        (["spdy/3"], None),
        ([], None),
    ]:
        context = client_context(authority)
        if offered:
            context.set_alpn_protocols(offered)
        reader, writer = await asyncio.open_connection("localhost", site.port, ssl=context)
        try:
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == agreed
            if agreed != "h2":
                writer.write(b"GET /status/204 HTTP/1.1\r\nHost: x\r\n\r\n")
                async with asyncio.timeout(PATIENCE_SECONDS):
                    assert b" 204 " in await reader.readline()
        finally:
            writer.close()


async def test_who_does_not_speak_what_was_agreed_on(site: Site, authority: Authority) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"PRI * HTTP/2.0\r\n\r\nXX" + b"\0" * 50):
        context = client_context(authority)
        context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection("localhost", site.port, ssl=context)
        try:
            writer.write(said)
            async with asyncio.timeout(PATIENCE_SECONDS):
                # Its settings, and a goodbye.
                assert len(await reader.read()) < 200
        finally:
            writer.close()


async def plain(port: int, data: bytes, path: str = "") -> bytes:
    reader, writer = await (
        asyncio.open_unix_connection(path) if path else asyncio.open_connection("127.0.0.1", port)
    )
    try:
        writer.write(data)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await reader.read()
    finally:
        writer.close()


async def test_other_servers_speak_http1_and_none_says_its_name(
    start: Start, tmp_path: Path, unused_tcp_port: int
) -> None:
    get = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with http_server("read-only", "127.0.0.1", unused_tcp_port, []):
        answers = [
            await plain(unused_tcp_port, get),
            await plain(unused_tcp_port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"),
            await plain(unused_tcp_port, b"nonsense\r\n\r\n"),
        ]
    async with unix_server(tmp_path / "s", []):
        answers.append(await plain(0, get, str(tmp_path / "s")))
    node = await start()
    for answer in answers:
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.0 400")), answer
        assert b"server" not in answer.lower()
        assert b"aiohttp" not in answer.lower()
    for path in ("/pods", "/nonsense"):
        _, _, headers = await node.ask(path)
        assert "Server" not in headers


async def curl(node: Node, *arguments: str) -> str:
    pair = node.clients["admin"]["pair"]
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "--http2", "--max-time", "60", "--cacert", str(node.authority.certificate)),
        *("--cert", str(pair.certificate), "--key", str(pair.key), *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def test_with_curl(start: Start, tmp_path: Path) -> None:
    node = await start()
    text = write_long_log(node)
    url = f"https://localhost:{node.port}"
    told = await curl(node, "-i", f"{url}/healthz")
    assert told.startswith("HTTP/2 200")
    assert told.endswith("\r\n\r\nok")
    assert (await curl(node, "-I", f"{url}/pods")).startswith("HTTP/2 200")
    assert await curl(node, f"{url}/containerLogs/default/web/main") == text
    assert await curl(node, "--limit-rate", "20M", f"{url}/containerLogs/default/web/main") == text
    (tmp_path / "body").write_bytes(b"x" * 400_000)
    assert "HTTP/2 422" in await curl(node, "-i", "-T", str(tmp_path / "body"), f"{url}/manifests/x")
    outputs = [tmp_path / str(number) for number in range(30)]
    many = [word for path in outputs for word in (f"{url}/configz", "-o", str(path))]
    await curl(node, "-Z", "--parallel-max", "30", *many)
    assert len({path.read_text() for path in outputs}) == 1


async def test_a_connection_without_credentials_stays_one(start: Start) -> None:
    node = await start()
    async with talking(node, "no credentials") as talk:
        token = [("authorization", f"Bearer {node.clients['admin token']['token']}")]
        statuses = [(await talk.ask("/pods", headers=headers)).status for headers in (token, [], token, [])]
        assert statuses == [200, 401, 200, 401]
