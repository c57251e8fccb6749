"""A TCP proxy in front of a registry that limits the rate of its responses, or never responds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_STEP_SECONDS = 0.05


class SlowProxy:
    """A proxy; `rate` are the bytes per second of all responses together, 0 holds them back."""

    def __init__(self, target: str, rate: float) -> None:
        self.host = ""
        """Its address, `127.0.0.1:port`."""
        self.rate = rate
        self._target = target
        self._tokens = 0.0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side closes it."""
        host, _, port = self._target.rpartition(":")
        try:
            upstream, requests = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        forward = asyncio.create_task(self._forward(reader, requests))
        try:
            while data := await upstream.read(16384):
                while self._tokens < len(data):
                    await asyncio.sleep(_STEP_SECONDS)
                self._tokens -= len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            forward.cancel()
            requests.close()
            writer.close()

    async def refill(self) -> None:
        """Allow responses at the rate until cancelled."""
        while True:
            await asyncio.sleep(_STEP_SECONDS)
            self._tokens = min(self._tokens + self.rate * _STEP_SECONDS, max(self.rate, 16384))

    async def _forward(self, reader: asyncio.StreamReader, requests: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(16384):
                requests.write(data)
                await requests.drain()


@asynccontextmanager
async def slow_proxy(target: str, rate: float) -> AsyncIterator[SlowProxy]:
    """Run a proxy in front of a registry at `target` (`host:port`)."""
    proxy = SlowProxy(target, rate)
    tasks: set[asyncio.Task[None]] = set()

    def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy.handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(start, "127.0.0.1", 0)
    refill = asyncio.create_task(proxy.refill())
    address = server.sockets[0].getsockname()
    proxy.host = f"{address[0]}:{address[1]}"
    try:
        yield proxy
    finally:
        refill.cancel()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
