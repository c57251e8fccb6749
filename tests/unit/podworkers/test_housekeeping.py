"""Housekeeping: what the node's users are told when garbage cannot be collected."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.podworkers.housekeeping import GC_SECONDS, Housekeeping, collect_containers
from pykubelet.transport.errors import Unavailable
from pykubelet.util.tasks import TaskScope


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (Unavailable("ListContainers", "Unavailable", "gone"), "rpc error: code = Unavailable desc = gone"),
        (PermissionError(13, "Permission denied", "/var/log/pods"), "/var/log/pods"),
    ],
)
async def test_housekeeping_failed_collection_recorded_as_node_event(
    failure: Exception, message: str
) -> None:
    events, failures = list[tuple[str, str, str]](), [failure]

    async def collect(**_: object) -> None:
        if failures:
            raise failures.pop()

    async def update_qos(_: object) -> None:
        return

    nothing: Any = SimpleNamespace(
        all_reported=True,
        health=lambda: None,
        pods=dict,
        uids=set,
        desired_uids=set,
        update_qos=update_qos,
        tidy=lambda _: None,
    )
    collector: Any = SimpleNamespace(collect=collect)
    pleg: Any = SimpleNamespace(pods={}, health=lambda: None)
    async with TaskScope() as scope:
        subject = Housekeeping(
            nothing,
            nothing,
            pleg,
            nothing,
            nothing,
            nothing,
            collect=partial(collect_containers, collector, lambda *event: events.append(event)),
            retain=(),
            unreadable=frozenset,
            scope=scope,
        )
        for _ in range(2):
            subject.run_once()
            await asyncio.sleep(GC_SECONDS + 1)
    ((kind, reason, told),) = events
    assert (kind, reason) == ("Warning", "ContainerGCFailed")
    assert message in told
