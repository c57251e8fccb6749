"""Volumes that hang: nobody else waits for them, and their pods can be deleted."""

import asyncio
import contextlib
import ctypes
import os
import threading
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path

import pytest

from pykubelet.host import mounts
from pykubelet.host.mounts import read_mounts, unmount
from pykubelet.tasks import TaskScope, in_own_thread
from pykubelet.volumes import host_path, kinds, pod_volumes, take_down, unmounting
from pykubelet.volumes.errors import NotYet, VolumeError
from pykubelet.volumes.kind import PlainKind, Wanted
from pykubelet.volumes.mounted import MountedVolume
from pykubelet.volumes.operations import FIRST_PAUSE
from pykubelet.volumes.pod_volumes import PodVolumes
from tests.volumes.conftest import Shelf, needs_root, pod_with, volumes_at

CLOUD = {"name": "cloud", "glusterfs": {"path": "p"}}
DATA = {"name": "data", "emptyDir": {}}
MEMORY = {"name": "memory", "emptyDir": {"medium": "Memory"}}


class Cloud(PlainKind):
    """A kind whose server is up, away, or dead."""

    folder = "example.com~cloud"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.up = asyncio.Event()
        self.error: Exception | None = None
        self.calls: list[str] = []

    async def set_up(self, wanted: Wanted) -> MountedVolume:
        self.calls.append("set_up")
        path = self.root / "pods" / wanted.uid / "volumes" / self.folder / wanted.name
        path.mkdir(parents=True, exist_ok=True)
        await self._ask()
        return MountedVolume(str(path), attached="cloud/1")

    async def take_down(self, uid: str, name: str) -> None:
        self.calls.append("take_down")
        await self._ask()

    async def sweep(self, in_use: Collection[str]) -> None:
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
    make = kinds.make_kinds
    monkeypatch.setattr(pod_volumes, "make_kinds", lambda given: make(given) | {"glusterfs": cloud})
    made = volumes_at(root, shelf, tasks=scope)
    scope.start(made.run(), name="volumes")
    return made


async def until_called(cloud: Cloud, name: str) -> None:
    """Wait until the kind was asked."""
    async with asyncio.timeout(30):
        while cloud.calls[-1:] != [name]:
            await asyncio.sleep(0.01)


class TestKinds:
    async def test_a_hanging_volume_is_told_of_and_found_ready_later(
        self, volumes: PodVolumes, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pod_volumes, "MOUNT_SECONDS", 0.2)
        pod = pod_with(CLOUD)
        with pytest.raises(VolumeError) as caught:
            await volumes.mount(pod)
        assert str(caught.value) == (
            "Unable to attach or mount volumes: unmounted volumes=[cloud], unattached volumes=[], "
            "failed to process volumes=[]: context deadline exceeded"
        )
        cloud.up.set()
        assert (await volumes.mount(pod)).keys() == {"cloud"}
        assert cloud.calls == ["set_up"], "the same one that hung"
        assert volumes.in_use() == ["cloud/1"]

    async def test_its_pod_can_be_deleted(self, volumes: PodVolumes, cloud: Cloud, root: Path) -> None:
        pod = pod_with(CLOUD)
        mounting = asyncio.ensure_future(volumes.mount(pod))
        await until_called(cloud, "set_up")
        mounting.cancel()
        await asyncio.wait([mounting])
        ending = asyncio.ensure_future(volumes.unmount(pod.uid))
        await until_called(cloud, "take_down")
        cloud.up.set()
        await ending
        assert not (root / "pods/u-1/volumes" / cloud.folder).exists()
        await until_called(cloud, "sweep []")
        assert cloud.calls == ["set_up", "take_down", "sweep []"], "setting up was given up"

    async def test_what_a_kind_cannot_undo_is_told_and_tried_again(
        self, volumes: PodVolumes, cloud: Cloud, root: Path
    ) -> None:
        cloud.up.set()
        await volumes.mount(pod_with(CLOUD, DATA))
        cloud.error = OSError(5, "Input/output error", "/cloud")
        with pytest.raises(VolumeError, match='TearDown failed for volume "cloud" : /cloud: Input/output'):
            await volumes.unmount("u-1")
        assert (root / "pods/u-1/volumes" / cloud.folder / "cloud").exists()
        cloud.error = None
        await asyncio.sleep(FIRST_PAUSE)
        await volumes.unmount("u-1")
        assert not (root / "pods/u-1/volumes" / cloud.folder).exists()
        assert volumes.in_use() == []

    async def test_who_waits_is_woken(self, volumes: PodVolumes, cloud: Cloud) -> None:
        woken: list[str] = []
        volumes.listen(woken.append, lambda *event: None)
        cloud.error = NotYet("no driver")
        with pytest.raises(VolumeError) as caught:
            await volumes.mount(pod_with(CLOUD))
        assert caught.value.retry_after is None
        cloud.error = OSError("broken")
        with pytest.raises(VolumeError) as caught:
            await volumes.mount(pod_with(CLOUD))
        assert caught.value.retry_after == pytest.approx(FIRST_PAUSE, abs=0.2)
        cloud.error = None
        cloud.up.set()
        with pytest.raises(VolumeError, match="broken"):
            await volumes.mount(pod_with(CLOUD))
        volumes._wake("u-1")
        assert woken == ["u-1"]
        assert (await volumes.mount(pod_with(CLOUD))).keys() == {"cloud"}

    async def test_volumes_of_an_earlier_agent(self, volumes: PodVolumes, cloud: Cloud, root: Path) -> None:
        (root / "pods/u-1/volumes" / cloud.folder / "cloud").mkdir(parents=True)
        assert volumes.in_use() is None, "nothing is said while it is not known"
        cloud.up.set()
        await volumes.refresh(pod_with(CLOUD))
        await volumes.refresh(pod_with(CLOUD))
        assert cloud.calls == ["set_up"]
        assert volumes.in_use() == ["cloud/1"]


@contextlib.contextmanager
def dead_server(point: Path) -> Iterator[None]:
    """A file system of which nobody answers: whoever looks at it hangs, until it is over."""
    point.mkdir()
    at = os.open("/dev/fuse", os.O_RDWR)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={at},rootmode=40000,user_id=0,group_id=0".encode()
        assert libc.mount(b"dead", os.fsencode(point), b"fuse", 0, options) == 0, ctypes.get_errno()
        yield
    finally:
        os.close(at)  # now the kernel answers that nobody does
        unmount(point, detach=True)


@pytest.mark.machine
@needs_root
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="needs fuse")
class TestDeadServer:
    async def test_a_host_path_that_does_not_answer(
        self, volumes: PodVolumes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host_path, "PATIENCE", 1.0)
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

    async def test_work_in_a_thread_that_hangs_is_left_behind(self, tmp_path: Path) -> None:
        with dead_server(tmp_path / "dead"):
            loop = asyncio.get_running_loop()
            began = loop.time()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await in_own_thread((tmp_path / "dead/x").exists, name="hangs", patience=0.3)
            assert loop.time() - began < 30


@pytest.mark.machine
@needs_root
class TestUnmount:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(unmounting, "PATIENCE", 0.3)
        monkeypatch.setattr(unmounting, "BUSY_SECONDS", 0.5)

    async def test_one_that_hangs_is_detached(
        self, volumes: PodVolumes, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await volumes.mount(pod_with(MEMORY, DATA))
        forever = threading.Event()

        def hang(point: Path, *, detach: bool = False) -> bool:
            if not detach:
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

    async def test_one_that_is_busy_is_detached_in_the_end(self, volumes: PodVolumes, root: Path) -> None:
        path = Path((await volumes.mount(pod_with(MEMORY)))["memory"].path)
        (path / "held").write_text("x")
        with (path / "held").open() as held:
            with pytest.raises(VolumeError, match="Device or resource busy"):
                await volumes.unmount("u-1")
            assert len(read_mounts(root.resolve())) == 1
            with pytest.raises(VolumeError, match="Device or resource busy"):
                await volumes.unmount("u-1")
            await asyncio.sleep(unmounting.BUSY_SECONDS)
            await volumes.unmount("u-1")
            assert read_mounts(root.resolve()) == []
            assert held.read() == "x", "who uses it is not harmed"
        assert not path.parent.exists()

    async def test_one_that_is_free_again(self, volumes: PodVolumes, root: Path) -> None:
        path = Path((await volumes.mount(pod_with(MEMORY)))["memory"].path)
        with (path / "held").open("w"), pytest.raises(VolumeError, match="busy"):
            await volumes.unmount("u-1")
        await volumes.unmount("u-1")
        assert read_mounts(root.resolve()) == []
