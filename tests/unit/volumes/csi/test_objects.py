"""What the cluster says about drivers and volumes: asked for late, and missed without harm."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pykubelet.apiserver.errors import Unreachable
from pykubelet.volumes.csi.csinode import CsiNodeManager
from pykubelet.volumes.csi.drivers import SYNC_TIMEOUT_SECONDS, CsiDriverInformer, PodWaiters
from pykubelet.volumes.csi.names import unique_name
from pykubelet.volumes.csi.types import NodeFacts
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.csi.volume_attachments import Attachments
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError
from tests.support.csi import NODE, Rig, StorageApi, make_pod, persistent
from tests.support.csi_driver.process import DRIVER

pytestmark = pytest.mark.looptime


def csi_volume(uid: str) -> CsiVolume:
    return CsiVolume.parse(persistent(make_pod(uid), "h"))


@asynccontextmanager
async def watching(objects: CsiDriverInformer) -> AsyncIterator[None]:
    task = asyncio.create_task(objects.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_csi_driver_informer_starts_watch_on_first_get() -> None:
    api = StorageApi()
    objects = CsiDriverInformer(api)
    changed: list[str] = []
    objects.add_listener(lambda: changed.append("x"))
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
        assert objects.cached("two") is not None
        assert len(changed) == 2


async def test_csi_driver_informer_api_server_down_raises_after_timeout() -> None:
    api = StorageApi()
    api.broken = Unreachable("server", "it is away")
    objects = CsiDriverInformer(api)
    async with watching(objects):
        before = asyncio.get_running_loop().time()
        with pytest.raises(VolumePluginError, match="the API server has not answered yet"):
            await objects.get("one")
        assert asyncio.get_running_loop().time() - before == pytest.approx(SYNC_TIMEOUT_SECONDS)
        api.broken = None
        # The pauses between tries have grown meanwhile, with chance in them.
        await asyncio.sleep(30)
        assert await objects.get("one") is None


async def test_csi_driver_informer_standalone_returns_none() -> None:
    objects = CsiDriverInformer(None)
    assert objects.standalone
    assert await objects.get("one") is None
    assert objects.cached("one") is None
    with pytest.raises(VolumePluginError, match="must be attached by a cluster, and this node has none"):
        await Attachments(None, NODE, lambda uid: None).publish_context(csi_volume("u"))


async def test_csi_node_manager_creates_csinode_after_node_registration() -> None:
    api = StorageApi()
    del api.objects[("nodes", "", NODE)]
    info = CsiNodeManager(api, NODE)
    task = asyncio.create_task(info.initialize())
    await asyncio.sleep(5)
    assert not info.ready.is_set()
    api.put("nodes", NODE, "")
    await asyncio.wait_for(task, 30)
    assert ("csinodes", "", NODE) in api.objects


async def test_csi_plugin_node_is_not_ready_until_csinode_exists(tmp_path: Path) -> None:
    api = StorageApi()
    del api.objects[("nodes", "", NODE)]
    reports: list[str] = []
    rig = Rig(tmp_path, api)
    kind = rig.new_kind(on_ready=lambda: reports.append(kind.problem))
    task = asyncio.create_task(kind.run())
    await asyncio.sleep(5)
    assert kind.problem == "CSINode is not yet initialized"
    assert reports == []
    api.put("nodes", NODE, "")
    await asyncio.sleep(30)
    assert reports == [""], "the status is reported as soon as the node is ready"
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert Rig(tmp_path, None).kind.problem == "", "a standalone node has no CSINode"


async def test_csi_node_manager_old_csinode_gets_migrated_plugins_annotation() -> None:
    api = StorageApi()
    await CsiNodeManager(api, NODE).initialize()
    meta = api.objects[("csinodes", "", NODE)]["metadata"]
    told = meta["annotations"].pop("storage.alpha.kubernetes.io/migrated-plugins")
    await CsiNodeManager(api, NODE).initialize()
    again = api.objects[("csinodes", "", NODE)]["metadata"]
    assert again["annotations"]["storage.alpha.kubernetes.io/migrated-plugins"] == told
    version = again["resourceVersion"]
    await CsiNodeManager(api, NODE).initialize()
    assert api.objects[("csinodes", "", NODE)]["metadata"]["resourceVersion"] == version, "nothing to say"


async def test_csi_node_manager_install_during_uninstall_keeps_driver() -> None:
    """By another socket, so that nobody has it wait."""
    api = SlowApi()
    info = CsiNodeManager(api, NODE)
    facts = NodeFacts("this")
    await info.install("d", facts)
    known: set[str] = set()
    leaving = asyncio.create_task(info.uninstall("d", lambda: "d" not in known))
    await asyncio.wait_for(api.removing.wait(), 30)
    known.add("d")
    coming = asyncio.create_task(info.install("d", facts))
    await asyncio.sleep(1)
    api.go_on.set()
    await asyncio.gather(leaving, coming)
    assert [one["name"] for one in api.objects[("csinodes", "", NODE)]["spec"]["drivers"]] == ["d"]
    annotations = api.objects[("nodes", "", NODE)]["metadata"]["annotations"]
    assert annotations["csi.volume.kubernetes.io/nodeid"] == '{"d":"this"}'


class SlowApi(StorageApi):
    """An API server that takes its time to take a driver from a CSINode."""

    def __init__(self) -> None:
        super().__init__()
        self.removing, self.go_on = asyncio.Event(), asyncio.Event()

    async def patch(self, resource: Any, name: str, patch: Any, *args: Any, **kinds: Any) -> Any:
        if "$patch" in str(patch):
            self.removing.set()
            await self.go_on.wait()
        return await super().patch(resource, name, patch, *args, **kinds)


async def test_csi_unmount_unused_waiters_of_removed_pods_deleted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, StorageApi())
    for uid in ("known", "on-disk", "gone"):
        with pytest.raises(VolumeNotReady):
            rig.kind.drivers.client_for_pod("d", uid)
        with pytest.raises(VolumeNotReady):
            await rig.kind.attachments.publish_context(csi_volume(uid))
    rig.pods["known"] = make_pod("known")
    (rig.root / "pods/on-disk").mkdir(parents=True)
    await rig.kind.unmount_unused(())
    for waited_for, name in ((rig.kind.drivers, "d"), (rig.kind.attachments, unique_name(DRIVER, "h"))):
        rig.woken.clear()
        waited_for._waiters.wake_all([name])
        assert rig.woken == ["known", "on-disk"]


def test_pod_waiters_wake_all_wakes_each_pod_once() -> None:
    woken: list[str] = []
    waiting = PodWaiters(woken.append)
    for what, uid in (("a", "1"), ("a", "2"), ("a", "1"), ("b", "1"), ("c", "3")):
        waiting.add(what, uid)
    waiting.remove("c", "3")
    waiting.remove("never", "3")
    waiting.wake_all(["a", "c", "d"])
    assert woken == ["1", "2"]
    waiting.wake_all(["a"])
    assert woken == ["1", "2"]
    waiting.forget("1")
    assert not waiting
