"""What the cluster says about drivers and volumes: asked for late, and missed without harm."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from pykubelet.kube.errors import Unreachable
from pykubelet.volumes.csi.attachments import Attachments
from pykubelet.volumes.csi.driver_objects import PATIENCE_SECONDS, DriverObjects
from pykubelet.volumes.csi.node_info import NodeInfo
from pykubelet.volumes.csi.waiting import Waiting
from pykubelet.volumes.errors import KindError
from tests.volumes.csi.conftest import NODE, StorageApi

pytestmark = pytest.mark.looptime


@asynccontextmanager
async def watching(objects: DriverObjects) -> AsyncIterator[None]:
    task = asyncio.create_task(objects.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_drivers_are_watched_when_somebody_asks() -> None:
    api = StorageApi()
    objects = DriverObjects(api)
    changed: list[str] = []
    objects.listen(lambda: changed.append("x"))
    async with watching(objects):
        await asyncio.sleep(100)
        assert api.asked == []
        api.put("csidrivers", "one", "", spec={"attachRequired": False})
        found = await objects.get("one")
        assert found is not None
        assert found.spec.attach_required is False
        assert await objects.get("two") is None
        await asyncio.sleep(1)
        api.put("csidrivers", "two", "", spec={})
        await asyncio.sleep(1)
        assert objects.known("two") is not None
        assert len(changed) == 2


async def test_a_server_that_is_away_is_waited_for_and_then_named() -> None:
    api = StorageApi()
    api.broken = Unreachable("server", "it is away")
    objects = DriverObjects(api)
    async with watching(objects):
        before = asyncio.get_running_loop().time()
        with pytest.raises(KindError, match="the API server has not answered yet"):
            await objects.get("one")
        assert asyncio.get_running_loop().time() - before == pytest.approx(PATIENCE_SECONDS)
        api.broken = None
        # The pauses between tries have grown meanwhile, with chance in them.
        await asyncio.sleep(30)
        assert await objects.get("one") is None


async def test_without_a_cluster_there_are_none() -> None:
    objects = DriverObjects(None)
    assert objects.standalone
    assert await objects.get("one") is None
    assert objects.known("one") is None
    with pytest.raises(KindError, match="must be attached by a cluster, and this node has none"):
        await Attachments(None, NODE, lambda uid: None).publish_context("d", "h", "u")


async def test_the_node_has_its_csi_node_as_soon_as_it_is_registered() -> None:
    api = StorageApi()
    del api.objects[("nodes", "", NODE)]
    info = NodeInfo(api, NODE)
    task = asyncio.create_task(info.initialize())
    await asyncio.sleep(5)
    assert not info.ready.is_set()
    api.put("nodes", NODE, "")
    await asyncio.wait_for(task, 30)
    assert ("csinodes", "", NODE) in api.objects


def test_who_waits_is_woken_once() -> None:
    woken: list[str] = []
    waiting = Waiting(woken.append)
    for what, uid in (("a", "1"), ("a", "2"), ("a", "1"), ("b", "1"), ("c", "3")):
        waiting.note(what, uid)
    waiting.done("c", "3")
    waiting.done("never", "3")
    waiting.there(["a", "c", "d"])
    assert woken == ["1", "2"]
    waiting.there(["a"])
    assert woken == ["1", "2"]
    waiting.forget("1")
    assert not waiting
