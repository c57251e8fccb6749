"""Volumes that hang: nobody else waits for them, and their pods can be deleted."""

import asyncio
import threading
from collections.abc import AsyncIterator, Collection
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from pykubelet.linux import mounts
from pykubelet.linux.mounts import read_mounts
from pykubelet.util.tasks import TaskScope, in_own_thread
from pykubelet.volumes import manager as pod_volumes
from pykubelet.volumes import operations
from pykubelet.volumes import registry as kinds
from pykubelet.volumes import unmounter as take_down
from pykubelet.volumes import unmounter as unmounting
from pykubelet.volumes.errors import VolumeError, VolumeNotReady
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.operations import INITIAL_BACKOFF_SECONDS
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeToMount
from pykubelet.volumes.plugins import host_path
from pykubelet.volumes.plugins.flex import FlexVolumePlugin
from tests.support.volume_programs import dead_server, surroundings
from tests.support.volumes import Shelf, needs_root, pod_with, volumes_at

CLOUD = {"name": "cloud", "glusterfs": {"path": "p"}}
DATA = {"name": "data", "emptyDir": {}}
MEMORY = {"name": "memory", "emptyDir": {"medium": "Memory"}}


class Cloud(BaseVolumePlugin):
    """A kind whose server is up, away, or dead."""

    directory_name = "example.com~cloud"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.up = asyncio.Event()
        self.error: Exception | None = None
        self.calls: list[str] = []

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        self.calls.append("set_up")
        path = self.root / "pods" / volume.uid / "volumes" / self.directory_name / volume.name
        path.mkdir(parents=True, exist_ok=True)
        await self._ask()
        return MountedVolume(str(path), attached="cloud/1")

    async def tear_down(self, uid: str, name: str) -> None:
        self.calls.append("take_down")
        await self._ask()

    async def unmount_unused(self, in_use: Collection[str]) -> None:
        self.calls.append(f"sweep {sorted(in_use)}")

    async def _ask(self) -> None:
        if self.error is not None:
            raise self.error
        await self.up.wait()


@pytest.fixture
async def scope() -> AsyncIterator[TaskScope]:
    async with TaskScope() as tasks:
        yield tasks


@pytest.fixture
def cloud(root: Path) -> Cloud:
    return Cloud(root)


@pytest.fixture
def volumes(
    root: Path, shelf: Shelf, scope: TaskScope, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> PodVolumes:
    make = kinds.load_plugins
    monkeypatch.setattr(pod_volumes, "load_plugins", lambda host: make(host) | {"glusterfs": cloud})
    made = volumes_at(root, shelf, tasks=scope)
    scope.start(made.run(), name="volumes")
    return made


async def until_called(cloud: Cloud, name: str) -> None:
    """Wait until the kind was asked."""
    async with asyncio.timeout(30):
        while cloud.calls[-1:] != [name]:
            await asyncio.sleep(0.01)


class TestKinds:
    async def test_mount_set_up_hangs_raises_timeout_and_later_mount_joins_it(
        self, volumes: PodVolumes, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pod_volumes, "MOUNT_TIMEOUT_SECONDS", 0.2)
        pod = pod_with(CLOUD)
        with pytest.raises(VolumeError) as caught:
            await volumes.mount(pod)
        assert str(caught.value) == (
            "Unable to attach or mount volumes: unmounted volumes=[cloud], unattached volumes=[], "
            "failed to process volumes=[]: context deadline exceeded"
        )
        monkeypatch.setattr(pod_volumes, "MOUNT_TIMEOUT_SECONDS", 60)
        cloud.up.set()
        assert (await volumes.mount(pod)).keys() == {"cloud"}
        assert cloud.calls == ["set_up"], "the same one that hung"
        assert volumes.attached.in_use() == ["cloud/1"]

    async def test_unmount_set_up_hangs_cancels_it_and_tears_down(
        self, volumes: PodVolumes, cloud: Cloud, root: Path
    ) -> None:
        pod = pod_with(CLOUD)
        mounting = asyncio.ensure_future(volumes.mount(pod))
        await until_called(cloud, "set_up")
        mounting.cancel()
        await asyncio.wait([mounting])
        ending = asyncio.ensure_future(volumes.unmount(pod.uid))
        await until_called(cloud, "take_down")
        cloud.up.set()
        await ending
        assert not (root / "pods/u-1/volumes" / cloud.directory_name).exists()
        await until_called(cloud, "sweep []")
        assert cloud.calls == ["set_up", "take_down", "sweep []"], "setting up was given up"

    async def test_unmount_tear_down_fails_raises_and_is_retried(
        self, volumes: PodVolumes, cloud: Cloud, root: Path
    ) -> None:
        cloud.up.set()
        await volumes.mount(pod_with(CLOUD, DATA))
        cloud.error = OSError(5, "Input/output error", "/cloud")
        with pytest.raises(VolumeError, match='TearDown failed for volume "cloud" : /cloud: Input/output'):
            await volumes.unmount("u-1")
        assert (root / "pods/u-1/volumes" / cloud.directory_name / "cloud").exists()
        cloud.error = None
        await asyncio.sleep(INITIAL_BACKOFF_SECONDS)
        await volumes.unmount("u-1")
        assert not (root / "pods/u-1/volumes" / cloud.directory_name).exists()
        assert volumes.attached.in_use() == []

    async def test_wake_plugin_failed_ends_back_off(
        self, volumes: PodVolumes, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(operations, "INITIAL_BACKOFF_SECONDS", 60.0)
        woken: list[str] = []
        volumes.add_listener(woken.append)
        cloud.error = VolumeNotReady("no driver")
        with pytest.raises(VolumeError) as caught:
            await volumes.mount(pod_with(CLOUD))
        assert caught.value.retry_after is None
        cloud.error = OSError("broken")
        with pytest.raises(VolumeError) as caught:
            await volumes.mount(pod_with(CLOUD))
        assert caught.value.retry_after is not None
        assert 0 < caught.value.retry_after <= 60
        cloud.error = None
        cloud.up.set()
        with pytest.raises(VolumeError, match="broken"):
            await volumes.mount(pod_with(CLOUD))
        volumes._wake("u-1")
        assert woken == ["u-1"]
        assert (await volumes.mount(pod_with(CLOUD))).keys() == {"cloud"}

    async def test_mount_plugin_unexpected_exception_raises_volume_error(
        self, volumes: PodVolumes, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may be somebody else's: the agent goes on, and the pod's author is told."""

        async def broken(*args: object) -> NoReturn:
            raise RuntimeError("a bug")

        monkeypatch.setattr(cloud, "set_up", broken)
        with pytest.raises(VolumeError) as caught:
            await volumes.mount(pod_with(CLOUD, DATA))
        assert str(caught.value) == 'MountVolume.SetUp failed for volume "cloud" : a bug'
        monkeypatch.setattr(cloud, "unmount_unused", broken)
        await volumes.unmount_unused()
        assert volumes.attached.in_use() == []
        monkeypatch.setattr(cloud, "in_use", lambda: 1 // 0)
        assert volumes.attached.in_use() is None, "not that there are none: they would be detached"

    async def test_refresh_kubelet_restarted_sets_up_existing_volume_once(
        self, volumes: PodVolumes, cloud: Cloud, root: Path
    ) -> None:
        (root / "pods/u-1/volumes" / cloud.directory_name / "cloud").mkdir(parents=True)
        assert volumes.attached.in_use() is None, "nothing is said while it is not known"
        cloud.up.set()
        await volumes.refresh(pod_with(CLOUD))
        await volumes.refresh(pod_with(CLOUD))
        assert cloud.calls == ["set_up"]
        assert volumes.attached.in_use() == ["cloud/1"]


@pytest.mark.machine
@needs_root
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="needs fuse")
class TestDeadServer:
    async def test_mount_host_path_hangs_other_pods_mounted(
        self, volumes: PodVolumes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host_path, "CHECK_TIMEOUT_SECONDS", 10.0)
        with dead_server(tmp_path / "dead"):
            dead = {"name": "dead", "hostPath": {"path": f"{tmp_path}/dead/x", "type": "Directory"}}
            fine = {"name": "fine", "hostPath": {"path": str(tmp_path), "type": "Directory"}}
            hanging = asyncio.ensure_future(volumes.mount(pod_with(dead)))
            for number in range(40):
                await volumes.mount(pod_with(fine, DATA, metadata={"uid": f"other-{number}"}))
            assert not hanging.done()
            with pytest.raises(VolumeError, match="does not answer"):
                await hanging
            await volumes.unmount("u-1")

    async def test_sub_paths_volume_hangs_raises_with_single_thread(
        self, volumes: PodVolumes, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its pod is told, tried again without one more thread that hangs, and can be deleted."""
        monkeypatch.setattr(pod_volumes, "SUB_PATH_TIMEOUT_SECONDS", 0.3)
        monkeypatch.setattr(pod_volumes, "in_own_thread", partial(in_own_thread, cancel_timeout=0.2))
        mount = {"name": "dead", "mountPath": "/d", "subPath": "part"}
        dead = {"name": "dead", "hostPath": {"path": f"{tmp_path}/dead"}}
        pod = pod_with(dead, containers=[{"name": "main", "image": "i", "volumeMounts": [mount]}])
        with dead_server(tmp_path / "dead"):
            mounted = await volumes.mount(pod)
            for _ in range(3):
                with pytest.raises(VolumeError, match=r"\['dead'\] of container \"main\": .* not answer"):
                    await volumes.sub_paths(pod, pod.spec.containers[0], mounted, {0: "part"})
            hanging = [thread for thread in threading.enumerate() if thread.name == "sub-paths"]
            assert len(hanging) == 1
            await volumes.unmount(pod.uid)
        await asyncio.to_thread(hanging[0].join, 30)
        assert not hanging[0].is_alive()
        await volumes.unmount(pod.uid)
        assert read_mounts(root.resolve()) == []

    async def test_flex_is_used_by_other_pod_hanging_mount_is_not_accessed(
        self, root: Path, shelf: Shelf
    ) -> None:
        """Whether another pod has a volume is asked while the first one's is taken down."""
        kind = FlexVolumePlugin(surroundings(root, shelf))
        volumes = root / "pods/u-2/volumes"
        for folder in ("example.com~disk", "kubernetes.io~flexvolume"):
            (volumes / folder).mkdir(parents=True)
        (volumes / "kubernetes.io~flexvolume/v").symlink_to("../example.com~disk/v")

        async def others(driver: str) -> bool:
            async with asyncio.timeout(30):
                return await in_own_thread(
                    lambda: kind._is_used_by_other_pod("u-1", "v", driver), name="others", cancel_timeout=0
                )

        assert not await others("example.com~disk")
        with dead_server(volumes / "example.com~disk/v"):
            assert await others("example.com~disk")
            assert not await others("example.com~other")

    async def test_in_own_thread_call_hangs_returns_after_cancel_timeout(self, tmp_path: Path) -> None:
        with dead_server(tmp_path / "dead"):
            loop = asyncio.get_running_loop()
            began = loop.time()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await in_own_thread((tmp_path / "dead/x").exists, name="hangs", cancel_timeout=0.3)
            assert loop.time() - began < 30


@pytest.mark.machine
@needs_root
class TestUnmount:
    async def test_unmount_hangs_mount_is_detached(
        self, volumes: PodVolumes, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await volumes.mount(pod_with(MEMORY, DATA))
        forever = threading.Event()
        patience = unmounting.UNMOUNT_TIMEOUT_SECONDS
        monkeypatch.setattr(unmounting, "UNMOUNT_TIMEOUT_SECONDS", 4.0)

        def hang(point: Path, *, detach: bool = False) -> bool:
            if not detach:
                # Only for this there is no patience: all else may take its time.
                monkeypatch.setattr(unmounting, "UNMOUNT_TIMEOUT_SECONDS", patience)
                forever.wait(60)
            return mounts.unmount(point, detach=detach)

        monkeypatch.setattr(take_down, "unmount", hang)
        try:
            with pytest.raises(VolumeError, match="memory does not answer, so it is detached"):
                await volumes.unmount("u-1")
            assert read_mounts(root.resolve()) == []
            await volumes.unmount("u-1")
            assert not (root / "pods/u-1/volumes/kubernetes.io~empty-dir").exists()
        finally:
            forever.set()

    async def test_unmount_slow_deletion_retries_join_one_thread(
        self, volumes: PodVolumes, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each try joins it: more of them would only keep each other from running."""
        await volumes.mount(pod_with(DATA))
        go_on = threading.Event()

        def slowly(path: Path, *more: object) -> None:
            assert go_on.wait(60)
            mounts.remove_tree(path)

        monkeypatch.setattr(take_down, "remove_tree", slowly)
        monkeypatch.setattr(unmounting, "UNMOUNT_TIMEOUT_SECONDS", 1.0)
        try:
            for _ in range(3):
                with pytest.raises(VolumeError, match="deleting its files takes long, and goes on"):
                    await volumes.unmount("u-1")
            names = [thread.name for thread in threading.enumerate()]
            assert names.count("unmount u-1") == 1
        finally:
            monkeypatch.setattr(unmounting, "UNMOUNT_TIMEOUT_SECONDS", 20.0)
            go_on.set()
        await volumes.unmount("u-1")
        assert not (root / "pods/u-1/volumes/kubernetes.io~empty-dir").exists()

    async def test_unmount_plain_volumes_reads_no_mount_table(
        self, volumes: PodVolumes, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Verify that the cost of a pod does not depend on the mounts of all others."""

        def read(*_: object) -> list[mounts.Mount]:
            raise AssertionError("the mount table was read")

        given = await volumes.mount(pod_with(MEMORY, DATA))
        Path(given["data"].path, "file").write_text("x")
        # Somebody may have mounted something over it.
        mounts.mount("tmpfs", Path(given["memory"].path), "tmpfs")
        monkeypatch.setattr(take_down, "read_mounts", read)
        await volumes.unmount("u-1")
        assert read_mounts(root.resolve()) == []
        assert not list(root.glob("pods/u-1/volumes/*"))

    @pytest.mark.parametrize("files", [1, 300])
    async def test_unmount_mount_inside_volume_is_unmounted_first(
        self, volumes: PodVolumes, root: Path, files: int
    ) -> None:
        given = await volumes.mount(pod_with(MEMORY, DATA))
        for kind in ("memory", "data"):
            for number in range(files):
                Path(given[kind].path, str(number)).touch()
            inner = Path(given[kind].path, "deep/er")
            inner.mkdir(parents=True)
            mounts.mount("tmpfs", inner, "tmpfs")
        await volumes.unmount("u-1")
        assert read_mounts(root.resolve()) == []
        assert not list(root.glob("pods/u-1/volumes/*"))

    async def test_unmount_unknown_plugin_mount_is_unmounted(self, volumes: PodVolumes, root: Path) -> None:
        """Who gave them is not installed any more, and the pod has to go."""
        place = root / "pods/u-1/volumes/example.com~gone/v"
        place.mkdir(parents=True)
        mounts.mount("tmpfs", place, "tmpfs")
        await volumes.unmount("u-1")
        assert read_mounts(root.resolve()) == []
        assert place.is_dir(), "it goes with the pod's folder"

    async def test_unmount_busy_mount_is_detached_after_busy_seconds(
        self, volumes: PodVolumes, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = Path((await volumes.mount(pod_with(MEMORY)))["memory"].path)
        (path / "held").write_text("x")
        with (path / "held").open() as held:
            with pytest.raises(VolumeError, match="Device or resource busy"):
                await volumes.unmount("u-1")
            assert len(read_mounts(root.resolve())) == 1
            with pytest.raises(VolumeError, match="Device or resource busy"):
                await volumes.unmount("u-1")
            monkeypatch.setattr(unmounting, "BUSY_SECONDS", 0.0)
            await volumes.unmount("u-1")
            assert read_mounts(root.resolve()) == []
            assert held.read() == "x", "who uses it is not harmed"
        assert not path.parent.exists()

    async def test_unmount_busy_mount_is_unmounted_after_release(
        self, volumes: PodVolumes, root: Path
    ) -> None:
        path = Path((await volumes.mount(pod_with(MEMORY)))["memory"].path)
        with (path / "held").open("w"), pytest.raises(VolumeError, match="busy"):
            await volumes.unmount("u-1")
        await volumes.unmount("u-1")
        assert read_mounts(root.resolve()) == []
