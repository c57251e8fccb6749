"""Volumes that grow, before and while a pod uses them, and limits that change."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.meta import from_document
from pykubelet.api.storage import CsiDriver
from pykubelet.pluginmanager.client import PluginError
from pykubelet.volumes.csi.csinode import AttachLimitUpdater, CsiNodeManager
from pykubelet.volumes.csi.drivers import CsiDriverInformer, CsiNodePublisher, Drivers
from pykubelet.volumes.csi.types import NodeFacts
from pykubelet.volumes.errors import VolumeLimitExceeded, VolumePluginError
from tests.support.csi import NODE, Rig, StorageApi, api_of, make_pod, needs_root, persistent
from tests.support.csi_driver.process import DriverProcess

MakeDriver = Callable[..., DriverProcess]


def claim(
    rig: Rig, capacity: str = "16Mi", allocated: str = "32Mi", stage: str = "NodeResizePending"
) -> None:
    """Have the claim as a resizer leaves it."""
    status: dict[str, Any] = {"phase": "Bound", "capacity": {"storage": capacity}}
    if allocated:
        status |= {"allocatedResources": {"storage": allocated}}
    if stage:
        status |= {"allocatedResourceStatuses": {"storage": stage}}
        status |= {"conditions": [{"type": "FileSystemResizePending", "status": "True"}]}
    spec = {"resources": {"requests": {"storage": allocated or "32Mi"}}}
    api_of(rig).put("persistentvolumeclaims", "claim", "shop", spec=spec, status=status)


def status(rig: Rig) -> dict[str, Any]:
    found: dict[str, Any] = api_of(rig).objects[("persistentvolumeclaims", "shop", "claim")]["status"]
    return found


@pytest.mark.machine
@needs_root
async def test_csi_expand_mounted_volume_updates_claim_status(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver()
    rig.driver_object()
    pod = make_pod()
    async with rig.running() as kind:
        await rig.registered()
        mounted = await kind.set_up(persistent(pod, fsType="ext4"))
        assert (driver.volumes / "vol-1.img").stat().st_size == 16 << 20
        claim(rig)
        larger = persistent(pod, fsType="ext4", size="32Mi")
        await kind.set_up(larger)
        assert (driver.volumes / "vol-1.img").stat().st_size == 32 << 20
        assert status(rig) == {
            "phase": "Bound",
            "capacity": {"storage": "32Mi"},
            "allocatedResources": {"storage": "32Mi"},
            "allocatedResourceStatuses": {},
            "conditions": [],
        }
        (asked,) = driver.calls("NodeExpandVolume")
        assert asked["volume_path"] == mounted.path
        assert asked["staging_target_path"].endswith("/globalmount")
        assert asked["capacity_range"] == {"required_bytes": str(32 << 20)}
        message = f'MountVolume.NodeExpandVolume succeeded for volume "pv-vol-1" {NODE}'
        reason = "FileSystemResizeSuccessful"
        assert rig.events == [("pod-u-1", reason, message), ("claim", reason, message)]
        # Nobody is asked again, also when the claim that is at hand is an old one.
        asked_before = len(api_of(rig).asked)
        await kind.set_up(larger)
        assert len(driver.calls("NodeExpandVolume")) == 1
        assert len(api_of(rig).asked) == asked_before
        await kind.tear_down("u-1", "pv-vol-1")
        await kind.unmount_unused(())
    assert (rig.left(), driver.loops_left()) == ([], [])


@pytest.mark.machine
@needs_root
async def test_csi_expand_block_device_expanded_before_pod_starts(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver()
    rig.driver_object()
    claim(rig, allocated="", stage="")
    async with rig.running() as kind:
        await rig.registered()
        mounted = await kind.set_up(persistent(make_pod(), block=True, size="32Mi"))
        with Path(mounted.device).open("rb") as device:
            assert device.seek(0, os.SEEK_END) == 32 << 20
        assert status(rig)["capacity"] == {"storage": "32Mi"}
        (asked,) = driver.calls("NodeExpandVolume")
        assert "block" in asked["volume_capability"]
        devices = rig.root / "plugins/kubernetes.io/csi/volumeDevices"
        assert asked["volume_path"] == str(devices / "publish/pv-vol-1/u-1"), "where it was published"
        assert asked["staging_target_path"] == str(devices / "staging/pv-vol-1")
        await kind.tear_down("u-1", "pv-vol-1")
        await kind.unmount_unused(())
    assert (rig.left(), driver.loops_left()) == ([], [])


@pytest.mark.machine
@needs_root
async def test_csi_expand_driver_fails_sets_claim_condition_and_event(
    rig: Rig, make_driver: MakeDriver
) -> None:
    driver = make_driver()
    rig.driver_object()
    pod = make_pod()
    larger = persistent(pod, fsType="ext4", size="32Mi")
    claim(rig)
    async with rig.running() as kind:
        await rig.registered()
        driver.behave(fail={"NodeExpandVolume": ["OUT_OF_RANGE", "too large"]})
        words = (
            "Expander.NodeExpand failed to expand the volume : rpc error: code = OutOfRange desc = too large"
        )
        with pytest.raises(VolumePluginError, match=words):
            await kind.set_up(larger)
        assert status(rig)["allocatedResourceStatuses"] == {"storage": "NodeResizeInfeasible"}
        condition = status(rig)["conditions"][-1]
        assert (condition["type"], condition["message"]) == (
            "NodeResizeError",
            f"failed to expand pvc with {words}",
        )
        # A controller has to decide now; the pod can start.
        await kind.set_up(larger)
        claim(rig)
        driver.behave(fail={"NodeExpandVolume": ["INTERNAL", "not now"]})
        await kind.set_up(larger)
        assert rig.events[-1][1:] == (
            "VolumeResizeFailed",
            'NodeExpandVolume.NodeExpandVolume failed for volume "pv-vol-1" : Expander.NodeExpand failed to '
            "expand the volume : rpc error: code = Internal desc = not now",
        )
        assert status(rig)["allocatedResourceStatuses"] == {"storage": "NodeResizeInProgress"}
        driver.behave(fail={"NodeExpandVolume": ["FAILED_PRECONDITION", "in use"]})
        await kind.set_up(larger)
        tries = len(driver.calls("NodeExpandVolume"))
        driver.behave()
        await kind.set_up(larger)
        assert len(driver.calls("NodeExpandVolume")) == tries, "not while it is in use"
        await kind.tear_down("u-1", "pv-vol-1")
        await kind.unmount_unused(())
    assert (rig.left(), driver.loops_left()) == ([], [])


# Limits


class Client:
    """A driver that says how many volumes fit."""

    def __init__(self) -> None:
        self.limit = 5
        self.broken = False
        self.hangs = False
        self.asked = 0

    async def info(self) -> NodeFacts:
        self.asked += 1
        if self.hangs:
            await asyncio.sleep(1000)
        if self.broken:
            raise PluginError("Unavailable", "away")
        return NodeFacts("this", self.limit)


class SomeDrivers(Drivers):
    """Drivers that are there."""

    def __init__(self, **clients: Any) -> None:
        super().__init__(CsiNodePublisher(), lambda uid: None)
        self._clients = clients

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._clients)

    def client(self, name: str) -> Any:
        return self._clients[name]


class Objects(CsiDriverInformer):
    """CSIDrivers of which one is there."""

    period: int | None = None

    def cached(self, name: str) -> CsiDriver:
        spec = {"nodeAllocatableUpdatePeriodSeconds": self.period} if self.period else {}
        return from_document(CsiDriver, {"spec": spec})


@pytest.mark.looptime
async def test_attach_limit_updater_queries_at_csidriver_period() -> None:
    api, client, objects = StorageApi(), Client(), Objects(None)
    limits = AttachLimitUpdater(SomeDrivers(one=client), objects, CsiNodeManager(api, NODE))
    running = asyncio.create_task(limits.run())

    def told() -> Any:
        found = api.objects.get(("csinodes", "", NODE))
        return found["spec"]["drivers"][0]["allocatable"]["count"] if found is not None else None

    await asyncio.sleep(1000)
    assert client.asked == 0
    objects.period = 60
    for listener in objects._listeners:
        listener()
    await asyncio.sleep(61)
    assert (client.asked, told()) == (1, 5)
    client.limit = 3
    await asyncio.sleep(60)
    assert (client.asked, told()) == (2, 3)
    client.broken = True
    await asyncio.sleep(60)
    assert (client.asked, told()) == (3, 3)
    objects.period = None
    for listener in objects._listeners:
        listener()
    await asyncio.sleep(1000)
    assert client.asked == 3
    running.cancel()


@pytest.mark.looptime
async def test_attach_limit_updater_driver_hangs_other_driver_queried() -> None:
    hanging, well, objects = Client(), Client(), Objects(None)
    hanging.hangs, objects.period = True, 60
    drivers = SomeDrivers(a=hanging, b=well)
    running = asyncio.create_task(
        AttachLimitUpdater(drivers, objects, CsiNodeManager(StorageApi(), NODE)).run()
    )
    await asyncio.sleep(65)
    assert (hanging.asked, well.asked) == (1, 1)
    running.cancel()


async def test_csi_node_manager_csinode_of_previous_node_is_replaced() -> None:
    api = StorageApi()
    api.put("csinodes", NODE, "", spec={"drivers": [{"name": "old", "nodeID": "x"}]})
    info = CsiNodeManager(api, NODE)
    assert not info.ready.is_set()
    await info.initialize()
    assert info.ready.is_set()
    found = api.objects[("csinodes", "", NODE)]
    assert found["spec"]["drivers"] == []
    assert found["metadata"]["ownerReferences"][0]["uid"] == f"uid-{NODE}"


@pytest.mark.machine
@needs_root
@pytest.mark.parametrize("period", [None, 60])
async def test_csi_set_up_attach_limit_exceeded_updates_limit_and_raises(
    rig: Rig, make_driver: MakeDriver, period: int | None
) -> None:
    """Drivers whose limits are followed are asked how many do, and the pod will be refused."""
    driver = make_driver("--limit=7")
    rig.driver_object(attachRequired=True, nodeAllocatableUpdatePeriodSeconds=period)
    rig.attach("vol-1", attached=False, attachError={"message": "full", "errorCode": 8})
    async with rig.running() as kind:
        await rig.registered()
        driver.behave(limit=3)
        with pytest.raises(VolumePluginError, match=r"^full$") as caught:
            await kind.set_up(persistent(make_pod()))
        assert isinstance(caught.value, VolumeLimitExceeded) == (period is not None)
        (entry,) = api_of(rig).objects[("csinodes", "", NODE)]["spec"]["drivers"]
        assert entry["allocatable"] == {"count": 3 if period else 7}
    assert rig.left() == []
