import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pykubelet.apiserver.errors import Conflict, Forbidden, ServerError, Unreachable
from pykubelet.node.lease import LeaseLoop
from pykubelet.util.tasks import TaskScope
from tests.support.node_status import NOW, MemoryApi, settings

pytestmark = pytest.mark.looptime


class Lifeline:
    def __init__(self) -> None:
        self.api = MemoryApi()
        self.uid = "n1"
        self.loop = LeaseLoop(
            self.api, settings(), lambda: self.uid, self.api.close_all, clock=lambda: NOW, rng=lambda: 0.5
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with TaskScope() as scope:
            scope.start(self.loop.run(), name="lease")
            yield

    def updates(self) -> list[float]:
        pairs = zip(self.api.asked, self.api.times, strict=True)
        return [round(time, 3) for verb, time in pairs if verb == "update leases"]


async def test_lease_loop_renews_every_quarter_duration_with_jitter() -> None:
    line = Lifeline()
    async with line.running():
        await asyncio.sleep(35)
    assert line.api.asked[:2] == ["get leases", "create leases"]
    assert line.updates() == [10.2, 20.4, 30.6]
    assert line.api.lease["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": "vm", "uid": "n1"}
    ]
    assert line.api.lease["spec"] == {
        "holderIdentity": "vm",
        "leaseDurationSeconds": 40,
        "renewTime": "2026-07-24T08:30:00.000000Z",
    }


async def test_lease_loop_node_not_registered_creates_no_lease() -> None:
    line = Lifeline()
    line.uid = ""
    async with line.running():
        await asyncio.sleep(5)
        assert "leases/vm" not in line.api.objects
        line.uid = "n2"
        line.loop.wake()
        await asyncio.sleep(0.1)
        assert line.api.lease["metadata"]["ownerReferences"][0]["uid"] == "n2"


async def test_lease_loop_server_unreachable_retries_and_closes_connections() -> None:
    line = Lifeline()
    async with line.running():
        await asyncio.sleep(1)
        line.api.away = Unreachable("https://api", "timed out")
        await asyncio.sleep(10)
        # At 10.2: five tries, and from the second failure on the connections are closed.
        assert len(line.updates()) == 5
        assert line.api.closed == 4
        line.api.away = None
        await asyncio.sleep(7)
        assert round(line.updates()[-1], 1) == 17.2


@pytest.mark.parametrize("err", [ServerError(500), Conflict(409)])
async def test_lease_loop_single_failure_retries_immediately(err: ServerError | Conflict) -> None:
    line = Lifeline()
    async with line.running():
        await asyncio.sleep(1)
        line.api.fails = [err]
        await asyncio.sleep(10)
    assert line.updates() == [10.2, 10.2]
    assert line.api.closed == 0


async def test_lease_loop_forbidden_keeps_connections_open() -> None:
    line = Lifeline()
    async with line.running():
        await asyncio.sleep(1)
        line.api.away = Forbidden(403, "Forbidden", "no")
        await asyncio.sleep(30)
    assert line.api.closed == 0
    assert line.updates() == [10.2, 17.2, 24.2]


async def test_lease_loop_lease_deleted_is_recreated() -> None:
    line = Lifeline()
    async with line.running():
        await asyncio.sleep(1)
        del line.api.objects["leases/vm"]
        line.uid = "n3"
        await asyncio.sleep(10)
    assert line.api.lease["metadata"]["ownerReferences"][0]["uid"] == "n3"
