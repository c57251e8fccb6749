"""HTTP/2 as attackers speak it: floods, bombs, frames at random. They are hung up on, nobody else suffers."""

import asyncio
import gc
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import hpack
import pytest
from aiohttp import web
from h2.errors import ErrorCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pykubelet.server.connections import app_runner
from pykubelet.server.http2 import frames as http2_frames
from pykubelet.server.http2.connection import Http2, Http2Connection
from pykubelet.server.http2.frames import (
    BUDGET,
    LONGEST_FRAME,
    PREFACE,
    BadFrames,
    Budget,
    BudgetExceeded,
    Frames,
)
from pykubelet.server.http2.headers import Malformed, UnsupportedRequest, answer_head, request_head
from pykubelet.server.http2.stream import Stream
from tests.support.waiting import until
from tests.unit.server import http2_site
from tests.unit.server.http2_client import Client
from tests.unit.server.http2_site import Site

authority, pairs, site = http2_site.authority, http2_site.pairs, http2_site.site

REQUEST = [(":method", "GET"), (":scheme", "https"), (":authority", "node"), (":path", "/slow")]


def head(
    number: int, *fields: tuple[str, str], flags: tuple[str, ...] = ("END_HEADERS", "END_STREAM")
) -> Frame:
    data = hpack.Encoder().encode([*REQUEST, *fields])
    return HeadersFrame(number, data, flags=flags)


def endless(make: Callable[[int], list[Frame]]) -> Iterator[list[Frame]]:
    number = 1
    while True:
        yield make(number)
        number += 2


def then(first: list[Frame], frame: Frame) -> Iterator[list[Frame]]:
    yield first
    yield from endless(lambda _: [frame])


def with_stream(frame: Frame) -> Iterator[list[Frame]]:
    return then([head(1, flags=("END_HEADERS",))], frame)


FLOODS: dict[str, Callable[[], Iterator[list[Frame]]]] = {
    "pings": lambda: endless(lambda _: [PingFrame(0, b"12345678")]),
    "answers to pings": lambda: endless(lambda _: [PingFrame(0, b"12345678", flags=("ACK",))]),
    "settings": lambda: endless(lambda _: [SettingsFrame(0, {4: 70000})]),
    "empty settings": lambda: endless(lambda _: [SettingsFrame(0, {})]),
    "priorities": lambda: endless(lambda n: [PriorityFrame(n + 2**20, depends_on=0, stream_weight=1)]),
    "rapid reset": lambda: endless(lambda n: [head(n), RstStreamFrame(n, 8)]),
    "requests that are none": lambda: endless(lambda n: [head(n, ("X", "1"))]),
    "empty data": lambda: with_stream(DataFrame(1, b"")),
    "tiny data": lambda: with_stream(DataFrame(1, b"x")),
    "padding only": lambda: with_stream(DataFrame(1, b"", pad_length=10, flags=("PADDED",))),
    "windows of one stream": lambda: with_stream(WindowUpdateFrame(1, 1)),
    "windows of the connection": lambda: endless(lambda _: [WindowUpdateFrame(0, 1)]),
    "resets of one stream": lambda: then([head(1)], RstStreamFrame(1, 8)),
    "data for what was reset": lambda: then([head(1), RstStreamFrame(1, 8)], DataFrame(1, b"")),
}


class Raw(Frame):
    """A frame of any type."""

    def __init__(self, kind: int, number: int, body: bytes, flags: int = 0) -> None:
        super().__init__(number)
        self.kind, self.bytes, self.bits = kind, body, flags

    def serialize(self) -> bytes:
        return struct.pack(">IBI", len(self.bytes) << 8 | self.kind, self.bits, self.stream_id) + self.bytes

    def serialize_body(self) -> bytes:
        return self.bytes

    def parse_body(self, data: Any) -> None:
        raise NotImplementedError


FLOODS["frames of unknown types"] = lambda: endless(lambda _: [Raw(99, 0, b"")])


async def pour(talk: Client, flood: Iterator[list[Frame]], most: int = 60_000) -> int:
    """Send until the server has had enough, and give how many frames that took."""
    sent = 0
    for frames in flood:
        talk.raw(*frames)
        sent += len(frames)
        if sent % 100 < len(frames):
            try:
                await talk._writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        if talk.closed or sent > most:
            break
    await talk.until(lambda: talk.closed)
    return sent


@pytest.mark.parametrize("name", FLOODS)
async def test_http2_flood_closes_connection_others_served(site: Site, name: str) -> None:
    async with site.talking() as good, site.talking() as bad:
        assert (await good.ask("/echo")).status == 200
        await pour(bad, FLOODS[name]())
        assert bad.goodbye in (ErrorCodes.ENHANCE_YOUR_CALM, None)
        assert (await good.ask("/echo")).status == 200
        await until(lambda: site.slow.at_work == 0)
        # However many were begun: never more at once than allowed, and few in all.
        assert site.slow.begun <= BUDGET / 10


async def test_http2_normal_client_not_treated_as_flood(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_frames, "BUDGET", 400)
    monkeypatch.setattr(http2_frames, "_PER_SECOND", 0)
    async with site.talking() as talk:
        for _ in range(20):
            for _ in range(20):
                talk.begin("/status/204")
                for _ in range(2):
                    talk.wire.ping(b"12345678")
            assert (await talk.ask("/status/204")).status == 204
        assert not talk.closed


async def test_http2_reset_after_response_start_not_treated_as_flood(site: Site) -> None:
    async with site.talking(window=1) as talk:
        for _ in range(600):
            number = talk.begin("/echo")
            await talk.until(lambda number=number: talk.answers[number].status)
            talk.wire.reset_stream(number, ErrorCodes.CANCEL)
            talk.flush()
        assert (await talk.ask("/status/204")).status == 204


@pytest.mark.parametrize("size", [0, 1, 16000])
async def test_http2_endless_continuations_close_connection(site: Site, size: int) -> None:
    async with site.talking() as talk:
        # First, both sides acknowledge their settings: any other frame among the continuations is an error.
        assert (await talk.ask("/echo")).status == 200
        talk.raw(HeadersFrame(101, hpack.Encoder().encode(REQUEST)))
        await pour(talk, endless(lambda _: [ContinuationFrame(101, b"\0" * size)]), 5000)
        assert talk.goodbye in (ErrorCodes.PROTOCOL_ERROR, ErrorCodes.ENHANCE_YOUR_CALM, None)
    await until(lambda: not any(isinstance(found, Http2Connection) for found in gc.get_objects()))


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([("x", "y" * 31_000)], 200),
        ([("x", "y" * 40_000)], 400),
        ([(f"x-{number}", "y") for number in range(90)], 200),
        ([(f"x-{number}", "y") for number in range(120)], 400),
    ],
)
async def test_http2_header_fields_bounded_as_over_http1(
    site: Site, fields: list[tuple[str, str]], status: int
) -> None:
    async with site.talking() as talk:
        assert (await talk.ask("/status/200", headers=fields)).status == status


async def test_http2_hpack_bomb_closes_connection(site: Site) -> None:
    """A large field is said once, and then a byte each time."""
    encoder = hpack.Encoder()
    data = encoder.encode([*REQUEST, *[("x", "y" * 3000)] * 10_000])
    assert len(data) < 30_000
    async with site.talking() as talk:
        talk.raw(HeadersFrame(1, data[:10_000]), ContinuationFrame(1, data[10_000:], flags=("END_HEADERS",)))
        await talk.until(lambda: talk.closed)
        assert talk.goodbye == ErrorCodes.ENHANCE_YOUR_CALM


async def test_http2_frame_above_limit_closes_connection(site: Site) -> None:
    async with site.talking() as talk:
        talk.raw(struct.pack(">IBI", (LONGEST_FRAME + 1) << 8 | 0, 0, 1))
        await talk.until(lambda: talk.closed)


async def test_http2_one_byte_windows_charged_to_budget(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes in as many frames, and only as fast as they are paid for."""
    monkeypatch.setattr(http2_frames, "_PER_SECOND", 0)
    async with site.talking(window=0, takes=False) as talk:
        number = talk.begin("/long")
        await talk.until(lambda: talk.answers[number].status)
        await pour(talk, endless(lambda _: [WindowUpdateFrame(number, 1)]))
        assert len(talk.answers[number].body) <= BUDGET


def test_budget_spent_refills_over_time() -> None:
    now = 0.0
    budget = Budget(lambda: now)
    budget.spend(BUDGET)
    with pytest.raises(BudgetExceeded):
        budget.spend(1)
    now = 5.0
    for _ in range(1000):
        budget.spend(1)
    budget.earn(10 * BUDGET)
    budget.spend(BUDGET)
    with pytest.raises(BudgetExceeded):
        budget.spend(BUDGET)


@given(
    st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=20),
    st.lists(st.integers(1, 200), min_size=1),
)
def test_frames_any_chunking_returns_same_frames(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    parts = [Raw(kind, 1, body).serialize() for kind, body in frames]
    stream, reader = PREFACE + b"".join(parts), Frames(Budget(lambda: 0.0))
    found: list[Any] = []
    while stream:
        for cut in cuts:
            found += reader.feed(stream[:cut])
            stream = stream[cut:]
    assert [frame.data for frame in found] == parts
    assert [frame.kind for frame in found] == [kind for kind, _ in frames]


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/1.1", b"\0"])
def test_frames_invalid_preface_raises(said: bytes) -> None:
    with pytest.raises(BadFrames):
        list(Frames(Budget(lambda: 0.0)).feed(said))


NAMES = st.one_of(
    st.sampled_from(
        [b":method", b":scheme", b":authority", b":path", b"host", b"cookie", b"content-length", b"te"]
    ),
    st.sampled_from([b"x", b"X", b"", b"x:", b"x y", b"connection", b"transfer-encoding"]),
    st.binary(max_size=8),
)
VALUES = st.one_of(
    st.sampled_from([b"GET", b"https", b"/x", b"a=1", b"0", b"5", b"*", b" ", b"x\r\ny: z", b"\n"]),
    st.binary(max_size=12),
)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=12), st.booleans(), st.booleans())
def test_request_head_any_fields_form_single_head(
    fields: list[tuple[bytes, bytes]], good: bool, ended: bool
) -> None:
    if good:
        fields = [(name.encode(), value.encode()) for name, value in REQUEST] + fields
    try:
        written, chunked, _ = request_head(fields, ended=ended)
    except (Malformed, UnsupportedRequest):
        return
    lines = written.split(b"\r\n")
    assert lines[-2:] == [b"", b""]
    assert all(lines[:-2])
    assert len(lines[0].split(b" ")) == 3
    assert not any(byte in line for line in lines for byte in (b"\r", b"\n", b"\0"))
    plain = [name for name, _ in fields if not name.startswith(b":")]
    # As many fields as came, but for the host, the cookies, and the two that are ours.
    expected = len([name for name in plain if name not in (b"host", b"cookie")]) + (b"cookie" in plain)
    hosts = [line for line in lines if line.startswith(b"host: ")]
    lengths = [name for name in plain if name == b"content-length"]
    assert len(lengths) <= 1
    assert chunked == (not ended and not lengths)
    assert len(lines) - 3 == expected + len(hosts) + 1 + chunked


def test_answer_head_header_with_line_break_raises() -> None:
    assert answer_head(200, [("X-A", "1"), ("Connection", "close"), ("Server", "x")]) == [
        (b":status", b"200"),
        (b"x-a", b"1"),
    ]
    for name, value in [("X", "1\r\nY: 2"), ("X\r\nY", "1"), ("X", "\0"), ("X y", "1")]:
        with pytest.raises(ValueError, match="cannot be sent"):
            answer_head(200, [(name, value)])


class Pipe(asyncio.Transport):
    """A connection to nowhere: what is written is looked at and forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.written = 0

    def write(self, data: Any) -> None:
        assert not self.closed, "something was written after the end"
        self.written += len(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def swallow(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(body=b"x" * 100_000)


BODIES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            hpack.Encoder().encode([*REQUEST[:3], (":path", "/swallow"), *more])
            for more in ([], [("content-length", "5")], [("expect", "100-continue")], [("x", "y" * 100)])
        ]
        + [hpack.Encoder().encode([(":status", "100")]), hpack.Encoder().encode([("x", "y")])]
    ),
    st.integers(0, 2**32 - 1).map(lambda number: struct.pack(">I", number)),
    st.lists(st.tuples(st.integers(0, 10), st.integers(0, 2**32 - 1)), max_size=4).map(
        lambda entries: b"".join(struct.pack(">HI", *entry) for entry in entries)
    ),
)
RANDOM_FRAMES = st.tuples(
    st.sampled_from([0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
    st.sampled_from([0, 1, 2, 3, 5, 7, 9, 2**31 - 1]),
    BODIES,
    st.one_of(st.sampled_from([0, 1, 4, 5]), st.integers(0, 255)),
)


async def survive(frames: list[tuple[int, int, bytes, int]], after: int) -> None:
    loop, problems = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    app = web.Application()
    app.router.add_route("*", "/swallow", swallow)
    async with app_runner(app) as server:
        shared = Http2(server, idle_seconds=90, access_log=None)
        connection, pipe = shared(), Pipe()
        connection.connection_made(pipe)
        connection.data_received(PREFACE + SettingsFrame(0, {}).serialize())
        for place, (kind, number, body, flags) in enumerate(frames):
            if pipe.closed:
                break
            connection.data_received(Raw(kind, number, body, flags).serialize())
            if place % 3 == after % 3:
                await asyncio.sleep(0)
        for _ in range(after):
            await asyncio.sleep(0)
        if not pipe.closed and after % 2:
            connection.force_close()
        connection.connection_lost(None)
        async with asyncio.timeout(30):
            while shared.streams.connections:
                await asyncio.sleep(0)
        assert (shared.open, connection.streams, connection._at_work) == (0, {}, 0)
        assert server.connections == []
    assert problems == []


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(RANDOM_FRAMES, max_size=25), st.integers(0, 5))
def test_http2_random_frames_leave_no_state(frames: list[tuple[int, int, bytes, int]], after: int) -> None:
    asyncio.run(survive(frames, after))


async def test_http2_random_frames_over_tls_server_stays_usable(site: Site) -> None:
    source = random.Random(5)
    for _ in range(30):
        async with site.talking() as talk:
            talk.begin("/echo")
            for _ in range(20):
                body = source.randbytes(source.choice((0, 4, 5, 8, 30)))
                talk.raw(Raw(source.randrange(12), source.choice((0, 1, 3, 5)), body, source.randrange(64)))
    async with site.talking() as talk:
        assert (await talk.ask("/echo")).status == 200
    await until(lambda: not any(isinstance(found, Stream) for found in gc.get_objects()))
