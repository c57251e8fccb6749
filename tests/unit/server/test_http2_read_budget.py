"""Time that frames of unauthorized clients may take over HTTP/2, on all connections together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import hpack
from hyperframe.frame import HeadersFrame

from pykubelet.server.http2 import frames as http2_turns
from pykubelet.server.http2.frames import MOST_SECONDS, ReadingTurns
from tests.support.api_node import Node
from tests.unit.server import http2_site
from tests.unit.server.http2_site import Site, standing, talking, token_of

authority, pairs, site, start = (
    http2_site.authority,
    http2_site.pairs,
    http2_site.site,
    http2_site.start,
)

Starter = Callable[..., Awaitable[Node]]

REQUEST = [(":method", "GET"), (":scheme", "https"), (":authority", "node"), (":path", "/echo")]


def large_requests(count: int) -> bytes:
    """Return requests with a Huffman-coded field, each of which takes about 20 ms to decode."""
    block = hpack.Encoder().encode([*REQUEST, ("a", "a" * 20_000)])
    frames = (HeadersFrame(2 * n + 1, block, flags=("END_HEADERS", "END_STREAM")) for n in range(count))
    return b"".join(frame.serialize() for frame in frames)


async def test_site_flood_of_large_fields_keeps_event_loop_running(site: Site) -> None:
    gaps: list[float] = []

    async def watch() -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - before)
            before = time.monotonic()

    flood = large_requests(12)
    async with AsyncExitStack() as stack, asyncio.timeout(50):
        hostile = [await stack.enter_async_context(site.talking()) for _ in range(20)]
        watching = asyncio.create_task(watch())
        for client in hostile:
            client.raw(flood)
        await asyncio.sleep(0.1)
        began = time.monotonic()
        async with site.talking() as good:
            assert (await good.ask("/echo")).status == 200
        took = time.monotonic() - began
        watching.cancel()
    # Without turns both are the 5 s that all fields take.
    assert max(gaps) < 1
    assert took < 2.5


class Reader:
    """A connection with frames that take `cost` seconds each."""

    def __init__(self, cost: float, count: int, done: list[str], name: str) -> None:
        self.is_authorized, self.reading_seconds = False, 0.0
        self.unread_bytes = count * 1000
        self.is_closed = self.is_held = False
        self._cost, self._done, self._name = cost, done, name

    def read_frames(self, seconds: float) -> bool:
        began = time.perf_counter()
        while self.unread_bytes > 0:
            time.sleep(self._cost)
            self.unread_bytes -= 1000
            self._done.append(self._name)
            if time.perf_counter() - began > seconds:
                return False
        return True

    def hold(self) -> None:
        self.is_held = True

    def resume(self) -> None:
        self.is_held = False

    def force_close(self) -> None:
        self.is_closed = True


async def test_reading_turns_small_request_served_before_large_ones() -> None:
    done: list[str] = []
    turns = ReadingTurns()
    large = [Reader(MOST_SECONDS, 20, done, "large") for _ in range(3)]
    small = Reader(0, 1, done, "small")
    for reader in large:
        turns.received(reader)
    turns.received(small)
    assert done == ["large"]
    assert small.is_held
    async with asyncio.timeout(20):
        while "small" not in done:
            await asyncio.sleep(0.01)
    assert done[:2] == ["large", "small"]
    assert not small.is_held
    for reader in large:
        turns.forget(reader)


async def test_reading_turns_authorized_connection_not_limited() -> None:
    done: list[str] = []
    turns = ReadingTurns()
    turns.received(Reader(MOST_SECONDS, 3, done, "stranger"))
    known = Reader(MOST_SECONDS / 5, 10, done, "known")
    known.is_authorized = True
    turns.received(known)
    assert done == ["stranger", *["known"] * 10]


async def test_reading_turns_waiting_bytes_bounded_largest_closed() -> None:
    done: list[str] = []
    turns = ReadingTurns()
    turns.received(Reader(2 * MOST_SECONDS, 1, done, "first"))
    readers = [Reader(0, 3000 + number, done, "x") for number in range(4)]
    for reader in readers:
        turns.received(reader)
    assert sum(reader.unread_bytes for reader in readers if not reader.is_closed) <= (
        http2_turns.MOST_WAITING_BYTES
    )
    assert [reader.is_closed for reader in readers] == [False, False, True, True]


async def test_connection_with_authorized_request_is_marked(start: Starter) -> None:
    node = await start()
    expected = {"admin": True, "admin token": True, "no permission": False, "no credentials": False}
    for client, is_authorized in expected.items():
        async with talking(node, client) as talk:
            await talk.ask("/pods", headers=token_of(node, client))
            assert [one.is_authorized for one in standing()] == [is_authorized], client
