"""WebSocket clients translated to a runtime's SPDY streams, both on real sockets."""

import asyncio
import base64
import hashlib
import json
import os
import resource
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pykubelet.server.streams.translator import (
    MAX_FRAMES_PER_TURN,
    RemoteCommandOptions,
    terminal_size,
    translated_status,
)
from tests.support.certs import NAMES, Authority, Pair
from tests.support.spdy_runtime import SUCCESS, SpdyPeer, command
from tests.support.streaming_door import Door, doors, on_uvloop, saying
from tests.support.websocket_client import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    WebSocketClient,
    client_frame,
)

EXEC = "/exec/default/web/main?command=sh&input=1&output=1&error=1"
TTY = "/exec/default/web/main?command=sh&input=1&output=1&tty=1"
PORTS = "/portForward/default/web"
V5 = "v5.channel.k8s.io"
TUNNEL = "SPDY/3.1+portforward.k8s.io"
STREAMS = ("error", "stdin", "stdout", "stderr")
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPTED = "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("translator"), "cluster")


@pytest.fixture(scope="session")
def pair(authority: Authority) -> Pair:
    return authority.sign("/CN=node", NAMES)


@pytest.fixture
async def opened(authority: Authority, pair: Pair) -> AsyncIterator[Callable[..., Any]]:
    async with doors(authority, pair) as start:
        yield start


def headers(*protocols: str, version: str = "13", key: str = KEY) -> str:
    lines = [f"Sec-WebSocket-Version: {version}", f"Sec-WebSocket-Protocol: {', '.join(protocols)}"]
    return "".join(f"{line}\r\n" for line in [*lines, *([f"Sec-WebSocket-Key: {key}"] if key else [])])


@asynccontextmanager
async def websocket(door: Door, path: str = EXEC, *protocols: str) -> AsyncIterator[WebSocketClient]:
    options = {"upgrade": "websocket", "method": "GET", "extra": headers(*(protocols or (V5,)))}
    async with door.connection(path, **options) as (head, reader, writer), asyncio.timeout(60):
        assert head.startswith("HTTP/1.1 101"), head
        assert ACCEPTED in head
        assert f"Sec-WebSocket-Protocol: {(protocols or (V5,))[0]}\r\n" in head
        yield WebSocketClient(reader, writer)


async def echo(peer: SpdyPeer) -> None:
    """Wait for the end of the input, then send it back on both outputs."""
    await peer.read_until(lambda: "stdin" in peer.ended)
    await peer.send("stdout", bytes(peer.received.get("stdin", b"")), last=True)
    await peer.send("stderr", b"to stderr", last=True)
    await peer.finish()


async def test_translator_exec_input_output_and_status(opened: Callable[..., Any]) -> None:
    door = await opened()
    door.runtime.play = command(echo, *STREAMS)
    data = os.urandom(300_000)
    async with websocket(door, EXEC, V5, "v4.channel.k8s.io") as client:
        assert await client.receive() == (BINARY, b"\x01"), "the client learns that it is connected"
        for start in range(0, len(data), 70_000):
            await client.send(b"\x00" + data[start : start + 70_000])
        await client.send(b"\xff\x00")
        channels = await client.collect()
        assert await client.reader.read() == b""
    assert channels == {1: data, 2: b"to stderr", 3: SUCCESS}
    [head] = door.runtime.heads
    assert head.startswith("POST /exec/token-7?x=y HTTP/1.1\r\n")
    assert "X-Stream-Protocol-Version: v4.channel.k8s.io\r\n" in head
    assert "websocket" not in head.lower()
    sample = door.registry.get_sample_value(
        "kubelet_websocket_streaming_requests_total", {"subresource": "exec"}
    )
    assert sample == 1


async def test_translator_fragments_text_and_empty_messages_forwarded(opened: Callable[..., Any]) -> None:
    door = await opened()
    door.runtime.play = command(echo, *STREAMS)
    async with websocket(door) as client:
        client.writer.write(
            client_frame(BINARY)
            + client_frame(BINARY, b"", fin=False)
            + client_frame(CONTINUATION, b"\x00", fin=False)
            + client_frame(PING, b"between")
            + client_frame(CONTINUATION, b"one ", fin=False)
            + client_frame(CONTINUATION, b"two ")
            + client_frame(TEXT, b"\x00three")
            # Not for the runtime: outputs, the error channel, sizes without a terminal, unknown channels.
            + b"".join(client_frame(BINARY, bytes((channel,)) + b"no") for channel in (1, 2, 3, 4, 5, 254))
            + client_frame(BINARY, b"\xff\x01")
            + client_frame(BINARY, b"\xff\x00")
            + client_frame(BINARY, b"\x00after its end")
        )
        frames = [await client.receive(), await client.receive()]
        assert (PONG, b"between") in frames
        channels = await client.collect()
    assert channels[1] == b"one two three"


async def test_translator_tty_sizes_of_a_flood_only_the_last_counts(opened: Callable[..., Any]) -> None:
    door = await opened()
    flood = 20_000
    sizes: list[bytes] = []

    async def resized(peer: SpdyPeer) -> None:
        await peer.read_until(lambda: b'"Width":%d,' % flood in peer.received.get("resize", b""))
        sizes.extend(bytes(peer.received["resize"]).splitlines())
        await peer.finish()

    door.runtime.play = command(resized, "error", "stdin", "stdout", "resize")
    async with websocket(door, TTY) as client:
        client.writer.write(client_frame(BINARY, b"\x04nonsense"))
        for number in range(1, flood + 1):
            client.writer.write(client_frame(BINARY, b'\x04{"Width":%d,"Height":3}' % number))
        await client.writer.drain()
        assert (await client.collect())[3] == SUCCESS
    assert sizes[-1] == b'{"Width":%d,"Height":3}' % flood
    # One for each turn of the event loop, not one for each message.
    assert len(sizes) <= flood // MAX_FRAMES_PER_TURN * 5
    assert all(json.loads(size)["Height"] == 3 for size in sizes)


async def test_translator_attach_tty_container_opens_resize_not_stderr(
    opened: Callable[..., Any],
) -> None:
    door = await opened()

    async def ends(peer: SpdyPeer) -> None:
        await peer.send("stdout", b"hello")
        await peer.finish()

    door.runtime.play = command(ends, "error", "stdout", "resize")
    async with websocket(door, "/attach/default/web/main?output=1&error=1") as client:
        assert await client.collect() == {1: b"hello", 3: SUCCESS}
    [request] = door.runtime.asked
    assert (request.tty, request.stderr, request.stdin) == (True, False, False)


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (client_frame(BINARY, length=2**30), 1009),
        (client_frame(BINARY, b"\x00x", masked=False), 1002),
        (client_frame(CONTINUATION, b"\x00x"), 1002),
        (client_frame(BINARY, b"\xff"), 1002),
        (client_frame(BINARY, b"\xff\x00\x00"), 1002),
        (client_frame(BINARY, b"\xff\x05"), 1002),
        (client_frame(CLOSE, b"\x03\xe8"), 1000),
    ],
    # The frames have random masks.
    ids=["large", "unmasked", "continuation", "no-channel", "long-signal", "unknown-channel", "close"],
)
async def test_translator_invalid_or_close_frame_closed_with_code(
    opened: Callable[..., Any], wire: bytes, code: int
) -> None:
    door = await opened()
    closed = asyncio.Event()

    async def until_end(peer: SpdyPeer) -> None:
        await peer.read_until(lambda: False)
        assert bytes(peer.received["stdin"]) == b"before"
        closed.set()

    door.runtime.play = command(until_end, *STREAMS)
    async with websocket(door) as client:
        client.writer.write(client_frame(BINARY, b"\x00before") + wire)
        assert (await client.receive_close())[0] == code
        await closed.wait()


async def test_translator_huge_frame_payload_discarded_client_reads_close(opened: Callable[..., Any]) -> None:
    """Verify that a client that goes on sending still receives the Close frame, and nothing is buffered."""
    door = await opened()
    door.runtime.play = command(echo, *STREAMS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with websocket(door) as client:
        client.writer.write(client_frame(BINARY, length=2**30))

        async def send() -> None:
            while True:
                client.writer.write(b"x" * 65536)
                await client.writer.drain()

        sending = asyncio.create_task(send())
        try:
            assert (await client.receive_close())[0] == 1009
        finally:
            sending.cancel()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 60_000


async def test_translator_client_disconnects_runtime_closed(opened: Callable[..., Any]) -> None:
    door = await opened()
    over = asyncio.Event()

    async def flood(peer: SpdyPeer) -> None:
        try:
            while True:
                await peer.send("stdout", b"z" * 65536)
        except ConnectionError:
            over.set()

    door.runtime.play = command(flood, *STREAMS)
    async with websocket(door) as client:
        await client.reader.readexactly(100_000)
        client.writer.transport.abort()
        await over.wait()


@pytest.mark.parametrize("parting", [b"", struct.pack(">HHI", 0x8003, 6, 2**20)])
async def test_translator_runtime_dies_without_status_reported_as_failure(
    opened: Callable[..., Any], parting: bytes
) -> None:
    door = await opened()

    async def dies(peer: SpdyPeer) -> None:
        await peer.send("stdout", b"some")
        peer.writer.write(parting)
        await peer.writer.drain()

    door.runtime.play = command(dies, *STREAMS)
    async with websocket(door) as client:
        channels = await client.collect()
    assert channels[1] == b"some"
    status = json.loads(channels[3])
    assert (status["status"], status["reason"], status["code"]) == ("Failure", "InternalError", 500)
    assert "the connection ended before the command did" in status["message"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone", "unable to upgrade connection: gone"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://evil/\r\n\r\n", "unable to upgrade connection: status 302"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "does not implement v4.channel.k8s.io"),
        (b"", "the runtime's streaming server did not answer"),
    ],
)
async def test_translator_runtime_rejects_upgrade_reported_on_error_channel(
    opened: Callable[..., Any], answer: bytes, says: str
) -> None:
    door = await opened()
    door.runtime.play = saying(answer)
    async with websocket(door) as client:
        channels = await client.collect()
    assert says in json.loads(channels[3])["message"]
    assert b"evil" not in channels[3]


@pytest.mark.parametrize(
    ("path", "extra", "method", "status"),
    [
        (EXEC, headers(V5, version="8"), "GET", 400),
        (EXEC, headers(V5, key=""), "GET", 400),
        (EXEC, headers(V5), "POST", 405),
        (PORTS, headers(TUNNEL, version="8"), "GET", 400),
        (PORTS, headers(TUNNEL), "POST", 405),
    ],
)
async def test_translator_invalid_handshake_returns_http_error(
    opened: Callable[..., Any], path: str, extra: str, method: str, status: int
) -> None:
    door = await opened()
    assert (await door.refusal(path, upgrade="websocket", method=method, extra=extra))[0] == status


async def test_translator_gate_disabled_websocket_proxied_unparsed(opened: Callable[..., Any]) -> None:
    door = await opened(translate_websockets=False)
    options = {"upgrade": "websocket", "method": "GET", "extra": headers(V5)}
    async with door.connection(EXEC, **options) as (_, reader, writer):
        writer.write(b"as it is")
        assert await reader.readexactly(8) == b"as it is"
    assert "Upgrade: websocket" in door.runtime.heads[0]
    assert "Sec-WebSocket-Protocol: v5.channel.k8s.io" in door.runtime.heads[0]
    tunnel = {"upgrade": "websocket", "method": "GET", "extra": headers(TUNNEL)}
    assert await door.refusal(PORTS, **tunnel) == (400, 'query parameter "port" is required')
    name = "kubelet_websocket_streaming_requests_total"
    assert door.registry.get_sample_value(name, {"subresource": "exec"}) is None


async def test_translator_idle_stream_closed_although_client_pings(opened: Callable[..., Any]) -> None:
    door = await opened(idle_seconds=0.5)
    ended = asyncio.Event()

    async def waits(peer: SpdyPeer) -> None:
        await peer.read_until(lambda: False)
        ended.set()

    door.runtime.play = command(waits, *STREAMS)
    async with websocket(door) as client:

        async def ping() -> None:
            while True:
                await client.send(b"", PING)
                await asyncio.sleep(0.05)

        pinging = asyncio.create_task(ping())
        try:
            assert await client.receive_close() == (1001, "the stream was idle for too long")
            await ended.wait()
        finally:
            pinging.cancel()


async def test_translator_client_never_reads_bounded_and_closed_as_idle(opened: Callable[..., Any]) -> None:
    """Verify that neither output nor pongs pile up for a client that only sends pings."""
    door = await opened(idle_seconds=2)
    sent, over = 0, asyncio.Event()

    async def flood(peer: SpdyPeer) -> None:
        nonlocal sent
        try:
            while True:
                await peer.send("stdout", b"z" * 65536)
                sent += 65536
        except ConnectionError:
            over.set()

    door.runtime.play = command(flood, *STREAMS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with websocket(door) as client:
        pings = client_frame(PING, b"p" * 125) * 500
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        while not over.is_set():
            try:
                client.writer.write(pings)
                await asyncio.wait_for(client.writer.drain(), 5)
            except (ConnectionError, TimeoutError):
                break
            await asyncio.sleep(0)
        await over.wait()
    assert sent < 40_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 80_000


async def test_translator_slow_client_gets_all_in_order(opened: Callable[..., Any]) -> None:
    door = await opened()
    total, sent = 60_000_000, 0

    async def flood(peer: SpdyPeer) -> None:
        nonlocal sent
        for number in range(total // 60_000):
            await peer.send("stdout", struct.pack(">I", number) * 15_000)
            sent += 60_000
        await peer.finish()

    door.runtime.play = command(flood, *STREAMS)
    async with websocket(door) as client:
        before, stalled = -1, 0
        while stalled < 5:
            stalled = stalled + 1 if sent == before else 0
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 40_000_000, "the output waits for the client"
        channels = await client.collect()
    expected = b"".join(struct.pack(">I", number) * 15_000 for number in range(total // 60_000))
    assert channels[1] == expected
    assert channels[3] == SUCCESS


async def test_translator_command_does_not_read_input_waits(opened: Callable[..., Any]) -> None:
    door = await opened()
    go_on, total = asyncio.Event(), 60_000_000

    async def slow(peer: SpdyPeer) -> None:
        await go_on.wait()
        await peer.read_until(lambda: "stdin" in peer.ended)
        await peer.send("stdout", b"%d" % len(peer.received["stdin"]))
        await peer.finish()

    door.runtime.play = command(slow, *STREAMS)
    async with websocket(door) as client:
        sent = 0

        async def send() -> None:
            nonlocal sent
            while sent < total:
                await client.send(b"\x00" + b"y" * 60_000)
                sent += 60_000
            await client.send(b"\xff\x00")

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            before, stalled = -1, 0
            while stalled < 5:
                stalled = stalled + 1 if sent == before else 0
                before = sent
                await asyncio.sleep(0.05)
            assert sent < 40_000_000, "the input waits for the command"
            go_on.set()
            channels = await client.collect()
    assert channels[1] == b"%d" % total


async def test_translator_tiny_frames_of_container_other_work_goes_on(opened: Callable[..., Any]) -> None:
    """Verify that frames of one byte are merged, and parsed by turns that leave the loop to others."""
    door = await opened()
    total = 100_000

    async def drops(peer: SpdyPeer) -> None:
        frame = struct.pack(">II", peer.streams["stdout"], 1) + b"."
        peer.writer.write(frame * total)
        await peer.writer.drain()
        await peer.ping()
        await peer.finish()

    door.runtime.play = command(drops, *STREAMS)
    async with websocket(door) as client:
        frames, received = 0, 0
        while True:
            opcode, payload = await client.receive()
            if opcode == CLOSE:
                break
            if payload[0] == 1:
                frames += 1
                received += len(payload) - 1
    assert received == total
    assert frames < total / 50


async def test_translator_command_ends_while_client_sends_status_received(
    opened: Callable[..., Any],
) -> None:
    door = await opened()

    async def exits(peer: SpdyPeer) -> None:
        await peer.read_until(lambda: bool(peer.received))
        await peer.finish(
            b'{"status":"Failure","reason":"NonZeroExitCode","details":{"causes":[{"reason":'
            b'"ExitCode","message":"42"}]}}'
        )

    door.runtime.play = command(exits, *STREAMS)
    async with websocket(door) as client:

        async def send() -> None:
            with pytest.raises(ConnectionError):
                while True:
                    await client.send(b"\x00" + b"y" * 60_000)

        sending = asyncio.create_task(send())
        channels = await client.collect()
        client.writer.close()
        await sending
    assert json.loads(channels[3])["details"]["causes"] == [{"reason": "ExitCode", "message": "42"}]


async def test_translator_client_sends_many_frames_and_disconnects_all_input_forwarded(
    opened: Callable[..., Any],
) -> None:
    """Verify that frames left for later turns are not lost when the request is cancelled."""
    door = await opened()
    total, started, over = 20 * MAX_FRAMES_PER_TURN, asyncio.Event(), asyncio.Event()
    received = b""

    async def reads(peer: SpdyPeer) -> None:
        nonlocal received
        started.set()
        await peer.read_until(lambda: False)
        received = bytes(peer.received.get("stdin", b""))
        over.set()

    door.runtime.play = command(reads, *STREAMS)
    async with websocket(door) as client:
        await started.wait()
        client.writer.write(b"".join(client_frame(BINARY, b"\x00%c" % (n % 256)) for n in range(total)))
        await client.writer.drain()
        client.writer.close()
        await over.wait()
    assert received == bytes(n % 256 for n in range(total))


@pytest.mark.parametrize(("path", "protocol"), [(EXEC, V5), (PORTS, TUNNEL)])
async def test_translator_key_not_utf8_accepted(opened: Callable[..., Any], path: str, protocol: str) -> None:
    door = await opened()
    door.runtime.play = saying(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
        b"X-Stream-Protocol-Version: portforward.k8s.io\r\n\r\n"
    )
    extra = headers(protocol, key="\udcff\udcfe")
    async with door.connection(path, upgrade="websocket", method="GET", extra=extra) as (head, _, _):
        assert head.startswith("HTTP/1.1 101"), head
        key = base64.b64encode(hashlib.sha1(b"\xff\xfe258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        assert f"Sec-WebSocket-Accept: {key.decode()}\r\n" in head


async def test_tunnel_bytes_pass_in_both_directions(opened: Callable[..., Any]) -> None:
    door = await opened()

    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
            b"X-Stream-Protocol-Version: portforward.k8s.io\r\n\r\nfirst "
        )
        while data := await reader.read(65536):
            writer.write(data.upper())
            await writer.drain()
            if data.endswith(b"end"):
                return

    door.runtime.play = upper
    async with websocket(door, PORTS, TUNNEL) as client:
        client.writer.write(client_frame(BINARY, b"one ", fin=False) + client_frame(CONTINUATION, b"two "))
        await client.send(b"x" * 100_000 + b" end")
        received = b""
        while True:
            opcode, payload = await client.receive()
            if opcode == CLOSE:
                break
            received += payload
        assert payload == b"\x03\xe8"
    assert received == b"first ONE TWO " + b"X" * 100_000 + b" END"
    [head] = door.runtime.heads
    assert head.startswith("POST ")
    assert "X-Stream-Protocol-Version: portforward.k8s.io\r\n" in head
    assert list(door.runtime.asked[0].port) == []


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (client_frame(TEXT, b"x"), 1003),
        (client_frame(BINARY, length=2**30), 1009),
        (client_frame(CLOSE), 1000),
    ],
    ids=["text", "large", "close"],
)
async def test_tunnel_invalid_or_close_frame_closed_with_code(
    opened: Callable[..., Any], wire: bytes, code: int
) -> None:
    door = await opened()
    closed = asyncio.Event()

    async def until_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
            b"X-Stream-Protocol-Version: portforward.k8s.io\r\n\r\n"
        )
        await reader.read()
        closed.set()

    door.runtime.play = until_end
    async with websocket(door, PORTS, TUNNEL) as client:
        client.writer.write(wire)
        assert (await client.receive_close())[0] == code
        await closed.wait()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone", (404, "gone")),
        (
            b"HTTP/1.1 101 Switching\r\n\r\n",
            (500, "unable to upgrade: missing upgrade headers in response\n"),
        ),
    ],
)
async def test_tunnel_runtime_rejects_upgrade_returns_http_error(
    opened: Callable[..., Any], answer: bytes, expected: tuple[int, str]
) -> None:
    door = await opened()
    door.runtime.play = saying(answer)
    options = {"upgrade": "websocket", "method": "GET", "extra": headers(TUNNEL)}
    assert await door.refusal(PORTS, **options) == expected


@pytest.mark.parametrize(
    "test",
    [
        test_translator_exec_input_output_and_status,
        test_translator_client_disconnects_runtime_closed,
        test_translator_client_sends_many_frames_and_disconnects_all_input_forwarded,
        test_translator_client_never_reads_bounded_and_closed_as_idle,
        test_translator_slow_client_gets_all_in_order,
        test_translator_command_does_not_read_input_waits,
        test_translator_tiny_frames_of_container_other_work_goes_on,
        test_translator_command_ends_while_client_sends_status_received,
        test_tunnel_bytes_pass_in_both_directions,
    ],
)
def test_translator_on_uvloop_same_behaviour(
    authority: Authority, pair: Pair, test: Callable[[Callable[..., Any]], Awaitable[None]]
) -> None:
    on_uvloop(authority, pair, test)


def test_remote_command_options_channels_in_order_of_opening() -> None:
    assert list(RemoteCommandOptions(True, True, True, False).channels().values()) == list(STREAMS)
    assert list(RemoteCommandOptions(False, True, False, True).channels()) == [3, 1, 4]


@pytest.mark.parametrize(
    ("document", "size"),
    [
        (b'{"Width":80,"Height":24}\n', b'{"Width":80,"Height":24}\n'),
        (b'{"width":80}', b'{"Width":80,"Height":0}\n'),
        (b'{"Width":65536,"Height":24}', b""),
        (b'{"Width":-1,"Height":24}', b""),
        (b'{"Width":"80"}', b""),
        (b"[" * 200, b""),
        (b"", b""),
    ],
)
def test_terminal_size_valid_or_empty(document: bytes, size: bytes) -> None:
    assert terminal_size(document) == size


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (b'{"metadata":{},"status":"Success"}', {"metadata": {}, "status": "Success"}),
        (
            b'{"status":"Failure","message":"x","reason":"NonZeroExitCode",'
            b'"details":{"causes":[{"reason":"ExitCode","message":"3"}]}}',
            {
                "metadata": {},
                "status": "Failure",
                "message": "command terminated with non-zero exit code: command terminated with exit code 3",
                "reason": "NonZeroExitCode",
                "details": {"causes": [{"reason": "ExitCode", "message": "3"}]},
            },
        ),
        (
            b'{"status":"Failure","message":"no such container","reason":"InternalError"}',
            {
                "metadata": {},
                "status": "Failure",
                "message": "Internal error occurred: no such container",
                "reason": "InternalError",
                "details": {"causes": [{"message": "no such container"}]},
                "code": 500,
            },
        ),
    ],
)
def test_translated_status_same_as_upstream(document: bytes, expected: dict[str, Any]) -> None:
    assert json.loads(translated_status(document)) == expected
