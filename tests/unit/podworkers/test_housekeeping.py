"""Housekeeping: the period of the garbage collection."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.podworkers.housekeeping import GC_SECONDS, Housekeeping
from pykubelet.util.tasks import TaskScope


@pytest.mark.looptime
async def test_housekeeping_collects_garbage_every_minute() -> None:
    clock, collections = asyncio.get_running_loop().time, list[float]()

    async def run_once() -> None:
        collections.append(clock())

    async def update_qos(_: object) -> None:
        return

    nothing: Any = SimpleNamespace(
        all_reported=True,
        uids=set,
        desired_uids=set,
        pods=dict,
        update_qos=update_qos,
        tidy=lambda _: None,
    )
    pleg: Any = SimpleNamespace(pods={}, health=lambda: None)
    container_gc: Any = SimpleNamespace(run_once=run_once)
    async with TaskScope() as scope:
        subject = Housekeeping(
            nothing,
            nothing,
            pleg,
            nothing,
            nothing,
            nothing,
            pod_states=nothing,
            container_gc=container_gc,
            retain=(),
            scope=scope,
        )
        for _ in range(91):
            subject.run_once()
            await asyncio.sleep(2)
    assert [round(after - collections[0]) for after in collections] == [0, GC_SECONDS, 120, 180]
