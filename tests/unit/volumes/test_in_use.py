"""Attached volumes are reported as in use before anybody touches them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.pod import Pod
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes import attach as in_use
from pykubelet.volumes import manager as pod_volumes
from pykubelet.volumes import registry as kinds
from pykubelet.volumes.attach import NotReported, VolumesInUseReporter
from pykubelet.volumes.errors import VolumeError, VolumeLimitExceeded
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount
from tests.support.volumes import Server, Shelf, pod_with, volumes_at

CLOUD = {"name": "cloud", "glusterfs": {"path": "p"}}
PLAIN = {"name": "data", "emptyDir": {}}
NAME = "cloud/1"


class Cloud(BaseVolumePlugin):
    """A kind whose volumes are attached."""

    directory_name = "example.com~cloud"

    def __init__(self, host: VolumeHost) -> None:
        self.host = host
        self.mounts: list[str] = []

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        await self.host.report_in_use(volume, NAME)
        self.mounts.append(volume.uid)
        return MountedVolume("/cloud", attached=NAME)


class Requests:
    """The requests of a new report."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


class Node:
    """A node whose status is reported when somebody says so."""

    def __init__(self, volumes: PodVolumes, cloud: Cloud, requests: Requests) -> None:
        self.volumes = volumes
        self.cloud = cloud
        self._requests = requests

    @property
    def rings(self) -> int:
        return self._requests.count

    def report(self) -> None:
        self.volumes.attached.set_reported(self.volumes.attached.in_use() or [])


@pytest.fixture
async def scope() -> AsyncIterator[TaskScope]:
    async with TaskScope() as tasks:
        yield tasks


@pytest.fixture(autouse=True)
def cloud_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    make = kinds.load_plugins
    monkeypatch.setattr(pod_volumes, "load_plugins", lambda host: make(host) | {"glusterfs": Cloud(host)})


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def volumes(root: Path, shelf: Shelf, scope: TaskScope, requests: Requests) -> PodVolumes:
    return volumes_at(root, shelf, tasks=scope, server=Server(), on_in_use_change=requests.add)


@pytest.fixture
def node(volumes: PodVolumes, requests: Requests) -> Node:
    cloud = volumes.plugins["glusterfs"]
    assert isinstance(cloud, Cloud)
    return Node(volumes, cloud, requests)


async def rung(node: Node, times: int = 1) -> None:
    async with asyncio.timeout(30):
        while node.rings < times:
            await asyncio.sleep(0)


def pod(uid: str = "u-1", *volumes: dict[str, Any]) -> Pod:
    return pod_with(*(volumes or (CLOUD,)), metadata={"uid": uid, "name": uid})


async def test_mount_standalone_does_not_wait_for_report(root: Path, shelf: Shelf, scope: TaskScope) -> None:
    volumes = volumes_at(root, shelf, tasks=scope)
    assert (await volumes.mount(pod())).keys() == {"cloud"}


async def test_mount_attached_volume_waits_until_reported_in_use(volumes: PodVolumes, node: Node) -> None:
    mounting = asyncio.ensure_future(volumes.mount(pod()))
    await rung(node)
    assert volumes.attached.in_use() == [NAME]
    volumes.attached.set_reported(["another"])
    await asyncio.sleep(0.01)
    assert node.cloud.mounts == []
    node.report()
    await mounting
    assert node.cloud.mounts == ["u-1"]
    await volumes.mount(pod("u-2"))
    assert node.rings == 1, "it is known to be in use"


async def test_mount_second_pod_waits_until_reported_in_use(volumes: PodVolumes, node: Node) -> None:
    mounting = [asyncio.ensure_future(volumes.mount(pod(uid))) for uid in ("u-1", "u-2")]
    await rung(node)
    await asyncio.sleep(0.01)
    assert node.cloud.mounts == []
    node.report()
    await asyncio.gather(*mounting)


async def test_mount_earlier_report_is_ignored(volumes: PodVolumes, node: Node) -> None:
    """The volume was given back, so a report without it may be on its way."""
    volumes.attached.set_reported([NAME])
    mounting = asyncio.ensure_future(volumes.mount(pod()))
    await rung(node)
    await asyncio.sleep(0.01)
    assert node.cloud.mounts == []
    volumes.attached.set_reported([])
    await asyncio.sleep(0.01)
    assert node.cloud.mounts == []
    node.report()
    await mounting


async def test_unmount_pod_waiting_for_report_removes_volume_from_in_use(
    volumes: PodVolumes, node: Node
) -> None:
    mounting = asyncio.ensure_future(volumes.mount(pod()))
    await rung(node)
    mounting.cancel()
    with suppress(asyncio.CancelledError):
        await mounting
    await volumes.unmount("u-1")
    assert volumes.attached.in_use() == []


async def test_mount_without_attachable_volume_requests_no_report(volumes: PodVolumes, node: Node) -> None:
    assert (await volumes.mount(pod("u-1", PLAIN))).keys() == {"data"}
    assert node.rings == 0


async def test_mount_report_times_out_raises_and_retry_succeeds(
    volumes: PodVolumes, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_use, "REPORT_TIMEOUT_SECONDS", 0.05)
    with pytest.raises(VolumeError) as caught:
        await volumes.mount(pod())
    assert str(caught.value) == (
        'MountVolume.WaitForAttach failed for volume "cloud" : '
        "Volume has not been added to the list of VolumesInUse in the node's volume status"
    )
    assert node.cloud.mounts == []
    node.report()
    await asyncio.sleep(0.5)
    await volumes.mount(pod())


async def test_in_use_kubelet_restarted_includes_reported_until_pods_known(
    volumes: PodVolumes, node: Node, root: Path
) -> None:
    (root / "pods/u-9/volumes" / Cloud.directory_name / "old").mkdir(parents=True)
    assert volumes.attached.in_use() is None
    volumes.attached.set_reported(["cloud/9"])
    mounting = asyncio.ensure_future(volumes.mount(pod()))
    await rung(node)
    assert volumes.attached.in_use() == [NAME, "cloud/9"]
    node.report()
    await mounting
    await volumes.unmount("u-9")
    assert volumes.attached.in_use() == [NAME]


@pytest.mark.looptime
async def test_wait_reported_no_report_raises_after_timeout() -> None:
    reports = VolumesInUseReporter(lambda: None)
    begin = asyncio.get_running_loop().time()
    with pytest.raises(NotReported):
        await reports.wait_reported(NAME, new=True)
    assert asyncio.get_running_loop().time() - begin == in_use.REPORT_TIMEOUT_SECONDS


async def test_mount_attach_limit_exceeded_rejects_pod_after_timeout(
    volumes: PodVolumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(volume: VolumeToMount) -> MountedVolume:
        raise VolumeLimitExceeded("no room for another")

    monkeypatch.setattr(volumes.plugins["glusterfs"], "set_up", full)
    with pytest.raises(VolumeError) as caught:
        await volumes.mount(pod("u-1", CLOUD, PLAIN))
    assert (str(caught.value), caught.value.rejection_reason) == (
        'MountVolume.WaitForAttach failed for volume "cloud" : no room for another',
        "",
    )
    monkeypatch.setattr(pod_volumes, "MOUNT_TIMEOUT_SECONDS", 0.0)
    with pytest.raises(VolumeError) as caught:
        await volumes.mount(pod("u-1", CLOUD, PLAIN))
    assert (str(caught.value), caught.value.rejection_reason) == (
        "Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[cloud], "
        "unattached volumes=[cloud], failed to process volumes=[]: context deadline exceeded",
        "VolumeAttachmentLimitExceeded",
    )
