"""The wire below the calls: large requests, impolite servers, and bytes that are no HTTP/2 at all."""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any, cast

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.transport import http2
from pykubelet.transport.grpc_connection import Call, Connection, Status, grpc_timeout
from pykubelet.transport.http2 import FrameType, Setting, frame
from tests.support.cri_servers import Runtime

MESSAGE = struct.pack(">?L", False, 5) + b"hello"


class Wire:
    """What a connection writes; the test is the server."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Take what was written since the last time: kind, flags, stream, payload."""
        data, self.written = bytes(self.written).removeprefix(http2.PREFACE), bytearray()
        found, at = [], 0
        while at < len(data):
            size, kind, flags, stream = http2.read_head(data, at)
            at += http2.HEAD_BYTES
            found.append((kind, flags, stream, data[at : at + size]))
            at += size
        return found


class Server:
    """The other end of a connection, by hand."""

    def __init__(self, *, greets: bool = True) -> None:
        self.wire = Wire()
        self.connection = Connection("here", 1000)
        self.connection.connection_made(cast(Any, self.wire))
        self.encoder = hpack.Encoder()
        if greets:
            self.send(http2.settings({}))
        self.wire.frames()

    def send(self, *frames: bytes) -> None:
        self.connection.data_received(b"".join(frames))

    def headers(self, *pairs: tuple[str, str]) -> bytes:
        return self.encoder.encode(pairs)

    def good_answer(self, stream: int, message: bytes = MESSAGE) -> list[bytes]:
        begin = self.headers((":status", "200"), ("content-type", "application/grpc"))
        end = self.headers(("grpc-status", "0"))
        return [
            frame(FrameType.HEADERS, http2.END_HEADERS, stream, begin),
            frame(FrameType.DATA, 0, stream, message),
            frame(FrameType.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, end),
        ]


async def outcome(call: Call) -> tuple[bytes | None, Status | None]:
    async with asyncio.timeout(30):
        return await call.wait_response(), call.status


async def test_call_request_headers_and_response_in_single_bytes() -> None:
    server = Server()
    call = server.connection.call("/a.B/C", b"ask", [("x-more", "1" * 200)], timeout=1.5)
    (headers, data) = server.wire.frames()
    assert dict(cast(Any, hpack.Decoder().decode(headers[3]))) == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/a.B/C",
        ":authority": "here",
        "content-type": "application/grpc",
        "te": "trailers",
        "grpc-timeout": "1500m",
        "x-more": "1" * 200,
    }
    assert data == (FrameType.DATA, http2.END_STREAM, 1, struct.pack(">?L", False, 3) + b"ask")
    # In the smallest pieces there are.
    for byte in b"".join(server.good_answer(1)):
        server.connection.data_received(bytes((byte,)))
    assert await outcome(call) == (b"hello", Status("OK"))
    assert server.wire.frames() == []


@pytest.mark.parametrize(
    ("trailers", "status"),
    [
        ([("grpc-status", "5"), ("grpc-message", "no%20such%20%C3%BC")], Status("NOT_FOUND", "no such ü")),
        ([("grpc-status", "77"), ("grpc-message", "odd")], Status("UNKNOWN", "odd")),
        ([("grpc-status", "")], Status("UNKNOWN")),
    ],
)
async def test_call_trailers_mapped_to_status(trailers: list[tuple[str, str]], status: Status) -> None:
    server = Server()
    call = server.connection.call("/a.B/C", b"")
    block = server.headers((":status", "200"), *trailers)
    server.send(frame(FrameType.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, block))
    assert await outcome(call) == (None, status)


async def test_call_non_grpc_http_status_mapped_to_grpc_status() -> None:
    server = Server()
    for stream, code, meant in (
        (1, "404", "UNIMPLEMENTED"),
        (3, "503", "UNAVAILABLE"),
        (5, "x", "UNAVAILABLE"),
    ):
        call = server.connection.call("/a.B/C", b"")
        block = server.headers((":status", code))
        server.send(frame(FrameType.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, block))
        _, status = await outcome(call)
        assert status is not None
        assert (status.code, code in status.message) == (meant, True)


async def test_connection_padding_priority_continuation_and_ping_handled() -> None:
    server = Server()
    call = server.connection.call("/a.B/C", b"")
    block = server.headers((":status", "200"))
    padded = http2.END_HEADERS | http2.PADDED | http2.PRIORITIZED
    trailers = server.headers(("grpc-status", "0"))
    server.send(
        frame(FrameType.PING, 0, 0, b"12345678"),
        frame(FrameType.PRIORITY, 0, 1, b"\0" * 5),
        frame(cast(FrameType, 99), 0, 1, b"something new"),
        frame(FrameType.HEADERS, padded, 1, b"\x02" + b"\0" * 5 + block + b"\0\0"),
        frame(FrameType.DATA, http2.PADDED, 1, b"\x03" + MESSAGE + b"\0\0\0"),
        frame(FrameType.HEADERS, http2.END_STREAM, 1, trailers[:1]),
        frame(FrameType.CONTINUATION, http2.END_HEADERS, 1, trailers[1:]),
    )
    assert await outcome(call) == (b"hello", Status("OK"))
    assert (FrameType.PING, http2.ACK, 0, b"12345678") in server.wire.frames()


async def test_call_request_data_respects_flow_control_window() -> None:
    server = Server()
    server.send(http2.settings({Setting.INITIAL_WINDOW_SIZE: 10, Setting.MAX_FRAME_SIZE: 16384}))
    server.wire.frames()
    call = server.connection.call("/a.B/C", b"x" * 95)
    sent = [one for one in server.wire.frames() if one[0] == FrameType.DATA]
    assert [(flags, len(payload)) for _, flags, _, payload in sent] == [(0, 10)]
    server.send(frame(FrameType.WINDOW_UPDATE, 0, 1, http2.number(50)))
    assert [len(payload) for _, _, _, payload in server.wire.frames()] == [50]
    server.send(http2.settings({Setting.INITIAL_WINDOW_SIZE: 1000}))
    rest = [one for one in server.wire.frames() if one[0] == FrameType.DATA]
    assert [(flags, len(payload)) for _, flags, _, payload in rest] == [(http2.END_STREAM, 40)]
    server.send(*server.good_answer(1))
    assert (await outcome(call))[0] == b"hello"


async def test_call_deadline_exceeded_resets_stream_and_ignores_late_response() -> None:
    server = Server()
    call = server.connection.call("/a.B/C", b"", timeout=0.01)
    _, status = await outcome(call)
    assert status is not None
    assert status.code == "DEADLINE_EXCEEDED"
    assert server.wire.frames()[-1] == (FrameType.RST_STREAM, 0, 1, http2.number(8))
    # What comes too late is nobody's, and the next call is not confused by it.
    late = server.good_answer(1)
    again = server.connection.call("/a.B/C", b"")
    server.send(*late, *server.good_answer(3))
    assert await outcome(again) == (b"hello", Status("OK"))


@pytest.mark.parametrize(("timeout", "code"), [(0.001, "DEADLINE_EXCEEDED"), (60.0, "CANCELLED")])
async def test_call_server_reset_after_deadline_is_deadline_exceeded(timeout: float, code: str) -> None:
    server = Server()
    call = server.connection.call("/a.B/C", b"", timeout=timeout)
    time.sleep(0.01)  # the loop has not gone round
    server.send(frame(FrameType.RST_STREAM, 0, 1, http2.number(8)))
    _, status = await outcome(call)
    assert status is not None
    assert status.code == code


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (struct.pack(">?L", False, 1001), "RESOURCE_EXHAUSTED"),
        (struct.pack(">?L", True, 1) + b"z", "INTERNAL"),
    ],
)
async def test_call_too_large_or_compressed_response_rejected(message: bytes, code: str) -> None:
    server = Server()
    call = server.connection.call("/a.B/C", b"")
    server.send(*server.good_answer(1, message))
    _, status = await outcome(call)
    assert status is not None
    assert status.code == code
    assert server.connection.usable


async def test_call_stream_end_without_status_is_internal() -> None:
    server = Server()
    call = server.connection.call("/a.B/C", b"")
    server.send(frame(FrameType.DATA, http2.END_STREAM, 1, MESSAGE))
    _, status = await outcome(call)
    assert status is not None
    assert status.code == "INTERNAL"


async def test_connection_goaway_accepted_calls_complete_others_unavailable() -> None:
    server = Server()
    known, unknown = (server.connection.call("/a.B/C", b"") for _ in range(2))
    server.send(frame(FrameType.GOAWAY, 0, 0, http2.number(1) + http2.number(0)))
    assert not server.connection.usable
    assert (await outcome(unknown))[1] == Status("UNAVAILABLE", "the server is going away")
    server.send(*server.good_answer(1))
    assert await outcome(known) == (b"hello", Status("OK"))


async def test_call_stream_reset_or_connection_lost_is_unavailable() -> None:
    server = Server()
    refused, lost = (server.connection.call("/a.B/C", b"") for _ in range(2))
    server.send(frame(FrameType.RST_STREAM, 0, 1, http2.number(7)))
    _, status = await outcome(refused)
    assert status is not None
    assert status.code == "UNAVAILABLE"
    server.connection.connection_lost(ConnectionResetError("gone"))
    _, status = await outcome(lost)
    assert status is not None
    assert status.code == "UNAVAILABLE"
    assert not server.connection.usable


async def test_call_on_closed_connection_unavailable_immediately() -> None:
    server = Server()
    server.connection.connection_lost(None)
    server.wire.frames()
    call = server.connection.call("/a.B/C", b"ask", timeout=60)
    assert await outcome(call) == (None, Status("UNAVAILABLE", "the connection is closed"))
    assert server.wire.frames() == []


async def test_connection_max_concurrent_streams_reached_not_usable() -> None:
    server = Server()
    server.send(http2.settings({Setting.MAX_CONCURRENT_STREAMS: 1}))
    call = server.connection.call("/a.B/C", b"")
    assert not server.connection.usable
    server.send(*server.good_answer(1))
    await outcome(call)
    assert server.connection.usable


async def test_wait_settings_silent_server_times_out_and_closes() -> None:
    server = Server(greets=False)
    assert not await server.connection.wait_settings(0.01)
    assert server.wire.closed


@given(data=st.lists(st.binary(max_size=200), max_size=6), greets=st.booleans())
def test_connection_arbitrary_bytes_call_ends_with_status(data: list[bytes], greets: bool) -> None:
    async def run() -> None:
        server = Server(greets=greets)
        call = server.connection.call("/a.B/C", b"ask")
        for part in data:
            server.connection.data_received(part)
        server.connection.connection_lost(None)
        _, status = await outcome(call)
        assert status is not None

    asyncio.run(run())


@given(
    frames=st.lists(
        st.tuples(
            st.integers(0, 11),
            st.integers(0, 255),
            st.sampled_from([0, 1, 3, 2**31 - 1]),
            st.binary(max_size=40),
        ),
        max_size=10,
    )
)
def test_connection_arbitrary_frames_call_ends_with_status(frames: list[tuple[int, int, int, bytes]]) -> None:
    async def run() -> None:
        server = Server()
        call = server.connection.call("/a.B/C", b"ask")
        server.send(
            *(frame(cast(FrameType, kind), flags, stream, payload) for kind, flags, stream, payload in frames)
        )
        server.connection.connection_lost(None)
        _, status = await outcome(call)
        assert status is not None

    asyncio.run(run())


async def test_connection_large_requests_received_by_real_server(
    scripted: Runtime, cri: RuntimeConnection
) -> None:
    scripted.answers["CreateContainer"] = pb.CreateContainerResponse(container_id="c1")
    config = pb.ContainerConfig(envs=[pb.KeyValue(key="BIG", value=b"x" * 3_000_000)])
    async with asyncio.timeout(60):
        ids = await asyncio.gather(
            *(cri.runtime.create_container("s1", config, pb.PodSandboxConfig()) for _ in range(3))
        )
    assert ids == ["c1"] * 3
    requests = [seen.request for seen in scripted.seen if seen.method.endswith("CreateContainer")]
    assert [cast(pb.CreateContainerRequest, one).config for one in requests] == [config] * 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0m"),
        (-1, "0m"),
        (0.0001, "1m"),
        (1.5, "1500m"),
        (120, "120000m"),
        (99999.9, "99999900m"),
        (100000, "100000S"),
        (10**9, "16666667M"),
        (10**13, "99999999H"),
    ],
)
def test_grpc_timeout_header_format(seconds: float, text: str) -> None:
    assert grpc_timeout(seconds) == text
