"""Contention profile: what counts as waiting, time and number of waits, and the limit on stacks."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pykubelet.server import contention
from pykubelet.server.contention import SAMPLE_SECONDS, ContentionProfile

STEP = 0.25


@asynccontextmanager
async def running(*coroutines: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    await asyncio.sleep(0)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def entries(profile: ContentionProfile) -> list[tuple[float, int, list[str]]]:
    """Return seconds, number of waits and functions of each stack of this module, in order."""
    found = []
    for part in re.split(r"\n(?=\d)", profile.text())[1:]:
        head, *frames = part.splitlines()
        cycles, count, _ = head.split()
        names = [frame.split("\t")[1] for frame in frames]
        if __file__ in part or names == ["further stacks"] or "event loop" in names[0]:
            found.append((int(cycles) / 1e9, int(count), names))
    return found


async def locked(lock: asyncio.Lock) -> None:
    async with lock:
        pass


async def outer(lock: asyncio.Lock) -> None:
    await locked(lock)


async def test_sample_waits_for_lock_charged_by_stack() -> None:
    profile, lock = ContentionProfile(), asyncio.Lock()
    async with lock, running(outer(lock), outer(lock), locked(lock)):
        for _ in range(3):
            profile.sample(STEP)
    profile.sample(STEP)
    assert entries(profile) == [
        (1.5, 2, ["Lock.acquire", "_ContextManagerMixin.__aenter__", "locked", "outer"]),
        (0.75, 1, ["Lock.acquire", "_ContextManagerMixin.__aenter__", "locked"]),
    ]


async def test_sample_wait_interrupted_counted_again() -> None:
    profile, queue = ContentionProfile(), asyncio.Queue[int]()

    async def work() -> None:
        while True:
            await queue.get()
            await asyncio.sleep(0)

    async with running(work()):
        profile.sample(STEP)
        queue.put_nowait(1)
        await asyncio.sleep(0)
        profile.sample(STEP)
        for _ in range(3):
            await asyncio.sleep(0)
        profile.sample(STEP)
    (found,) = [entry for entry in entries(profile) if "Queue.get" in entry[2]]
    assert found[:2] == (0.5, 2)


async def test_sample_sleep_network_and_new_task_not_charged() -> None:
    profile = ContentionProfile()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)
        writer.close()

    async def read(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, running(asyncio.sleep(3600), read(server.sockets[0].getsockname()[1])):
        await asyncio.sleep(0.05)
        profile.sample(STEP)
    assert not [entry for entry in entries(profile) if {"read", "serve"} & {*entry[2]}]


async def test_run_held_event_loop_charged() -> None:
    profile = ContentionProfile()
    async with running(profile.run()):
        time.sleep(SAMPLE_SECONDS + 0.2)
        await asyncio.sleep(0.05)
    (found,) = [entry for entry in entries(profile) if entry[2] == ["event loop, held by callbacks"]]
    assert found[0] >= 0.15
    assert found[1] == 1


async def test_sample_many_stacks_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "MAX_STACKS", 1)
    profile, lock = ContentionProfile(), asyncio.Lock()
    async with lock, running(outer(lock)):
        profile.sample(STEP)
        async with running(locked(lock)):
            profile.sample(STEP)
    assert len(profile._waits) == 1
    assert entries(profile)[-1][2] == ["further stacks"]


def test_text_without_samples_is_empty_profile() -> None:
    assert ContentionProfile().text() == "--- contention:\ncycles/second=1000000000\n"
