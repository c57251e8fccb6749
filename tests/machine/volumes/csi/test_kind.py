"""CSI volumes of a real driver process: mounted, used, taken down, with nothing left behind."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pykubelet.linux.loop_devices import loops_of
from pykubelet.volumes.csi import mounter as files
from pykubelet.volumes.csi.names import attachment_name, inline_handle, staging_dir_name, unique_name
from pykubelet.volumes.errors import VolumeNotReady, VolumePluginError
from tests.support.csi import NODE, Rig, api_of, inline, make_pod, needs_root, persistent
from tests.support.csi_driver.backend import is_mounted
from tests.support.csi_driver.process import DRIVER, DriverProcess

pytestmark = [pytest.mark.machine, needs_root]

MakeDriver = Callable[..., DriverProcess]


def data(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((path / "vol_data.json").read_text())
    return found


async def test_csi_inline_volume_standalone_is_published_and_unpublished(
    alone: Rig, make_driver: MakeDriver
) -> None:
    driver = make_driver("--no-stage")
    pod = make_pod()
    wanted = inline(pod, volumeAttributes={"color": "blue"}, nodePublishSecretRef={"name": "key"})
    alone.shelf.secrets["key"] = {"password": b"hush"}
    async with alone.running() as kind:
        await alone.registered()
        mounted = await kind.set_up(wanted)
        path = alone.root / "pods/u-1/volumes/kubernetes.io~csi/data/mount"
        assert mounted.path == str(path)
        assert is_mounted(path)
        assert not mounted.attached
        assert data(path.parent) == {
            "specVolID": "data",
            "volumeHandle": inline_handle("u-1", "data"),
            "driverName": DRIVER,
            "nodeName": NODE,
            "attachmentID": attachment_name(inline_handle("u-1", "data"), DRIVER, NODE),
            "volumeLifecycleMode": "Ephemeral",
        }
        (published,) = driver.calls("NodePublishVolume")
        assert published["secrets"] == {"password": "hush"}
        assert published["volume_context"] == {
            "color": "blue",
            "csi.storage.k8s.io/ephemeral": "true",
            "csi.storage.k8s.io/pod.name": "pod-u-1",
            "csi.storage.k8s.io/pod.namespace": "shop",
            "csi.storage.k8s.io/pod.uid": "u-1",
            "csi.storage.k8s.io/serviceAccount.name": "clerk",
        }
        assert published["volume_capability"] == {
            "access_mode": {"mode": "SINGLE_NODE_WRITER"},
            "mount": {},
        }
        # Setting up again asks nobody for anything.
        assert await kind.set_up(wanted) == mounted
        await kind.tear_down("u-1", "data")
        await kind.unmount_unused(())
    assert driver.names() == ["NodePublishVolume", "NodeUnpublishVolume"]
    assert alone.left() == []


async def test_csi_persistent_volume_two_pods_is_staged_once(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver()
    rig.driver_object(attachRequired=True)
    rig.attach("vol-1", attachmentMetadata={"device": "/dev/x"})
    api_of(rig).put("secrets", "stage", "vault", data={"a": "MQ=="})
    api_of(rig).put("secrets", "publish", "vault", data={"b": "Mg=="})
    source: Any = {
        "fsType": "ext4",
        "volumeAttributes": {"color": "blue"},
        "nodeStageSecretRef": {"name": "stage", "namespace": "vault"},
        "nodePublishSecretRef": {"name": "publish", "namespace": "vault"},
    }
    one = persistent(make_pod("u-1"), mount_options=("sync", "noatime"), **source)
    two = persistent(make_pod("u-2"), read_only=True, mount_options=("sync", "noatime"), **source)
    async with rig.running() as kind:
        await rig.registered()
        first, second = await kind.set_up(one), await kind.set_up(two)
        assert first.attached == unique_name(DRIVER, "vol-1")
        assert kind.in_use() == {first.attached}
        (Path(first.path) / "hello").write_text("from one")
        assert (Path(second.path) / "hello").read_text() == "from one"
        with pytest.raises(OSError, match="Read-only"):
            (Path(second.path) / "more").write_text("x")
        assert (second.read_only, first.read_only) == (True, False)
        staged = rig.root / f"plugins/kubernetes.io/csi/{DRIVER}/{staging_dir_name('vol-1')}"
        (stage,) = driver.calls("NodeStageVolume")
        assert stage == {
            "volume_id": "vol-1",
            "publish_context": {"device": "/dev/x"},
            "staging_target_path": str(staged / "globalmount"),
            "volume_capability": {
                "mount": {"fs_type": "ext4", "mount_flags": ["sync", "noatime"]},
                "access_mode": {"mode": "SINGLE_NODE_WRITER"},
            },
            "secrets": {"a": "1"},
            "volume_context": {"color": "blue"},
        }
        assert data(staged)["volumeHandle"] == "vol-1"
        publish = driver.calls("NodePublishVolume")[1]
        assert publish["staging_target_path"] == str(staged / "globalmount")
        assert publish["publish_context"] == {"device": "/dev/x"}
        assert (publish["secrets"], publish["readonly"]) == ({"b": "2"}, True)
        await kind.tear_down("u-1", "pv-vol-1")
        await kind.unmount_unused({"pv-vol-1"})
        assert (Path(second.path) / "hello").exists()
        # Nobody says that it is in use, but a pod has it.
        await kind.unmount_unused(())
        assert (Path(second.path) / "hello").exists()
        await kind.tear_down("u-2", "pv-vol-1")
        assert kind.in_use() == {first.attached}
        await kind.unmount_unused(())
        assert kind.in_use() == frozenset()
    assert driver.names() == [
        "NodeStageVolume",
        "NodePublishVolume",
        "NodePublishVolume",
        "NodeUnpublishVolume",
        "NodeUnpublishVolume",
        "NodeUnstageVolume",
    ]
    assert (rig.left(), driver.loops_left()) == ([], [])


async def test_csi_driver_without_stage_capability_is_not_staged(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver("--no-stage", "--ability=SINGLE_NODE_MULTI_WRITER")
    rig.driver_object()
    async with rig.running() as kind:
        await rig.registered()
        mounted = await kind.set_up(persistent(make_pod(), modes=["ReadWriteOncePod"]))
        assert is_mounted(Path(mounted.path))
        (published,) = driver.calls("NodePublishVolume")
        assert "staging_target_path" not in published
        assert published["volume_capability"]["access_mode"] == {"mode": "SINGLE_NODE_SINGLE_WRITER"}
        await kind.tear_down("u-1", "pv-vol-1")
        await kind.unmount_unused(())
    assert driver.names() == ["NodePublishVolume", "NodeUnpublishVolume"]
    assert rig.left() == []


async def test_csi_block_volume_is_mapped_as_device(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver()
    rig.driver_object(podInfoOnMount=True)
    wanted = persistent(make_pod(), block=True)
    devices = rig.root / "plugins/kubernetes.io/csi/volumeDevices"
    async with rig.running() as kind:
        await rig.registered()
        mounted = await kind.set_up(wanted)
        link = rig.root / "pods/u-1/volumeDevices/kubernetes.io~csi/pv-vol-1"
        assert (mounted.device, mounted.path) == (str(link), "")
        assert Path(os.path.realpath(link)) == devices / "publish/pv-vol-1/u-1"
        assert stat.S_ISBLK(link.stat().st_mode)
        bound = devices / "pv-vol-1/dev/u-1"
        assert bound.stat().st_rdev == link.stat().st_rdev
        assert len(loops_of(bound)) == 1, "a loop device keeps it open"
        await kind.usage(wanted.pod)
        assert [call["volume_path"] for call in driver.calls("NodeGetVolumeStats")] == [str(bound)]
        with link.open("r+b", buffering=0) as device:
            device.write(b"raw" + bytes(509))
        (stage,) = driver.calls("NodeStageVolume")
        assert stage["staging_target_path"] == str(devices / "staging/pv-vol-1")
        assert "block" in stage["volume_capability"]
        (published,) = driver.calls("NodePublishVolume")
        assert published["volume_context"]["csi.storage.k8s.io/pod.uid"] == "u-1"
        # An agent that knows nothing of it does it all again, and nothing more.
        later = rig.new_kind()
        async with rig.running(later):
            await rig.registered(later)
            await later.set_up(wanted)
            assert len(loops_of(bound)) == 1
            await later.tear_down("u-1", "pv-vol-1")
            assert not link.is_symlink()
            await later.unmount_unused(())
    assert rig.left() == []
    assert driver.loops_left() == []
    with (driver.volumes / "vol-1.img").open("rb") as image:
        assert image.read(3) == b"raw"


async def test_csi_tear_down_kubelet_restarted_unpublishes_unknown_volume(
    rig: Rig, make_driver: MakeDriver
) -> None:
    driver = make_driver()
    rig.driver_object()
    async with rig.running() as kind:
        await rig.registered()
        await kind.set_up(persistent(make_pod(), fsType="ext4"))
    later = rig.new_kind()
    with pytest.raises(VolumeNotReady, match="not found in the list of registered CSI drivers"):
        await later.tear_down("u-1", "pv-vol-1")
    async with rig.running(later):
        await rig.until("the pod is woken", lambda: rig.woken == ["u-1"])
        await later.tear_down("u-1", "pv-vol-1")
        await later.unmount_unused(())
    assert (rig.left(), driver.loops_left()) == ([], [])


async def test_csi_set_up_driver_not_registered_pod_waits_and_is_woken(
    rig: Rig, make_driver: MakeDriver
) -> None:
    rig.driver_object()
    async with rig.running() as kind:
        with pytest.raises(VolumeNotReady, match=f"driver name {DRIVER} not found"):
            await kind.set_up(inline(make_pod()))
        make_driver("--no-stage")
        await rig.until("woken", lambda: rig.woken == ["u-1"])
        await kind.set_up(inline(make_pod()))
        await kind.tear_down("u-1", "data")
    assert rig.left() == []


async def test_csi_set_up_volume_not_attached_pod_waits_and_is_woken(
    rig: Rig, make_driver: MakeDriver
) -> None:
    make_driver()
    rig.driver_object(attachRequired=True)
    wanted = persistent(make_pod())
    name = unique_name(DRIVER, "vol-1")
    async with rig.running() as kind:
        await rig.registered()
        with pytest.raises(VolumeNotReady, match="there is no volume attachment csi-"):
            await kind.set_up(wanted)
        rig.attach("vol-1", attached=False)
        with pytest.raises(VolumeNotReady, match="volume vol-1 is not attached for volume attachment"):
            await kind.set_up(wanted)
        rig.attach("vol-1", attached=False, attachError={"message": "no such disk"})
        with pytest.raises(VolumePluginError, match=r"^no such disk$"):
            await kind.set_up(wanted)
        kind.attachments.node_changed(json.dumps({"volumesAttached": [{"name": "other"}]}).encode())
        assert rig.woken == []
        rig.attach("vol-1")
        kind.attachments.node_changed(json.dumps({"volumesAttached": [{"name": name}]}).encode())
        assert rig.woken == ["u-1"]
        await kind.set_up(wanted)
        await kind.tear_down("u-1", "pv-vol-1")
        await kind.unmount_unused(())
    assert rig.left() == []


@pytest.mark.parametrize(
    ("modes", "problem"),
    [
        (
            ["Persistent"],
            'volume mode "Ephemeral" not supported by driver .* \\(only supports \\["Persistent"\\]\\)',
        ),
        (None, 'volume mode "Ephemeral" not supported by driver .* \\(no CSIDriver object\\)'),
    ],
)
async def test_csi_inline_volume_ephemeral_mode_unsupported_raises(
    rig: Rig, modes: list[str] | None, problem: str
) -> None:
    if modes is not None:
        rig.driver_object(volumeLifecycleModes=modes)
    async with rig.running() as kind:
        with pytest.raises(VolumePluginError, match=problem):
            await kind.set_up(inline(make_pod()))


async def test_csi_fs_group_set_by_kubelet_or_delegated_to_driver(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver()
    rig.driver_object(fsGroupPolicy="File")
    grouped = make_pod("u-1", securityContext={"fsGroup": 4321})
    async with rig.running() as kind:
        await rig.registered()
        mounted = await kind.set_up(persistent(grouped))
        assert Path(mounted.path).stat().st_gid == 4321
        assert driver.calls("NodePublishVolume")[0]["volume_capability"]["mount"] == {}
        await kind.tear_down("u-1", "pv-vol-1")
        await kind.unmount_unused(())
        driver.stop()
        await rig.until("gone", lambda: not kind.drivers.names)
        driver.start("--ability=VOLUME_MOUNT_GROUP")
        await rig.registered()
        mounted = await kind.set_up(persistent(grouped, "vol-2"))
        assert Path(mounted.path).stat().st_gid == 0, "left to the driver, which has not done it"
        for name in ("NodeStageVolume", "NodePublishVolume"):
            assert driver.calls(name)[-1]["volume_capability"]["mount"] == {"volume_mount_group": "4321"}
        await kind.tear_down("u-1", "pv-vol-2")
        await kind.unmount_unused(())
    assert rig.left() == []


async def test_csi_selinux_label_changed_volume_is_restaged(
    rig: Rig, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of the test has no SELinux, and the driver does not mind."""
    monkeypatch.setattr(files, "supports_context_mount", lambda volume, all_modes: True)
    monkeypatch.setattr(files, "mount_label", lambda volume, supported: f"label-of-{volume.uid[:3]}")
    driver = make_driver()
    rig.driver_object(seLinuxMount=True)
    async with rig.running() as kind:
        await rig.registered()
        for uid in ("u-1", "u-1-more", "u-2"):
            await kind.set_up(persistent(make_pod(uid)))
            staged = rig.root / "plugins/kubernetes.io/csi" / DRIVER / staging_dir_name("vol-1")
            assert data(staged)["seLinuxMountContext"] == f"label-of-{uid[:3]}"
            with pytest.raises(VolumePluginError, match=r"^conflicting SELinux labels of volume pv-vol-1: "):
                await kind.set_up(persistent(make_pod("u-3")))
            await kind.tear_down(uid, "pv-vol-1")
        await kind.unmount_unused(())
    stage, unstage = "NodeStageVolume", "NodeUnstageVolume"
    once = ["NodePublishVolume", "NodeUnpublishVolume"]
    assert driver.names() == [stage, *once, *once, unstage, stage, *once, unstage]
    flags = [call["volume_capability"]["mount"]["mount_flags"] for call in driver.calls("NodeStageVolume")]
    assert flags == [['context="label-of-u-1"'], ['context="label-of-u-2"']]
    assert rig.left() == []


async def test_csi_requires_republish_fs_group_applied_to_rewritten_files(
    rig: Rig, make_driver: MakeDriver
) -> None:
    make_driver("--no-stage")
    rig.driver_object(requiresRepublish=True, fsGroupPolicy="File")
    wanted = inline(make_pod(securityContext={"fsGroup": 4321}))
    async with rig.running() as kind:
        await rig.registered()
        rotated = Path((await kind.set_up(wanted)).path) / "rotated"
        rotated.write_text("new")
        assert rotated.stat().st_gid == 4321, "the folder's mark"
        os.chown(rotated, 0, 0)
        await kind.set_up(wanted)
        assert rotated.stat().st_gid == 4321
        await kind.tear_down("u-1", "data")
    assert rig.left() == []


async def test_csi_requires_republish_passes_fresh_tokens(rig: Rig, make_driver: MakeDriver) -> None:
    driver = make_driver("--no-stage")
    rig.driver_object(
        requiresRepublish=True,
        tokenRequests=[{"audience": "bank", "expirationSeconds": 600}, {"audience": ""}],
    )
    wanted = inline(make_pod())
    async with rig.running() as kind:
        await rig.registered()
        await kind.set_up(wanted)
        (first,) = driver.calls("NodePublishVolume")
        tokens = json.loads(first["volume_context"]["csi.storage.k8s.io/serviceAccount.tokens"])
        assert {audience: found["token"] for audience, found in tokens.items()} == {
            "": "pod-u-1//3600/1",
            "bank": "pod-u-1/bank/600/1",
        }
        rig.shelf.generation = 2
        rig.driver_object(
            requiresRepublish=True,
            tokenRequests=[{"audience": "bank", "expirationSeconds": 600}],
            serviceAccountTokenInSecrets=True,
        )
        await rig.until("heard", lambda: _in_secrets(rig))
        await kind.set_up(wanted)
        second = driver.calls("NodePublishVolume")[1]
        assert "pod-u-1/bank/600/2" in second["secrets"]["csi.storage.k8s.io/serviceAccount.tokens"]
        assert "volume_context" not in second
        # What fails now must not take from the pod what it has.
        driver.behave(fail={"NodePublishVolume": ["INVALID_ARGUMENT", "no"]})
        with pytest.raises(VolumePluginError, match="rpc error: code = InvalidArgument desc = no"):
            await kind.set_up(wanted)
        assert is_mounted(Path(rig.root / "pods/u-1/volumes/kubernetes.io~csi/data/mount"))
        await kind.tear_down("u-1", "data")
    assert rig.left() == []


def _in_secrets(rig: Rig) -> bool:
    found = rig.kind._informer.cached(DRIVER)
    return found is not None and found.spec.service_account_token_in_secrets is True


async def test_csi_stage_secret_missing_or_not_utf8_raises(rig: Rig, make_driver: MakeDriver) -> None:
    make_driver()
    rig.driver_object()
    wanted = persistent(make_pod(), nodeStageSecretRef={"name": "key", "namespace": "vault"})
    async with rig.running() as kind:
        await rig.registered()
        with pytest.raises(
            VolumePluginError, match=r"fetching NodeStageSecretRef vault/key failed: .*not found"
        ):
            await kind.set_up(wanted)
        api_of(rig).put("secrets", "key", "vault", data={"a": "/w=="})
        with pytest.raises(VolumePluginError, match="the secret has a value that is no text in UTF-8"):
            await kind.set_up(wanted)
        await kind.unmount_unused(())
    assert rig.left() == []


async def test_csi_usage_returns_stats_and_records_abnormal_condition(
    rig: Rig, make_driver: MakeDriver
) -> None:
    driver = make_driver("--ability=VOLUME_CONDITION")
    rig.driver_object()
    pod = make_pod()
    kind = rig.new_kind(health=True, clock=lambda: 12.0)
    async with rig.running(kind):
        await rig.registered(kind)
        mounted = await kind.set_up(persistent(pod, fsType="ext4"))
        found = os.statvfs(mounted.path)
        usage = (await kind.usage(pod))["data"]
        assert (usage.capacity, usage.inodes) == (found.f_blocks * found.f_frsize, found.f_files)
        assert usage.moment == 12.0
        assert usage.used > 0
        assert usage.abnormal is False
        assert rig.events == []
        driver.behave(abnormal="the disk is on fire")
        assert (await kind.usage(pod))["data"].abnormal is True
        assert rig.events == [("pod-u-1", "VolumeConditionAbnormal", "Volume data: the disk is on fire")]
        assert await kind.usage(make_pod("u-2")) == {}
        driver.kill()
        assert await kind.usage(pod) == {}
        told = len(driver.calls("NotifyRegistrationStatus"))
        driver.start()
        await rig.until("back", lambda: len(driver.calls("NotifyRegistrationStatus")) > told)
        await kind.tear_down("u-1", "pv-vol-1")
        await kind.unmount_unused(())
    assert (rig.left(), driver.loops_left()) == ([], [])
