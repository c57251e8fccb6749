"""Volumes that the kubelet attaches itself (`enableControllerAttachDetach: false`)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.apiserver.errors import Forbidden, NotFound, Unreachable
from pykubelet.volumes.csi.attacher import (
    DIRECTORY,
    TIMEOUT_SECONDS,
    AttachmentRecord,
    AttachmentRecords,
    AttachOperationError,
    KubeletAttacher,
)
from pykubelet.volumes.csi.names import attachment_name, unique_name
from pykubelet.volumes.csi.translation import migrated_inline_volume
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.csi.volume_attachments import AttachLimitExceeded
from pykubelet.volumes.errors import VolumePluginError, failure_event
from pykubelet.volumes.manager import problem_from
from pykubelet.volumes.metrics import VolumeMetrics
from tests.support.csi import NODE, Rig, StorageApi, make_pod, persistent
from tests.support.csi_driver.process import DRIVER

pytestmark = pytest.mark.looptime
NAME = attachment_name("vol-1", DRIVER, NODE)
KEY = ("volumeattachments", "", NAME)


class AttachApi(StorageApi):
    """An API server whose VolumeAttachments stay until their finalizer is removed."""

    def __init__(self) -> None:
        super().__init__()
        self.finalized = True
        self.may_create = True

    async def create(self, resource: Any, obj: Any, namespace: str = "") -> Any:
        if not self.may_create:
            raise Forbidden(403, "Forbidden", 'volumeattachments is forbidden: User "system:node:n"')
        return await super().create(resource, obj, namespace)

    async def delete(self, resource: Any, name: str, namespace: str = "", **options: Any) -> None:
        await self._answer("delete", f"{resource.plural}/{namespace}/{name}", ())
        if (resource.plural, namespace, name) not in self.objects:
            raise NotFound(404, "NotFound")
        if self.finalized:
            self.remove(resource.plural, name, namespace)
        else:
            self.objects[resource.plural, namespace, name]["metadata"]["deletionTimestamp"] = (
                "2026-01-01T00:00:00Z"
            )


class Attaching:
    """An attacher with its API server and a node whose volumes on disk a test sets."""

    def __init__(self, root: Path) -> None:
        self.api = AttachApi()
        self.root = root
        self.events: list[tuple[str, str, str]] = []
        self.on_node: set[str] = set()
        self.numbers = CollectorRegistry()
        self._metrics = VolumeMetrics(self.numbers)
        self.attacher = self.new_process()

    def new_process(self) -> KubeletAttacher:
        return KubeletAttacher(
            self.api,
            NODE,
            self.root,
            lambda pod, kind, reason, message: self.events.append((kind, reason, message)),
            self._metrics,
            lambda name: name in self.on_node,
        )

    def status(self, **status: Any) -> None:
        """Have the external-attacher report."""
        self.api.put("volumeattachments", NAME, "", spec=self.api.objects[KEY]["spec"], status=status)

    async def detach(self, *in_use: str, attacher: KubeletAttacher | None = None) -> int:
        operations = await (attacher or self.attacher).detach_operations(in_use)
        for work in operations.values():
            await work()
        return len(operations)

    def recorded(self) -> list[str]:
        return sorted(path.name for path in (self.root / DIRECTORY).glob("*"))

    def count(self, operation: str, status: str) -> float | None:
        labels = {
            "volume_plugin": f"kubernetes.io/csi:{DRIVER}",
            "operation_name": operation,
            "status": status,
            "migrated": "false",
        }
        return self.numbers.get_sample_value("storage_operation_duration_seconds_count", labels)


@pytest.fixture
def rig(tmp_path: Path) -> Attaching:
    return Attaching(tmp_path)


def volume(uid: str = "u-1", handle: str = "vol-1") -> CsiVolume:
    return CsiVolume.parse(persistent(make_pod(uid), handle))


async def test_attach_creates_attachment_waits_and_records_event(rig: Attaching) -> None:
    task = asyncio.create_task(rig.attacher.attach(volume()))
    await asyncio.sleep(5)
    assert not task.done()
    assert rig.api.objects[KEY]["spec"] == {
        "attacher": DRIVER,
        "nodeName": NODE,
        "source": {"persistentVolumeName": "pv-vol-1"},
    }
    assert rig.events == []
    rig.status(attached=True, attachmentMetadata={"disk": "seven"})
    found = await asyncio.wait_for(task, 10)
    assert found.status.attachment_metadata == {"disk": "seven"}
    message = 'AttachVolume.Attach succeeded for volume "pv-vol-1" '
    assert rig.events == [("Normal", "SuccessfulAttachVolume", message)]
    assert rig.count("volume_attach", "success") == 1


async def test_attach_attached_volume_returns_without_event(rig: Attaching) -> None:
    rig.api.put("volumeattachments", NAME, "", status={"attached": True})
    await rig.attacher.attach(volume())
    await rig.attacher.attach(volume("u-2"))
    assert rig.events == []
    assert rig.recorded() == [f"{NAME}.json"], "the kubelet detaches it, whoever attached it"


async def test_attach_driver_reports_error_raises_failed_attach_volume(rig: Attaching) -> None:
    task = asyncio.create_task(rig.attacher.attach(volume()))
    await asyncio.sleep(1)
    rig.status(attachError={"message": "no such disk"})
    with pytest.raises(VolumePluginError, match=r"^no such disk$") as caught:
        await task
    text = problem_from("pv-vol-1", caught.value, None, block=True).text
    assert text == 'AttachVolume.Attach failed for volume "pv-vol-1" : no such disk'
    assert failure_event(text) == "FailedAttachVolume"
    assert rig.count("volume_attach", "fail-unknown") == 1
    rig.status(attachError={"message": "full", "errorCode": 8})
    with pytest.raises(AttachLimitExceeded):
        await rig.attacher.attach(volume())


async def test_attach_not_attached_in_time_raises_with_driver_and_volume(rig: Attaching) -> None:
    started = asyncio.get_running_loop().time()
    with pytest.raises(
        AttachOperationError,
        match=f"^timed out waiting for external-attacher of {DRIVER} CSI driver to attach volume vol-1$",
    ):
        await rig.attacher.attach(volume())
    assert TIMEOUT_SECONDS - 7 <= asyncio.get_running_loop().time() - started <= TIMEOUT_SECONDS
    assert rig.api.count("get") < 60, "polls are spaced"


async def test_attach_permission_missing_raises_with_remedy(rig: Attaching) -> None:
    rig.api.may_create = False
    with pytest.raises(AttachOperationError, match="grant create and delete on volumeattachments") as caught:
        await rig.attacher.attach(volume())
    assert caught.value.action == "AttachVolume.Attach failed"


async def test_attach_unobserved_attachment_is_created(rig: Attaching) -> None:
    """Verify that the node authorizer's denial for an unknown object counts as missing."""
    message = "no relationship found between node 'n' and this object"
    rig.api.refusals = [Forbidden(403, "Forbidden", message)]
    task = asyncio.create_task(rig.attacher.attach(volume()))
    await asyncio.sleep(1)
    rig.status(attached=True)
    await asyncio.wait_for(task, 10)


async def test_attach_api_server_away_raises_and_creates_nothing(rig: Attaching) -> None:
    rig.api.broken = Unreachable("https://192.0.2.1:6443", "it is away")
    with pytest.raises(AttachOperationError, match="it is away"):
        await rig.attacher.attach(volume())
    assert KEY not in rig.api.objects


async def test_attach_migrated_inline_volume_sends_inline_spec(rig: Attaching) -> None:
    pod = make_pod(volumes=[{"name": "v", "awsElasticBlockStore": {"volumeID": "vol-aws"}}])
    found = CsiVolume.parse(migrated_inline_volume(pod, pod.spec.volumes[0]))
    name = attachment_name(found.handle, found.driver, NODE)
    task = asyncio.create_task(rig.attacher.attach(found))
    await asyncio.sleep(1)
    source = rig.api.objects["volumeattachments", "", name]["spec"]["source"]
    assert source["inlineVolumeSpec"]["csi"]["volumeHandle"] == "vol-aws"
    assert "persistentVolumeName" not in source
    task.cancel()


async def test_detach_unused_volume_deletes_attachment_and_record(rig: Attaching) -> None:
    rig.api.put("volumeattachments", NAME, "", status={"attached": True})
    await rig.attacher.attach(volume())
    assert await rig.detach("pv-vol-1") == 0, "a pod requires it"
    rig.on_node.add(unique_name(DRIVER, "vol-1"))
    await rig.detach()
    assert KEY in rig.api.objects, "it is still staged"
    rig.on_node.clear()
    await rig.detach(attacher=rig.new_process())
    assert KEY not in rig.api.objects
    assert rig.recorded() == []
    assert not (rig.root / DIRECTORY.parent).exists()
    assert rig.count("volume_detach", "success") == 1


async def test_detach_attach_cancelled_before_creation_removes_record(rig: Attaching) -> None:
    """Verify that a kubelet killed between record and creation leaves nothing behind."""
    AttachmentRecords(rig.root).add(NAME, AttachmentRecord(DRIVER, "vol-1", "pv-vol-1"))
    await rig.detach()
    assert rig.recorded() == []


async def test_detach_waits_for_external_attacher(rig: Attaching) -> None:
    rig.api.put("volumeattachments", NAME, "", status={"attached": True})
    await rig.attacher.attach(volume())
    rig.api.finalized = False
    task = asyncio.create_task(rig.detach())
    await asyncio.sleep(10)
    assert not task.done()
    again = asyncio.create_task(rig.attacher.attach(volume("u-2")))
    await asyncio.sleep(10)
    assert not again.done(), "the next pod waits for the end of the detach operation"
    rig.api.remove("volumeattachments", NAME, "")
    await asyncio.wait_for(task, 10)
    await asyncio.sleep(1)
    assert "deletionTimestamp" not in rig.api.objects[KEY]["metadata"], "attached again"
    rig.status(attached=True)
    await asyncio.wait_for(again, 10)
    assert rig.recorded() == [f"{NAME}.json"]


async def test_detach_driver_reports_error_keeps_record_for_retry(rig: Attaching) -> None:
    rig.api.put("volumeattachments", NAME, "", status={"attached": True, "detachError": {"message": "busy"}})
    await rig.attacher.attach(volume())
    rig.api.finalized = False
    with pytest.raises(VolumePluginError, match=r"^busy$"):
        await rig.detach()
    assert rig.recorded() == [f"{NAME}.json"]
    rig.api.finalized = True
    await rig.detach()
    assert rig.recorded() == []


def test_attachment_records_unreadable_file_is_skipped(tmp_path: Path) -> None:
    records = AttachmentRecords(tmp_path)
    assert records.all() == {}
    record = AttachmentRecord(DRIVER, "vol-1", "pv")
    records.add("csi-a", record)
    (tmp_path / DIRECTORY / "csi-b.json").write_text("{")
    assert records.all() == {"csi-a": record}
    records.remove("csi-a")
    records.remove("csi-a")
    assert (tmp_path / DIRECTORY / "csi-b.json").exists()


async def test_csi_plugin_kubelet_attaches_and_detaches_by_itself(tmp_path: Path) -> None:
    """Verify the whole plugin: no driver is registered, so the volume is attached and then detached."""
    api = AttachApi()
    made = Rig(tmp_path, api)
    kind = made.new_kind(attaches=True)
    made.driver_object(attachRequired=True)
    api.put("volumeattachments", NAME, "", status={"attached": True, "attachmentMetadata": {"a": "b"}})
    assert await kind.attachments.publish_context(volume()) == {"a": "b"}
    await kind.unmount_unused(["pv-vol-1"])
    assert KEY in api.objects
    await kind.unmount_unused([])
    assert KEY not in api.objects
