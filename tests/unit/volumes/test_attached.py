"""Disks that the cluster's controllers attach are touched when they say so, and not before."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from pykubelet.api.node import AttachedVolume
from pykubelet.api.node import Node as ApiNode
from pykubelet.apiserver.client import ApiClient
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.attach import ClusterNode
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.plugin import MemoryLimits, MountedVolume, VolumeOptions
from pykubelet.volumes.plugins.network_disk import NetworkDiskPlugin
from tests.support.volumes import ALLOCATABLE, Node, Server, Shelf, pod_with

IQN = "iqn.2026-01.com.example:disk"
NAME = f"kubernetes.io/iscsi/192.0.2.7:{IQN}:4"
WAITING = (
    f'MountVolume.WaitForAttach failed for volume "v" : volume {NAME} is not attached according to '
    "the status of node node-1"
)
DISK = {"name": "v", "iscsi": {"targetPortal": "192.0.2.7", "iqn": IQN, "lun": 4}}


class Rig:
    """A node of a cluster with one kind of disks, of which nothing is really mounted."""

    def __init__(self, root: Path, shelf: Shelf, scope: TaskScope, *, attach_detach: bool = True) -> None:
        self.server = Server()
        self.node = ApiNode()
        self.server.objects["nodes", "", "node-1"] = self.node
        self.volumes = PodVolumes(
            root,
            objects=shelf,
            node=Node(),
            memory=MemoryLimits(lambda pod: None, ALLOCATABLE),
            options=VolumeOptions(node_name="node-1"),
            cluster=ClusterNode(
                cast(ApiClient, self.server), attach_detach=attach_detach, on_in_use_change=self.report
            ),
            tasks=scope,
        )
        self.woken: list[str] = []
        self.bound: list[str] = []
        self.volumes.add_listener(self.woken.append)

    def report(self) -> None:
        """Report the node's status at once."""
        self.volumes.attached.set_reported(self.volumes.attached.in_use() or [])

    def attach(self, *names: str) -> None:
        """Have the controllers attach this, and the node see it."""
        self.node.status.volumes_attached[:] = [AttachedVolume(name, "") for name in names]
        attached = [{"name": name, "devicePath": ""} for name in names]
        self.volumes.attached.node_changed(json.dumps({"volumesAttached": attached}).encode())


@pytest.fixture
async def scope() -> AsyncIterator[TaskScope]:
    async with TaskScope() as tasks:
        yield tasks


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pods that were given the disk."""
    given: list[str] = []

    async def bind(
        self: object, wanted: Any, disk: Path, place: Path, label: str, *, read_only: bool
    ) -> None:
        disk.mkdir(parents=True, exist_ok=True)
        given.append(wanted.uid)

    async def as_device(self: object, wanted: Any, name: str, *, read_only: bool) -> MountedVolume:
        given.append(wanted.uid)
        return MountedVolume("", device="/dev/x")

    monkeypatch.setattr(NetworkDiskPlugin, "_bind", bind)
    monkeypatch.setattr(NetworkDiskPlugin, "_as_device", as_device)
    return given


async def failure(volumes: PodVolumes, uid: str = "u-1") -> str:
    with pytest.raises(VolumeError) as caught:
        await volumes.mount(pod_with(DISK, metadata={"uid": uid}))
    return str(caught.value)


async def test_pod_volumes_disk_not_attached_mount_waits_until_attached(
    root: Path, shelf: Shelf, scope: TaskScope, bound: list[str]
) -> None:
    rig = Rig(root, shelf, scope)
    assert await failure(rig.volumes) == WAITING
    assert rig.volumes.attached.in_use() == [NAME], "the controllers are told that it is wanted"
    rig.attach(f"kubernetes.io/iscsi/192.0.2.7:{IQN}:5")
    assert (bound, rig.woken) == ([], [])
    rig.attach(NAME)
    assert rig.woken == ["u-1"]
    await rig.volumes.mount(pod_with(DISK))
    assert bound == ["u-1"]


async def test_pod_volumes_disk_in_use_until_unmounted_from_node(
    root: Path, shelf: Shelf, scope: TaskScope, bound: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(root, shelf, scope)
    rig.attach(NAME)
    await rig.volumes.mount(pod_with(DISK))
    await rig.volumes.unmount("u-1")
    assert rig.volumes.attached.in_use() == [NAME], "only the pod has left it"

    async def busy(self: object, place: Path, *, as_device: bool) -> None:
        raise OSError(16, "Device or resource busy", str(place))

    with monkeypatch.context() as patch:
        patch.setattr(NetworkDiskPlugin, "_release", busy)
        await rig.volumes.unmount_unused()
    assert rig.volumes.attached.in_use() == [NAME]
    await rig.volumes.unmount_unused()
    assert rig.volumes.attached.in_use() == []


async def test_pod_volumes_collection_during_set_up_keeps_disk_in_use(
    root: Path, shelf: Shelf, scope: TaskScope, bound: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that the disk is in use until it is detached, although its directory is created late."""
    rig = Rig(root, shelf, scope)
    rig.attach(NAME)
    bind, started, go_on = NetworkDiskPlugin._bind, asyncio.Event(), asyncio.Event()

    async def slow(self: Any, *args: Any, **options: Any) -> None:
        started.set()
        await go_on.wait()
        await bind(self, *args, **options)

    monkeypatch.setattr(NetworkDiskPlugin, "_bind", slow)
    task = asyncio.create_task(rig.volumes.mount(pod_with(DISK)))
    await started.wait()
    await rig.volumes.unmount_unused()
    go_on.set()
    await task
    await rig.volumes.unmount("u-1")
    assert rig.volumes.attached.in_use() == [NAME]
    await rig.volumes.unmount_unused()
    assert rig.volumes.attached.in_use() == []


async def test_pod_volumes_pod_removed_while_waiting_disk_not_in_use(
    root: Path, shelf: Shelf, scope: TaskScope, bound: list[str]
) -> None:
    rig = Rig(root, shelf, scope)
    await failure(rig.volumes)
    await rig.volumes.unmount("u-1")
    assert rig.volumes.attached.in_use() == []
    rig.attach(NAME)
    assert rig.woken == []


async def test_pod_volumes_api_server_down_disk_is_not_mounted(
    root: Path, shelf: Shelf, scope: TaskScope, bound: list[str]
) -> None:
    rig = Rig(root, shelf, scope)
    rig.attach(NAME)
    rig.server.away = True
    assert "cannot see whether the volume is attached" in await failure(rig.volumes)
    assert bound == []


async def test_pod_volumes_controller_attach_detach_disabled_mounts_immediately(
    root: Path, shelf: Shelf, scope: TaskScope, bound: list[str]
) -> None:
    """`enableControllerAttachDetach: false`."""
    rig = Rig(root, shelf, scope, attach_detach=False)
    await rig.volumes.mount(pod_with(DISK))
    assert bound == ["u-1"]
    assert rig.volumes.attached.in_use() == [NAME]


async def test_attached_node_status_invalid_wakes_no_pod(
    root: Path, shelf: Shelf, scope: TaskScope, bound: list[str]
) -> None:
    rig = Rig(root, shelf, scope)
    rig.volumes.attached.node_changed(b"[")
    await failure(rig.volumes)
    for status in (b"[", b"{}", b'{"volumesAttached": null}'):
        rig.volumes.attached.node_changed(status)
    assert rig.woken == []
