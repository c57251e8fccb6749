"""Hostile gRPC servers on raw sockets, each in a thread of its own, and a probe that meets one of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import hpack

from pykubelet.transport import http2
from pykubelet.transport.http2 import FrameType, Setting, frame

Attack = Callable[[], Iterator[bytes]]

HEADERS = b"\x88" + http2.more_headers([("content-type", "application/grpc")])
MOST_BYTES = 512 * 1024 * 1024
"""Bytes that a server sends at most: what it gets rid of measures how long it is tolerated."""


def endless_continuation() -> Iterator[bytes]:
    """Send one header block that never ends."""
    yield frame(FrameType.HEADERS, 0, 1, HEADERS)
    while True:
        yield frame(FrameType.CONTINUATION, 0, 1, http2.more_headers([("a", "x" * 16_000)])) * 16


def empty_continuations() -> Iterator[bytes]:
    """Send one header block in frames without content."""
    yield frame(FrameType.HEADERS, 0, 1, HEADERS)
    while True:
        yield frame(FrameType.CONTINUATION, 0, 1) * 4096


def size_updates() -> Iterator[bytes]:
    """Send header blocks of HPACK table size updates, one byte each."""
    block = b"\x20" * http2.MAX_FRAME
    while True:
        yield frame(FrameType.HEADERS, 0, 1, block) + frame(FrameType.CONTINUATION, 0, 1, block) * 400
        yield frame(FrameType.CONTINUATION, http2.END_HEADERS, 1, block)


def pings() -> Iterator[bytes]:
    """Send PING frames and read no reply."""
    while True:
        yield frame(FrameType.PING, 0, 0, bytes(8)) * 4096


def settings() -> Iterator[bytes]:
    """Send SETTINGS frames and read no reply."""
    while True:
        yield http2.settings({Setting.HEADER_TABLE_SIZE: 0}) * 4096


def long_settings() -> Iterator[bytes]:
    """Send SETTINGS frames of as many settings as fit."""
    payload = struct.pack(">HL", Setting.INITIAL_WINDOW_SIZE, 65_535) * 2730
    while True:
        yield frame(FrameType.SETTINGS, 0, 0, payload) * 16


def header_blocks() -> Iterator[bytes]:
    """Send response headers again and again, with new names."""
    for number in itertools.count():
        block = HEADERS + http2.more_headers([(f"x-{number}-{part}", "y" * 900) for part in range(15)])
        yield frame(FrameType.HEADERS, http2.END_HEADERS, 1, block)


def blocks_after_end() -> Iterator[bytes]:
    """End the call and go on with Huffman-coded header blocks, each within all limits and slow to decode."""
    block = hpack.Encoder().encode([(":status", "200"), ("a", "a" * 4000)])
    yield (
        frame(FrameType.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, block)
        + frame(FrameType.HEADERS, http2.END_HEADERS, 1, block) * 90
    )
    while True:
        yield frame(FrameType.HEADERS, http2.END_HEADERS, 1, block)


def tiny_messages() -> Iterator[bytes]:
    """Send many messages in response to a unary call."""
    yield frame(FrameType.HEADERS, http2.END_HEADERS, 1, HEADERS)
    while True:
        yield frame(FrameType.DATA, 0, 1, (struct.pack(">?L", False, 2) + b"xy") * 2340) * 16


def empty_data() -> Iterator[bytes]:
    """Send DATA frames without content."""
    yield frame(FrameType.HEADERS, http2.END_HEADERS, 1, HEADERS)
    while True:
        yield frame(FrameType.DATA, 0, 1) * 4096


def window_updates() -> Iterator[bytes]:
    """Grow the call's window in single bytes."""
    while True:
        yield frame(FrameType.WINDOW_UPDATE, 0, 1, http2.number(1)) * 4096


def foreign_data() -> Iterator[bytes]:
    """Send data of calls that were never made."""
    while True:
        yield frame(FrameType.DATA, 0, 99, bytes(http2.MAX_FRAME)) * 16


ATTACKS: list[Attack] = [
    endless_continuation,
    empty_continuations,
    size_updates,
    pings,
    settings,
    long_settings,
    header_blocks,
    blocks_after_end,
    tiny_messages,
    empty_data,
    window_updates,
    foreign_data,
]


class HostileServer:
    """A server that greets, reads nothing after the first call, and sends an attack as fast as it is read."""

    def __init__(self, attack: Attack) -> None:
        self.sent = 0
        """Bytes that clients have taken from it."""
        self._attack = attack
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(20)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            with client:
                client.settimeout(10)
                client.sendall(http2.settings({}))
                request = b""
                while b"/grpc.health.v1.Health/Check" not in request:
                    request += client.recv(65_536)
                for data in self._attack():
                    client.sendall(data)
                    self.sent += len(data)
                    if self.sent > MOST_BYTES:
                        break

    def is_cut_off(self, seconds: float) -> bool:
        """Return whether the client closes the connection within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop; the client has closed its connection."""
        self._listener.close()
        self._thread.join(30)


@contextmanager
def hostile_server(attack: Attack) -> Iterator[HostileServer]:
    """Run a hostile server for the time of a block."""
    server = HostileServer(attack)
    try:
        yield server
    finally:
        server.close()


@dataclass
class Cost:
    """What a client had to bear."""

    seconds: float = 0.0
    frozen: float = 0.0
    """Longest time in seconds that the event loop ran nothing else."""
    grown: int = 0
    """Bytes of resident memory above those at the start, at their most."""


@asynccontextmanager
async def measured() -> AsyncIterator[Cost]:
    """Measure what a block costs; yields a Cost that is filled in when the block is left."""
    cost, base, started = Cost(), resident_bytes(), time.monotonic()

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            cost.frozen = max(cost.frozen, time.monotonic() - before - 0.01)
            cost.grown = max(cost.grown, resident_bytes() - base)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        yield cost
    finally:
        cost.seconds = time.monotonic() - started
        await asyncio.sleep(0.02)
        watching.cancel()


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
