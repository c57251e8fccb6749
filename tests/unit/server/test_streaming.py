"""Streams handed on to a runtime's streaming server: byte for byte, in step with the slower side."""

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from multidict import MultiDict
from prometheus_client import CollectorRegistry

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.server.auth.identity import HttpError
from pykubelet.server.lookup import PodLookup
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.streams.streaming import StreamingEndpoints, StreamLimits, parse_ports
from pykubelet.server.streams.translator import RemoteCommandOptions
from pykubelet.transport.errors import from_status
from tests.support.certs import NAMES, Authority, Pair
from tests.support.pod_view import ScriptedView
from tests.support.streaming_door import UPGRADED, Door, FakeRuntime, doors, on_uvloop, saying


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("streaming"), "cluster")


@pytest.fixture(scope="session")
def pair(authority: Authority) -> Pair:
    return authority.sign("/CN=node", NAMES)


@pytest.fixture
async def opened(authority: Authority, pair: Pair) -> AsyncIterator[Callable[..., Any]]:
    async with doors(authority, pair) as start:
        yield start


EXEC = "/exec/default/web/main?command=sh&command=-c&command=a%20b%26&input=1&output=1&error=1"


async def test_exec_endpoint_bytes_pass_in_both_directions(opened: Callable[..., Any]) -> None:
    door = await opened()
    extra = "X-Stream-Protocol-Version: v4.channel.k8s.io\r\nX-Stream-Protocol-Version: v3.channel.k8s.io\r\n"
    secrets = "Authorization: Bearer secret\r\nCookie: secret\r\nX-Forwarded-For: secret\r\n"
    async with door.connection(EXEC, extra=extra + secrets) as (head, reader, writer):
        assert head.encode() == UPGRADED
        for data in (b"\0\xff", b"x" * 100_000, b"end"):
            writer.write(data)
            assert await reader.readexactly(len(data)) == data
    [request] = door.runtime.asked
    assert (request.container_id, list(request.cmd)) == ("c1", ["sh", "-c", "a b&"])
    assert (request.stdin, request.stdout, request.stderr, request.tty) == (True, True, True, False)
    [seen] = door.runtime.heads
    assert seen.startswith("POST /exec/token-7?x=y HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "secret" not in seen
    assert seen.count("X-Stream-Protocol-Version: ") == 2


async def test_exec_endpoint_websocket_token_not_forwarded(opened: Callable[..., Any]) -> None:
    door = await opened()
    extra = (
        "Sec-WebSocket-Protocol: base64url.bearer.authorization.k8s.io.c2VjcmV0, v4.channel.k8s.io\r\n"
        "Sec-WebSocket-Protocol: channel.k8s.io\r\nSec-WebSocket-Key: abc\r\nSec-WebSocket-Version: 13\r\n"
    )
    async with door.connection(EXEC, upgrade="websocket", method="GET", extra=extra) as (
        head,
        reader,
        writer,
    ):
        assert head.startswith("HTTP/1.1 101")
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
    [seen] = door.runtime.heads
    assert "Sec-WebSocket-Protocol: v4.channel.k8s.io, channel.k8s.io\r\n" in seen
    assert "c2VjcmV0" not in seen
    assert "Sec-WebSocket-Key: abc\r\n" in seen


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("/exec/default/web/main", {}, (400, "you must specify at least 1 of stdin, stdout, stderr")),
        ("/exec/default/nope/main?output=1", {}, (404, "pod does not exist")),
        ("/exec/other/web/main?output=1", {}, (404, "pod does not exist")),
        ("/exec/default/web/nope?output=1", {}, (500, 'container not found ("nope")')),
        ("/exec/default/web/u2/main?output=1", {}, (500, 'container not found ("main")')),
        ("/exec/default/web/main?output=1", {"upgrade": ""}, (500, "Upgrade request required\n")),
        ("/attach/default/web/main", {}, (400, "you must specify at least 1 of stdin, stdout, stderr")),
        ("/attach/default/web/nope?output=1", {}, (500, "container nope not found in pod web_default")),
        ("/portForward/default/nope", {}, (404, "pod does not exist")),
        ("/portForward/default/web/u2", {}, (404, "pod not found")),
        (
            "/portForward/default/web",
            {"upgrade": "websocket", "method": "GET"},
            (400, 'query parameter "port" is required'),
        ),
    ],
)
async def test_streaming_endpoints_invalid_request_returns_error(
    opened: Callable[..., Any], path: str, options: dict[str, Any], expected: tuple[int, str]
) -> None:
    door = await opened()
    assert await door.refusal(path, **options) == expected


@pytest.mark.parametrize(
    ("status", "code"),
    [("NOT_FOUND", 404), ("RESOURCE_EXHAUSTED", 429), ("INTERNAL", 500), ("UNAVAILABLE", 500)],
)
async def test_exec_endpoint_runtime_error_returns_http_status(
    opened: Callable[..., Any], status: str, code: int
) -> None:
    door = await opened()
    door.runtime.error = from_status("Exec", status, "that is how it is")
    got, text = await door.refusal(EXEC)
    assert got == code
    assert text.endswith("desc = that is how it is")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://evil/\r\n\r\n", (500, "answered with status 302")),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", (500, "answered with status 200")),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone", (404, "gone")),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", (403, "")),
        (b"HTTP/1.1 500 Oh\r\n\r\nno", (500, "no")),
        (b"garbage\r\n\r\n", (500, "answered with status 0")),
        (b"", (500, "did not answer")),
        (b"x" * 400_000, (500, "did not answer")),
    ],
)
async def test_exec_endpoint_streaming_server_bad_response_returns_error(
    opened: Callable[..., Any], answer: bytes, expected: tuple[int, str]
) -> None:
    door = await opened()
    door.runtime.play = saying(answer)
    status, text = await door.refusal(EXEC)
    assert status == expected[0]
    assert expected[1] in text
    assert "evil" not in text


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "ftp://x/", "nonsense", "unix:///run/x"])
async def test_exec_endpoint_streaming_server_unreachable_returns_500(
    opened: Callable[..., Any], url: str
) -> None:
    door = await opened()
    door.runtime.url = url
    status, text = await door.refusal(EXEC)
    assert status == 500
    assert text.startswith("the runtime's streaming server")


async def test_attach_and_port_forward_pass_options_to_runtime(opened: Callable[..., Any]) -> None:
    door = await opened()
    async with door.connection("/attach/default/web/mirror/main?input=1&output=1&error=1") as (head, _, _):
        assert head.startswith("HTTP/1.1 101")
    async with door.connection("/portForward/default/web/mirror") as (head, _, _):
        assert head.startswith("HTTP/1.1 101")
    path = "/portForward/default/web?port=80&port=90,100"
    async with door.connection(path, upgrade="websocket", method="GET") as (head, _, _):
        assert head.startswith("HTTP/1.1 101")
    attach, forward, ports = door.runtime.asked
    # The container was started with a terminal.
    assert (attach.container_id, attach.tty, attach.stderr, attach.stdin) == ("c1", True, False, True)
    assert (forward.pod_sandbox_id, list(forward.port)) == ("s1", [])
    assert list(ports.port) == [80, 90, 100]
    door.runtime.sandboxes = []
    assert await door.refusal("/portForward/default/web") == (500, 'pod not found ("web_default")')


async def test_port_forward_sandboxes_of_other_pods_are_not_used(opened: Callable[..., Any]) -> None:
    """Verify that a forwarded port leads into the pod's own sandbox, not into the newest of the node."""
    door = await opened()
    for number, uid in enumerate(("u2", "", "node")):
        labels = {"io.kubernetes.pod.uid": uid}
        door.runtime.sandboxes.append(pb.PodSandbox(id=f"other{number}", created_at=9, labels=labels))
    async with door.connection("/portForward/default/web") as (head, _, _):
        assert head.startswith("HTTP/1.1 101")
    [request] = door.runtime.asked
    assert request.pod_sandbox_id == "s1"
    door.runtime.sandboxes = door.runtime.sandboxes[1:]
    assert await door.refusal("/portForward/default/web") == (500, 'pod not found ("web_default")')


async def test_pass_through_refusal_closes_connection_to_runtime(opened: Callable[..., Any]) -> None:
    """Verify that no connection is left on which requests would pass unchecked (CVE-2018-1002105)."""
    door = await opened()
    closed = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
        assert await reader.read() == b"", "nothing passes"
        closed.set()

    door.runtime.play = refuse
    async with door.connection(EXEC) as (head, _, writer):
        assert head.startswith("HTTP/1.1 403")
        writer.write(b"GET /exec/token-8 HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(30):
            await closed.wait()


async def test_exec_endpoint_one_side_ends_other_side_closed(opened: Callable[..., Any]) -> None:
    door = await opened()
    ended = asyncio.Event()

    async def until_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED)
        await reader.read()
        ended.set()

    door.runtime.play = until_end
    async with door.connection(EXEC) as (_, _, writer):
        writer.write(b"some")
    async with asyncio.timeout(30):
        await ended.wait()
    door.runtime.play = saying(UPGRADED + b"last words")
    async with door.connection(EXEC) as (_, reader, _):
        assert await reader.read() == b"last words"


async def test_exec_endpoint_client_disconnects_during_output_runtime_closed(
    opened: Callable[..., Any],
) -> None:
    door = await opened()
    over = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED)
        try:
            while True:
                writer.write(b"z" * 65536)
                await writer.drain()
        except ConnectionError:
            over.set()

    door.runtime.play = flood
    async with door.connection(EXEC) as (_, reader, writer):
        await reader.readexactly(100_000)
        writer.transport.abort()
    async with asyncio.timeout(30):
        await over.wait()


async def test_exec_endpoint_idle_stream_is_closed(opened: Callable[..., Any]) -> None:
    door = await opened(idle_seconds=0.2)
    async with door.connection(EXEC) as (_, reader, _):
        assert await reader.read() == b""


async def test_exec_endpoint_client_not_reading_closed_as_idle(opened: Callable[..., Any]) -> None:
    door = await opened(idle_seconds=0.5)
    over = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED)
        try:
            while True:
                writer.write(b"z" * 65536)
                await writer.drain()
        except ConnectionError:
            over.set()

    door.runtime.play = flood
    async with door.connection(EXEC), asyncio.timeout(30):
        await over.wait()


async def test_exec_endpoint_slow_client_bounded_buffers(opened: Callable[..., Any]) -> None:
    door = await opened()
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(UPGRADED)
        for _ in range(4000):
            writer.write(b"z" * 65536)
            await writer.drain()
            sent += 65536

    door.runtime.play = flood
    async with door.connection(EXEC) as (_, reader, _):
        before, stalled = -1, 0
        while stalled < 5:
            stalled = stalled + 1 if sent == before else 0
            before = sent
            await asyncio.sleep(0.05)
        # Buffers of sockets and of TLS on the way, no more.
        assert sent < 40_000_000
        left = 4000 * 65536
        while left:
            left -= len(await reader.read(2**20))


async def test_exec_endpoint_slow_container_bounded_buffers(opened: Callable[..., Any]) -> None:
    door = await opened()
    go_on, total = asyncio.Event(), 1000 * 65536

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED)
        await go_on.wait()
        left = total
        while left:
            left -= len(await reader.read(2**20))
        writer.write(b"all")

    door.runtime.play = slow
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with door.connection(EXEC) as (_, reader, writer):
        sent = 0

        async def send() -> None:
            nonlocal sent
            while sent < total:
                writer.write(b"y" * 65536)
                await writer.drain()
                sent += 65536

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            before, stalled = -1, 0
            while stalled < 5:
                stalled = stalled + 1 if sent == before else 0
                before = sent
                await asyncio.sleep(0.05)
            assert sent < 40_000_000
            go_on.set()
            assert await reader.readexactly(3) == b"all"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 60_000


@pytest.mark.parametrize(
    "test",
    [
        test_exec_endpoint_bytes_pass_in_both_directions,
        test_exec_endpoint_one_side_ends_other_side_closed,
        test_exec_endpoint_client_disconnects_during_output_runtime_closed,
        test_exec_endpoint_idle_stream_is_closed,
        test_exec_endpoint_client_not_reading_closed_as_idle,
        test_exec_endpoint_slow_client_bounded_buffers,
        test_exec_endpoint_slow_container_bounded_buffers,
    ],
)
def test_exec_endpoint_on_uvloop_same_behaviour(
    authority: Authority, pair: Pair, test: Callable[[Callable[..., Any]], Awaitable[None]]
) -> None:
    on_uvloop(authority, pair, test)


async def test_exec_endpoint_too_many_streams_returns_429(opened: Callable[..., Any]) -> None:
    door = await opened(limits=StreamLimits(max_streams=9, max_per_user=2))
    async with door.connection(EXEC), door.connection(EXEC) as (head, _, _):
        assert head.startswith("HTTP/1.1 101")
        assert (await door.refusal(EXEC))[0] == 429
    async with asyncio.timeout(30):
        while (await _status(door)) != 101:
            await asyncio.sleep(0.01)


async def _status(door: Door) -> int:
    async with door.connection(EXEC) as (head, _, _):
        return int(head.split()[1])


def test_stream_limits_total_and_per_user_enforced() -> None:
    limits = StreamLimits(max_streams=3, max_per_user=2)
    with limits.acquire("a"), limits.acquire("a"):
        with pytest.raises(HttpError), limits.acquire("a"):
            pytest.fail("too many of one")
        with limits.acquire("b"), pytest.raises(HttpError), limits.acquire("c"):
            pytest.fail("too many")
    with limits.acquire("a"), limits.acquire("a"):
        pass


@pytest.mark.parametrize(
    ("query", "wish"),
    [
        ({"input": "1"}, RemoteCommandOptions(True, False, False, False)),
        ({"output": "1", "error": "1", "tty": "1"}, RemoteCommandOptions(False, True, False, True)),
        ({"output": "true", "error": "1"}, RemoteCommandOptions(False, False, True, False)),
    ],
)
def test_remote_command_options_from_query_parsed(query: dict[str, str], wish: RemoteCommandOptions) -> None:
    assert RemoteCommandOptions.from_query(query) == wish


def test_parse_ports_thousands_of_digits_rejected() -> None:
    with pytest.raises(HttpError) as caught:
        parse_ports(MultiDict({"port": "9" * 5000}))
    assert caught.value.status == 400


@given(st.lists(st.text(max_size=8), max_size=3))
def test_parse_ports_any_values_returns_valid_ports_or_raises(values: list[str]) -> None:
    try:
        ports = parse_ports(MultiDict(("port", value) for value in values))
    except HttpError:
        return
    assert ports
    assert all(0 < port < 65536 for port in ports)


def test_streaming_endpoints_routes_are_get_and_post_only() -> None:
    metrics = ServerMetrics(CollectorRegistry())
    streams = StreamingEndpoints(
        PodLookup(ScriptedView(), FakeRuntime(), str),
        StreamLimits(),
        metrics,
        idle_seconds=1,
        translate_websockets=True,
    )
    assert {route.method for route in streams.routes()} == {"GET", "POST"}
    assert all(isinstance(route, web.RouteDef) for route in streams.routes())
