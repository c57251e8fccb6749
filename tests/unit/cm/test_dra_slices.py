"""When what drivers offered is taken back; all times are the loop's."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest

from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.errors import KubeError, NotFound, TimedOut
from pykubelet.cm.dra.slices import ResourceSliceCleaner
from pykubelet.util.tasks import TaskScope

pytestmark = pytest.mark.looptime


class Server:
    """An API server as far as it is asked here: when, and for what."""

    def __init__(self, *failures: KubeError) -> None:
        self.asked: list[tuple[float, str]] = []
        self._failures = list(failures)

    async def delete_all(self, resource: Any, namespace: str = "", *, params: Sequence[Any] = ()) -> None:
        assert resource.path(namespace) == "/apis/resource.k8s.io/v1/resourceslices"
        ((name, selector),) = params
        assert name == "fieldSelector"
        self.asked.append((round(asyncio.get_running_loop().time(), 3), selector))
        if self._failures:
            raise self._failures.pop(0)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def at_once() -> None:
    return


def slices(server: Server, tasks: TaskScope) -> ResourceSliceCleaner:
    return ResourceSliceCleaner(cast(ApiClient, server), "n1", tasks, at_once)


async def test_resource_slice_cleaner_start_deletes_all_after_node_registered() -> None:
    server, there = Server(), asyncio.Event()

    async def node_there() -> None:
        await there.wait()

    async with TaskScope() as tasks:
        ResourceSliceCleaner(cast(ApiClient, server), "n1", tasks, node_there).start()
        await asyncio.sleep(60)
        assert server.asked == []
        there.set()
        await asyncio.sleep(1)
    assert server.asked == [(60, "spec.nodeName=n1")]


async def test_resource_slice_cleaner_driver_gone_deletes_after_30_seconds() -> None:
    server = Server()
    async with TaskScope() as tasks:
        taking = slices(server, tasks)
        taking.driver_changed("d", False)
        await asyncio.sleep(20)
        taking.driver_changed("d", False)  # the time counts from the first loss
        taking.driver_changed("e", False)
        await asyncio.sleep(9.9)
        assert server.asked == []
        await asyncio.sleep(0.2)
        assert server.asked == [(30, "spec.nodeName=n1,spec.driver=d")]
        await asyncio.sleep(100)
        assert server.asked[1:] == [(50, "spec.nodeName=n1,spec.driver=e")]
        taking.driver_changed("d", True)
        taking.driver_changed("d", False)
        await asyncio.sleep(100)
    assert len(server.asked) == 3


async def test_resource_slice_cleaner_driver_returns_slices_stay() -> None:
    server = Server()
    async with TaskScope() as tasks:
        taking = slices(server, tasks)
        for _ in range(3):
            taking.driver_changed("d", False)
            await asyncio.sleep(25)
            taking.driver_changed("d", True)
        await asyncio.sleep(100)
    assert server.asked == []


async def test_resource_slice_cleaner_api_server_down_retries_with_backoff() -> None:
    away = [TimedOut("s", "no answer in time") for _ in range(12)]
    server = Server(*away)
    async with TaskScope() as tasks:
        slices(server, tasks).start()
        await asyncio.sleep(86400)
    times = [when for when, _ in server.asked]
    pauses = [after - before for before, after in pairwise(times)]
    assert len(pauses) == 12
    assert 1 <= pauses[0] <= 2
    assert max(pauses) <= 600


async def test_resource_slice_cleaner_resource_not_found_is_not_retried() -> None:
    server = Server(NotFound(404, "NotFound", "the server could not find the requested resource"))
    async with TaskScope() as tasks:
        slices(server, tasks).start()
        await asyncio.sleep(3600)
    assert len(server.asked) == 1


async def test_resource_slice_cleaner_driver_returns_retries_stop() -> None:
    server = Server(*[TimedOut("s", "no answer in time") for _ in range(100)])
    async with TaskScope() as tasks:
        taking = slices(server, tasks)
        taking.driver_changed("d", False)
        await asyncio.sleep(40)
        asked = len(server.asked)
        assert asked > 1
        taking.driver_changed("d", True)
        await asyncio.sleep(3600)
    assert len(server.asked) == asked
