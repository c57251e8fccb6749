"""Pods with claims that start after a reboot without the API server (`--pod-checkpoint-dir`)."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from pykubelet.api.core import ObjectReference
from pykubelet.apiserver.errors import Unreachable
from pykubelet.podconfig.checkpoints import Checkpoints
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.errors import VolumeError, VolumePluginError
from pykubelet.volumes.mounts.disks import FilesystemMismatch
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeToMount
from tests.support.csi import Rig, StorageApi, make_pod, persistent
from tests.support.csi_driver.process import DRIVER
from tests.support.volumes import Server, Shelf, pod_with, volumes_at

CLAIM = {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}}


def server_with(path: Path) -> Server:
    server = Server()
    server.claim("claim", "pv-1")
    server.volume("pv-1", "claim", hostPath={"path": str(path)})
    return server


async def written(checkpoints: Checkpoints) -> None:
    """Write what is pending."""
    task = asyncio.create_task(checkpoints.run())
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_mount_checkpointed_claim_api_server_away_is_used_after_restart(
    root: Path, shelf: Shelf, tmp_path: Path
) -> None:
    server, pod = server_with(tmp_path), pod_with(CLAIM)
    before = Checkpoints(tmp_path / "checkpoints")
    before.save(pod)
    await volumes_at(root, shelf, server=server, checkpoints=before).mount(pod)
    await written(before)
    after = Checkpoints(tmp_path / "checkpoints")
    server.away = True
    mounted = await volumes_at(root, shelf, server=server, checkpoints=after).mount(pod)
    assert mounted["data"].path == str(tmp_path)
    other = pod_with(CLAIM, metadata={"uid": "u-2"})
    with pytest.raises(VolumeError, match="failed to fetch PVC from API server"):
        await volumes_at(root, shelf, server=server, checkpoints=after).mount(other)


async def test_mount_claim_changed_or_deleted_api_server_wins_over_checkpoint(
    root: Path, shelf: Shelf, tmp_path: Path
) -> None:
    server, pod = server_with(tmp_path), pod_with(CLAIM)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(pod)
    await volumes_at(root, shelf, server=server, checkpoints=checkpoints).mount(pod)
    (tmp_path / "new").mkdir()
    server.volume("pv-1", "claim", hostPath={"path": str(tmp_path / "new")})
    mounted = await volumes_at(root, shelf, server=server, checkpoints=checkpoints).mount(pod)
    assert mounted["data"].path == str(tmp_path / "new")
    known = checkpoints.get(pod.uid)
    assert known is not None
    source = known.claims["claim"].volume.spec.host_path
    assert source is not None
    assert source.path == str(tmp_path / "new")
    del server.objects["persistentvolumeclaims", "default", "claim"]
    with pytest.raises(VolumeError, match="not found"):
        await volumes_at(root, shelf, server=server, checkpoints=checkpoints).mount(pod)


@pytest.mark.looptime
async def test_csi_driver_checkpointed_is_used_while_api_server_is_away(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    pod = make_pod()
    checkpoints.save(pod)
    volume = CsiVolume.parse(persistent(pod))
    rig = Rig(tmp_path, StorageApi())
    rig.driver_object(podInfoOnMount=True)
    async with rig.running(rig.new_kind(checkpoints=checkpoints)) as kind:
        spec = await kind._driver_spec(volume)
    assert spec is not None
    other = Rig(tmp_path, StorageApi())
    assert other.api is not None
    other.api.broken = Unreachable("https://192.0.2.1:6443", "it is away")
    kind = other.new_kind(checkpoints=checkpoints)
    assert await kind._driver_spec(volume) == spec
    unknown = CsiVolume.parse(persistent(make_pod("u-2")))
    with pytest.raises(VolumePluginError, match="CSIDriver objects are not known"):
        await kind._driver_spec(unknown)
    assert volume.driver == DRIVER


class MismatchedDisk(BaseVolumePlugin):
    """Plugin whose disk has another format."""

    directory_name = "example.com~disk"

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        raise FilesystemMismatch("mount failed: wrong fs type")


async def test_mount_disk_of_other_format_records_event_about_persistent_volume(
    root: Path, shelf: Shelf, tmp_path: Path
) -> None:
    events: list[tuple[str, str, str, str]] = []

    def record(about: ObjectReference, kind: str, reason: str, message: str) -> None:
        events.append((about.kind, about.name, reason, message))

    volumes = volumes_at(root, shelf, server=server_with(tmp_path), record_object_event=record)
    volumes.plugins["hostPath"] = MismatchedDisk()
    for _ in range(2):
        with pytest.raises(VolumeError, match="wrong fs type"):
            await volumes.mount(pod_with(CLAIM))
    message = 'MountVolume failed for volume "pv-1" mount failed: wrong fs type'
    expected = ("PersistentVolume", "pv-1", "FailedMountOnFilesystemMismatch", message)
    assert events == [expected], "once per attempt, not during the back-off delay"
