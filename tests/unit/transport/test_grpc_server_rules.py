"""Our gRPC server against clients that keep to no rule: what they are told, and that nobody else suffers."""

import asyncio
import contextlib
import struct
from pathlib import Path

import pytest
from google.protobuf.wrappers_pb2 import StringValue
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pykubelet.transport import http2
from pykubelet.transport.grpc_connection import connect_unix
from pykubelet.transport.grpc_server import read_timeout, serving
from pykubelet.transport.http2 import Code, FrameType, Setting, frame
from tests.unit.transport.grpc_peers import MESSAGE, SHORT, Service, raw, served


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1H", 3600), ("2M", 120), ("3S", 3), ("4m", 0.004), ("5u", 5e-6), ("6n", 6e-9), ("0S", 0)]
    + [(bad, None) for bad in ("", "S", "1", "1s", "-1S", "123456789S", "1.5S", "\u0661S")],
)
def test_read_timeout_header_units_and_invalid_values(text: str, seconds: float | None) -> None:
    assert read_timeout(text) == (pytest.approx(seconds) if seconds is not None else None)


_HEAD = http2.request_headers("/t.Test/Echo", "localhost")

_OPEN = frame(FrameType.HEADERS, http2.END_HEADERS, 1, _HEAD)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(FrameType.PING, 0, 0, b"short"), Code.FRAME_SIZE),
        (frame(FrameType.PING, 0, 3, bytes(8)), Code.PROTOCOL),
        (frame(FrameType.SETTINGS, 0, 0, bytes(5)), Code.FRAME_SIZE),
        (frame(FrameType.SETTINGS, http2.ACK, 0, bytes(6)), Code.FRAME_SIZE),
        (http2.settings({Setting.INITIAL_WINDOW_SIZE: 2**31}), Code.FLOW_CONTROL),
        (http2.settings({Setting.MAX_FRAME_SIZE: 100}), Code.PROTOCOL),
        (frame(FrameType.HEADERS, http2.END_HEADERS, 2, _HEAD), Code.PROTOCOL),
        (frame(FrameType.HEADERS, http2.END_HEADERS, 0, _HEAD), Code.PROTOCOL),
        (frame(FrameType.HEADERS, http2.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), Code.COMPRESSION),
        (frame(FrameType.HEADERS, http2.END_HEADERS | http2.PADDED, 1, b"\xff"), Code.PROTOCOL),
        (frame(FrameType.HEADERS, 0, 1, _HEAD) + frame(FrameType.PING, 0, 0, bytes(8)), Code.PROTOCOL),
        (
            frame(FrameType.HEADERS, 0, 1, b"") + frame(FrameType.CONTINUATION, 0, 1, b"") * 9,
            Code.ENHANCE_YOUR_CALM,
        ),
        (
            frame(FrameType.HEADERS, 0, 1, bytes(16384)) + frame(FrameType.CONTINUATION, 0, 1, b"x"),
            Code.ENHANCE_YOUR_CALM,
        ),
        (frame(FrameType.CONTINUATION, http2.END_HEADERS, 1, _HEAD), Code.PROTOCOL),
        (frame(FrameType.DATA, 0, 5, b"x"), Code.PROTOCOL),
        (frame(FrameType.RST_STREAM, 0, 5, bytes(4)), Code.PROTOCOL),
        (frame(FrameType.WINDOW_UPDATE, 0, 0, bytes(4)), Code.PROTOCOL),
        (frame(FrameType.WINDOW_UPDATE, 0, 0, http2.number(2**31 - 1)), Code.FLOW_CONTROL),
        (frame(FrameType.PUSH_PROMISE, 0, 1, bytes(8)), Code.PROTOCOL),
        (struct.pack(">BHBBL", 1, 0, 0, 0, 1), Code.FRAME_SIZE),
    ],
)
async def test_grpc_server_protocol_violation_goaway_code_and_closed(
    tmp_path: Path, frames: bytes, code: Code
) -> None:
    async with served(tmp_path) as peer, raw(tmp_path / "test.sock") as client:
        client.send(frames)
        assert await client.ended() == code
        assert (await peer.call("Echo", StringValue(value="others go on"))).value == "others go on"


@pytest.mark.parametrize(
    ("frames", "status"),
    [
        (frame(FrameType.DATA, http2.END_STREAM, 1, b""), "13"),
        (frame(FrameType.DATA, http2.END_STREAM, 1, b"\0\0\0\0\5abc"), "13"),
        (frame(FrameType.DATA, http2.END_STREAM, 1, b"\0\0\0\0\1abc"), "13"),
        (frame(FrameType.DATA, 0, 1, b"\1\0\0\0\1a"), "12"),
        (frame(FrameType.DATA, 0, 1, b"\0\xff\xff\xff\xff"), "8"),
    ],
)
async def test_grpc_server_malformed_request_ends_with_status(
    tmp_path: Path, frames: bytes, status: str
) -> None:
    async with served(tmp_path), raw(tmp_path / "test.sock") as client:
        client.send(_OPEN, frames)
        assert (await client.trailers(1))["grpc-status"] == status
        client.request(3, "/t.Test/Echo", MESSAGE)
        assert (await client.trailers(3))["grpc-status"] == "0"


async def test_grpc_server_client_trailers_complete_request(tmp_path: Path) -> None:
    async with served(tmp_path), raw(tmp_path / "test.sock") as client:
        body = struct.pack(">?L", False, len(MESSAGE)) + MESSAGE
        client.send(_OPEN, frame(FrameType.DATA, http2.PADDED, 1, b"\3" + body + bytes(3)))
        trailers = http2.more_headers([("x", "y")])
        client.send(frame(FrameType.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, trailers))
        assert (await client.trailers(1))["grpc-status"] == "0"


async def test_grpc_server_non_grpc_request_http_405_or_415(tmp_path: Path) -> None:
    async with served(tmp_path), raw(tmp_path / "test.sock") as client:
        get = b"\x82\x86\x84" + http2.more_headers([(":authority", "x")])
        client.send(frame(FrameType.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, get))
        post = b"\x83\x86\x84" + http2.more_headers([("content-type", "application/json")])
        client.send(frame(FrameType.HEADERS, http2.END_HEADERS, 3, post))
        await client.until(lambda: len(client.headers) == 2)
        assert [client.headers[number][":status"] for number in (1, 3)] == ["405", "415"]


async def test_grpc_server_http1_request_closed_with_protocol_error(tmp_path: Path) -> None:
    async with served(tmp_path), raw(tmp_path / "test.sock", wait_settings=False) as client:
        client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await client.ended() == Code.PROTOCOL


def _flood(kind: str, round_: int) -> bytes:
    """Return frames without progress of a call, whose streams depend on the round."""
    match kind:
        case "ping":
            return frame(FrameType.PING, 0, 0, bytes(8)) * 64
        case "settings":
            return http2.settings({Setting.MAX_FRAME_SIZE: 16_384}) * 64
        case "window":
            return frame(FrameType.WINDOW_UPDATE, 0, 0, http2.number(1)) * 64
        case "unknown":
            return frame(0xEE, 0, 0, bytes(1000)) * 16  # type: ignore[arg-type]
        case "empty data":
            begin = frame(FrameType.HEADERS, http2.END_HEADERS, 1, _HEAD) if round_ == 0 else b""
            return begin + frame(FrameType.DATA, 0, 1, b"") * 64
        case _:
            body = struct.pack(">?L", False, len(MESSAGE)) + MESSAGE
            return b"".join(
                frame(FrameType.HEADERS, http2.END_HEADERS, number, _HEAD)
                + frame(FrameType.DATA, http2.END_STREAM, number, body)
                + frame(FrameType.RST_STREAM, 0, number, http2.number(8))
                for number in range(1 + 32 * round_, 1 + 32 * (round_ + 1), 2)
            )


@pytest.mark.parametrize("kind", ["ping", "settings", "window", "unknown", "empty data", "rapid reset"])
async def test_grpc_server_flood_of_frames_without_progress_closed(tmp_path: Path, kind: str) -> None:
    async with served(tmp_path) as peer, raw(tmp_path / "test.sock") as client:
        with contextlib.suppress(ConnectionError):
            for round_ in range(1000):
                client.send(_flood(kind, round_))
                if client.writer.transport.is_closing():
                    break
                await asyncio.wait_for(client.writer.drain(), 30)
                await asyncio.sleep(0)
        assert await client.ended() in (Code.ENHANCE_YOUR_CALM, None), "None if the reset overtakes it"
        assert (await peer.call("Echo", StringValue(value="others"))).value == "others"
        assert peer.server.connections == 1


async def test_grpc_server_many_calls_with_control_frames_within_budget(tmp_path: Path) -> None:
    """Verify that the control frames of an ordinary client never exhaust the budget."""
    async with served(tmp_path), raw(tmp_path / "test.sock") as client:
        for number in range(1, 3001, 2):
            client.send(frame(FrameType.PING, 0, 0, bytes(8)))
            client.send(frame(FrameType.WINDOW_UPDATE, 0, 0, http2.number(8)))
            client.request(number, "/t.Test/Echo", MESSAGE)
            assert (await client.trailers(number))["grpc-status"] == "0"


_frames = st.builds(
    lambda kind, flags, stream, payload: frame(kind, flags, stream, payload),
    st.sampled_from(list(FrameType)),
    st.sampled_from([0, 1, 4, 5, 8, 9, 12, 13, 32, 36, 37, 255]),
    st.sampled_from([0, 1, 1, 3, 5, 7, 2, 2**31 - 1]),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([_HEAD, b"\0\0\0\0\3" + MESSAGE, bytes(4), bytes(8), http2.number(70_000), b""]),
    ),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    frames=st.lists(_frames, max_size=25), preface=st.sampled_from([b"", b"", b"x"]), cut=st.integers(1, 64)
)
def test_grpc_server_arbitrary_frames_other_clients_served(
    tmp_path: Path, frames: list[bytes], preface: bytes, cut: int
) -> None:
    async def run() -> None:
        service = Service()
        async with serving(tmp_path / "fuzz", service.methods(), SHORT) as server:
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "fuzz"))
            data = preface + http2.PREFACE + http2.settings({}) + b"".join(frames)
            with contextlib.suppress(ConnectionError):  # it is right to cut us off
                for at in range(0, len(data), cut * 16):
                    writer.write(data[at : at + cut * 16])
                    await asyncio.sleep(0)
                writer.write_eof()
                async with asyncio.timeout(60):
                    while await reader.read(65536):
                        pass
            writer.close()
            connection = await connect_unix(str(tmp_path / "fuzz"))
            call = connection.call("/t.Test/Echo", MESSAGE, timeout=60)
            assert await call.wait_response() == MESSAGE
            connection.close(call.status or pytest.fail("no status"))
        assert (server.buffered, server.connections) == (0, 0)

    asyncio.run(run())
