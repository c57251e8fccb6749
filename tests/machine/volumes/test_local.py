"""Directories and disks of this node behind claims, as files and as devices; nothing stays behind."""

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykubelet.linux.loop_devices import attach_loop, attached_loops, detach_loop, loops_of
from pykubelet.linux.mounts import read_mounts
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.errors import VolumeError, failure_event
from pykubelet.volumes.manager import PodVolumes
from tests.support.volume_programs import loops_left
from tests.support.volumes import Server, Shelf, mode_of, mounted_at, needs_root, pod_with, volumes_at

pytestmark = [pytest.mark.machine, needs_root]

CLAIM = {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}}
READ_ONLY = {"name": "data", "persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}
DEVICE = [{"name": "main", "image": "i", "volumeDevices": [{"name": "data", "devicePath": "/dev/x"}]}]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def volumes(root: Path, shelf: Shelf, server: Server) -> PodVolumes:
    return volumes_at(root, shelf, server=server)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "local"
    path.mkdir()
    return path


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """A file that can be a disk; no loop device stays on it."""
    path = tmp_path / "disk.img"
    with path.open("wb") as file:
        file.truncate(16 << 20)
    yield path
    for device, file_behind in attached_loops():
        if file_behind.startswith(str(tmp_path)):
            detach_loop(device)


@pytest.fixture
def disk(image: Path) -> Iterator[str]:
    """A block device."""
    device, at = attach_loop(image)
    os.close(at)
    yield device
    detach_loop(device)


def bound(server: Server, path: Path | str, **spec: Any) -> None:
    server.claim("claim", "pv-1")
    server.volume("pv-1", "claim", local={"path": str(path)} | spec.pop("local", {}), **spec)


def place(root: Path, uid: str = "u-1") -> Path:
    return root / f"pods/{uid}/volumes/kubernetes.io~local-volume/pv-1"


class TestDirectory:
    async def test_mount_local_directory_is_bound_and_unmounted(
        self, volumes: PodVolumes, server: Server, root: Path, folder: Path
    ) -> None:
        bound(server, folder)
        (folder / "kept").write_text("x")
        mounted = (await volumes.mount(pod_with(CLAIM)))["data"]
        assert (mounted.path, mounted.read_only, mounted.relabel) == (str(place(root)), False, True)
        Path(mounted.path, "new").write_text("y")
        assert (folder / "new").read_text() == "y"
        await volumes.mount(pod_with(CLAIM))
        assert len(mounted_at(place(root))) == 1
        await volumes.unmount("u-1")
        assert not place(root).parent.exists()
        assert sorted(path.name for path in folder.iterdir()) == ["kept", "new"]

    async def test_mount_local_directory_two_pods_share(
        self, volumes: PodVolumes, server: Server, root: Path, folder: Path
    ) -> None:
        bound(server, folder)
        for uid in ("u-1", "u-2"):
            await volumes.mount(pod_with(CLAIM, metadata={"uid": uid}))
        await volumes.unmount("u-1")
        assert mounted_at(place(root, "u-2"))
        await volumes.unmount("u-2")
        assert read_mounts(root.resolve()) == []

    @pytest.mark.parametrize("reader_first", [True, False])
    async def test_mount_claim_twice_in_pod_is_bound_once(
        self, volumes: PodVolumes, server: Server, root: Path, folder: Path, reader_first: bool
    ) -> None:
        """Once to write, once to read only: it is mounted once, and each container's mount tells."""
        bound(server, folder)
        reader = {"name": "reader", "persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}
        pod = pod_with(*((reader, CLAIM) if reader_first else (CLAIM, reader)))
        for _ in range(2):
            mounted = await volumes.mount(pod)
            assert (mounted["data"].read_only, mounted["reader"].read_only) == (False, True)
            assert mounted["data"].path == mounted["reader"].path == str(place(root))
            Path(mounted["data"].path, "x").touch()
        assert len(mounted_at(place(root))) == 1
        await volumes.unmount("u-1")
        assert read_mounts(root.resolve()) == []

    async def test_mount_local_directory_read_only_sets_mount_flags(
        self, volumes: PodVolumes, server: Server, root: Path, folder: Path
    ) -> None:
        bound(server, folder, mountOptions=["noexec", "nodev"])
        mounted = (await volumes.mount(pod_with(READ_ONLY)))["data"]
        (found,) = mounted_at(place(root))
        assert {"ro", "noexec", "nodev"} <= found.options
        assert (mounted.read_only, mounted.relabel) == (True, False)
        with pytest.raises(OSError, match="Read-only"):
            Path(mounted.path, "x").touch()
        (folder / "x").touch()

    async def test_mount_existing_bind_sets_missing_flags(
        self, volumes: PodVolumes, server: Server, root: Path, folder: Path
    ) -> None:
        bound(server, folder)
        await volumes.mount(pod_with(CLAIM))
        await volumes.mount(pod_with(READ_ONLY))
        assert "ro" in mounted_at(place(root))[0].options

    async def test_mount_other_fs_group_keeps_first_and_records_event(
        self, root: Path, shelf: Shelf, server: Server, folder: Path
    ) -> None:
        told: list[tuple[str, str]] = []
        volumes = volumes_at(
            root,
            shelf,
            server=server,
            record_event=lambda pod, kind, reason, message: told.append((reason, message)),
        )
        bound(server, folder)
        (folder / "file").touch(mode=0o600)
        await volumes.mount(pod_with(CLAIM, securityContext={"fsGroup": 2000}))
        assert folder.stat().st_gid == (folder / "file").stat().st_gid == 2000
        assert (mode_of(folder), mode_of(folder / "file")) == ("0o2775", "0o660")
        other = pod_with(CLAIM, securityContext={"fsGroup": 3000}, metadata={"uid": "u-2"})
        await volumes.mount(other)
        assert folder.stat().st_gid == 2000
        assert told == [
            (
                "AlreadyMountedVolume",
                "The requested fsGroup is 3000, but the volume pv-1 has GID 2000. "
                "The volume may not be shareable.",
            )
        ]

    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            (
                "/nowhere/x",
                'NewMounter initialization failed for volume "pv-1" : path "/nowhere/x" does not exist',
            ),
            ("/etc/passwd", 'for volume "pv-1" : only directory and block device are supported'),
            (
                "/tmp/../etc",
                "SetUp failed for volume \"pv-1\" : invalid path: /tmp/../etc must not contain '..'",
            ),
            ("", 'SetUp failed for volume "pv-1" : LocalVolume volume "pv-1" path is empty'),
        ],
    )
    async def test_mount_local_invalid_path_raises(
        self, volumes: PodVolumes, server: Server, path: str, reason: str
    ) -> None:
        bound(server, path)
        with pytest.raises(VolumeError) as caught:
            await volumes.mount(pod_with(CLAIM))
        assert str(caught.value).startswith("MountVolume.")
        assert str(caught.value).endswith(reason)
        assert caught.value.retry_after is not None
        assert 0 < caught.value.retry_after <= 0.5

    async def test_mount_local_unknown_mount_option_raises(
        self, volumes: PodVolumes, server: Server, folder: Path
    ) -> None:
        bound(server, folder, mountOptions=["hard"])
        with pytest.raises(VolumeError, match="mount option 'hard' means nothing"):
            await volumes.mount(pod_with(CLAIM))

    async def test_unmount_local_directory_deleted_succeeds(
        self, volumes: PodVolumes, server: Server, root: Path, folder: Path
    ) -> None:
        bound(server, folder)
        await volumes.mount(pod_with(CLAIM))
        folder.rmdir()
        await volumes.unmount("u-1")
        assert read_mounts(root.resolve()) == []
        assert not place(root).exists()


class TestDisk:
    async def test_mount_local_disk_formatted_once_and_unmounted_when_unused(
        self, root: Path, shelf: Shelf, server: Server, disk: str
    ) -> None:
        bound(server, disk, mountOptions=["noatime"])
        staged = root / "plugins/kubernetes.io/local-volume/mounts/pv-1"
        async with TaskScope() as scope:
            volumes = volumes_at(root, shelf, server=server, tasks=scope)
            for uid in ("u-1", "u-2"):
                mounted = await volumes.mount(pod_with(CLAIM, metadata={"uid": uid}))
                Path(mounted["data"].path, uid).touch()
            (found,) = mounted_at(staged)
            assert (found.kind, found.source) == ("ext4", disk)
            assert "noatime" in found.options
            assert {path.name for path in staged.iterdir()} == {"lost+found", "u-1", "u-2"}
            await volumes.unmount("u-1")
            await volumes.unmount_unused()
            assert mounted_at(staged)
            await volumes.unmount("u-2")
            await volumes.unmount_unused()
        assert read_mounts(root.resolve()) == []
        assert not staged.exists()

    async def test_unmount_local_disk_kubelet_restarted_is_released(
        self, root: Path, shelf: Shelf, volumes: PodVolumes, server: Server, disk: str
    ) -> None:
        bound(server, disk)
        mounted = await volumes.mount(pod_with(CLAIM))
        Path(mounted["data"].path, "x").touch()
        later = volumes_at(root, shelf, server=server)
        await later.unmount_unused()
        assert Path(mounted["data"].path, "x").exists()
        await later.unmount("u-1")
        await later.unmount_unused()
        assert read_mounts(root.resolve()) == []

    async def test_mount_local_disk_existing_file_system_is_preserved(
        self, volumes: PodVolumes, server: Server, disk: str, image: Path
    ) -> None:
        subprocess.run(["mkfs.ext4", "-q", "-L", "mine", disk], check=True)
        bound(server, disk)
        await volumes.mount(pod_with(CLAIM))
        await volumes.unmount("u-1")
        await volumes.unmount_unused()
        said = subprocess.run(
            ["blkid", "-p", "-s", "LABEL", disk], capture_output=True, text=True, check=True
        )
        assert 'LABEL="mine"' in said.stdout


class TestDevice:
    async def check(self, volumes: PodVolumes, root: Path, *, read_only: bool = False) -> str:
        """Have the device mapped twice over, and give its real path."""
        claim = READ_ONLY if read_only else CLAIM
        await volumes.mount(pod_with(claim, containers=DEVICE))
        mounted = (await volumes.mount(pod_with(claim, containers=DEVICE)))["data"]
        link = root / "pods/u-1/volumeDevices/kubernetes.io~local-volume/pv-1"
        assert (mounted.path, mounted.device, mounted.read_only) == ("", str(link), read_only)
        assert link.is_symlink()
        held = root / "plugins/kubernetes.io~local-volume/volumeDevices/pv-1/u-1"
        assert stat.S_ISBLK(held.stat().st_mode)
        assert held.stat().st_rdev == link.stat().st_rdev
        assert len(loops_of(held)) == 1, "it is kept open"
        return str(link.readlink())

    def check_gone(self, root: Path) -> None:
        assert read_mounts(root.resolve()) == []
        assert loops_left(root) == []
        assert not (root / "pods/u-1/volumeDevices").exists()
        assert not (root / "plugins/kubernetes.io~local-volume/volumeDevices").exists()

    async def test_mount_local_block_device_is_mapped_and_unmapped(
        self, shelf: Shelf, server: Server, root: Path, disk: str
    ) -> None:
        events: list[tuple[str, ...]] = []
        volumes = volumes_at(
            root, shelf, server=server, record_event=lambda pod, *event: events.append(event)
        )
        bound(server, disk, volumeMode="Block")
        assert await self.check(volumes, root) == disk
        said = 'MapVolume.MapPodDevice succeeded for volume "pv-1"'
        real, kind = root.resolve(), "kubernetes.io~local-volume"
        assert events == [
            (
                "Normal",
                "SuccessfulMountVolume",
                f'{said} globalMapPath "{real}/plugins/{kind}/volumeDevices/pv-1"',
            ),
            (
                "Normal",
                "SuccessfulMountVolume",
                f'{said} volumeMapPath "{root}/pods/u-1/volumeDevices/{kind}"',
            ),
        ]
        await volumes.unmount("u-1")
        self.check_gone(root)
        assert Path(disk).exists()

    async def test_mount_local_file_is_mapped_as_loop_device(
        self, volumes: PodVolumes, server: Server, root: Path, image: Path
    ) -> None:
        bound(server, image, volumeMode="Block")
        device = await self.check(volumes, root)
        assert loops_of(image) == [device]
        with Path(device).open("r+b", buffering=0) as opened:
            opened.write(b"x" * 512)
            os.fsync(opened.fileno())
        await volumes.unmount("u-1")
        self.check_gone(root)
        assert loops_left(image.parent) == []
        assert image.read_bytes()[:512] == b"x" * 512

    async def test_mount_local_file_read_only_loop_device_is_read_only(
        self, volumes: PodVolumes, server: Server, root: Path, image: Path
    ) -> None:
        bound(server, image, volumeMode="Block")
        device = await self.check(volumes, root, read_only=True)
        assert Path("/sys/block", Path(device).name, "ro").read_text().strip() == "1"
        await volumes.unmount("u-1")
        self.check_gone(root)

    async def test_mount_local_file_two_pods_share_loop_device(
        self, volumes: PodVolumes, server: Server, root: Path, image: Path
    ) -> None:
        bound(server, image, volumeMode="Block")
        device = await self.check(volumes, root)
        other = pod_with(CLAIM, containers=DEVICE, metadata={"uid": "u-2"})
        assert os.path.realpath((await volumes.mount(other))["data"].device) == device
        await volumes.unmount("u-1")
        assert loops_of(image) == [device]
        await volumes.unmount("u-2")
        self.check_gone(root)
        assert loops_left(image.parent) == []

    async def test_unmount_local_file_kubelet_restarted_is_unmapped(
        self, root: Path, shelf: Shelf, volumes: PodVolumes, server: Server, image: Path
    ) -> None:
        bound(server, image, volumeMode="Block")
        await self.check(volumes, root)
        (root / "pods/u-1/volumeDevices/kubernetes.io~local-volume/pv-1").unlink()
        await volumes_at(root, shelf).unmount("u-1")
        self.check_gone(root)
        assert loops_left(image.parent) == []

    async def test_mount_local_directory_as_block_raises(
        self, volumes: PodVolumes, server: Server, folder: Path
    ) -> None:
        bound(server, folder, volumeMode="Block")
        with pytest.raises(VolumeError, match="neither a block device nor a file") as caught:
            await volumes.mount(pod_with(CLAIM, containers=DEVICE))
        (problem,) = caught.value.problems
        assert problem.startswith('MapVolume.SetUpDevice failed for volume "pv-1" : ')
        assert failure_event(problem) == "FailedMapVolume"
