"""Full disks, and folders that somebody else deleted: pods are told, and can go."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.linux.mounts import mount, read_mounts, unmount
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.manager import PodVolumes
from tests.machine.volumes.test_kills import the_pod, the_server, the_shelf
from tests.support.dying import dies_at
from tests.support.volume_programs import loops_left
from tests.support.volumes import Shelf, needs_root, pod_with, volumes_at

pytestmark = [pytest.mark.machine, needs_root]

CONFIG = {"name": "config", "configMap": {"name": "c"}}
EMPTY = {"name": "empty", "emptyDir": {}}
SECRET = {"name": "secret", "secret": {"secretName": "s"}}


class Disk:
    """A small disk that the agent's root is on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._filler = root / "filler"

    def fill(self) -> None:
        """Take all that is left."""
        with self._filler.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    def free(self) -> None:
        self._filler.unlink()


@pytest.fixture
def disk(root: Path) -> Iterator[Disk]:
    root.mkdir()
    mount("tmpfs", root, "tmpfs", "size=256k")
    try:
        yield Disk(root)
    finally:
        for mounted in reversed(read_mounts(root.resolve())):
            unmount(mounted.point, detach=True)


async def test_pod_volumes_disk_full_mount_raises_and_unmount_succeeds(
    disk: Disk, root: Path, shelf: Shelf
) -> None:
    shelf.config_maps["c"] = {"a": "old"}
    volumes, pod = volumes_at(root, shelf), pod_with(CONFIG, EMPTY)
    given = Path((await volumes.mount(pod))["config"].path)
    disk.fill()
    shelf.config_maps["c"] = {"a": "new" * 10_000}
    with pytest.raises(VolumeError, match="No space left on device"):
        await volumes.refresh(pod)
    assert (given / "a").read_text() == "old"
    later = pod_with(CONFIG, metadata={"uid": "u-2"})
    with pytest.raises(VolumeError, match=r'"config" : .*No space left on device'):
        await volumes.mount(later)
    for uid in ("u-1", "u-2"):
        await volumes.unmount(uid)
        assert not (root / "pods" / uid / "volumes/kubernetes.io~configmap").exists()
    disk.free()
    await volumes.mount(later)
    await volumes.unmount("u-2")


async def test_refresh_disk_full_completes_after_space_is_freed(disk: Disk, root: Path, shelf: Shelf) -> None:
    shelf.config_maps["c"] = {"a": "old"}
    volumes, pod = volumes_at(root, shelf), pod_with(CONFIG)
    given = Path((await volumes.mount(pod))["config"].path)
    disk.fill()
    shelf.config_maps["c"] = {"a": "new" * 10_000}
    with pytest.raises(VolumeError):
        await volumes.refresh(pod)
    disk.free()
    await volumes.refresh(pod)
    assert (given / "a").read_text() == "new" * 10_000
    hidden = [path.name for path in given.iterdir() if path.name.startswith("..")]
    assert len(hidden) == 2, "nothing half-written stays"


@pytest.mark.parametrize("part", ["pods/u-1", "pods/u-1/volumes", "pods/u-1/plugins", "plugins"])
async def test_pod_volumes_directories_deleted_are_recreated_and_unmountable(
    volumes: PodVolumes, root: Path, shelf: Shelf, part: str
) -> None:
    shelf.config_maps["c"] = {"a": "1"}
    shelf.secrets["s"] = {"b": b"2"}
    pod = pod_with(CONFIG, EMPTY, SECRET)
    given = await volumes.mount(pod)
    for mounted in reversed(read_mounts(root.resolve())):
        unmount(mounted.point)
    shutil.rmtree(root / part, ignore_errors=True)
    again = await volumes.mount(pod)
    assert given == again
    assert Path(again["config"].path, "a").read_text() == "1"
    assert Path(again["secret"].path, "b").read_bytes() == b"2"
    assert Path(again["empty"].path).is_dir()
    for mounted in reversed(read_mounts(root.resolve())):
        unmount(mounted.point)
    shutil.rmtree(root / part, ignore_errors=True)
    await volumes.unmount("u-1")
    assert read_mounts(root.resolve()) == []
    assert not list(root.glob("pods/u-1/volumes/*"))


def test_pod_volumes_kubelet_killed_at_any_step_next_one_recovers(root: Path) -> None:
    """All kinds that need only this machine: the next agent goes on, or takes everything down."""

    async def live() -> None:
        volumes, pod = volumes_at(root, the_shelf(), server=the_server(root)), the_pod()
        mounted = await volumes.mount(pod)
        await volumes.sub_paths(pod, pod.spec.containers[0], mounted, {0: "x/y"})
        await volumes.unmount(pod.uid)

    async def finish(moment: int) -> None:
        volumes, pod = volumes_at(root, the_shelf(), server=the_server(root)), the_pod()
        if moment % 2:
            mounted = await volumes.mount(pod)
            assert Path(mounted["config"].path, "x/y").read_text() == "1"
            assert Path(mounted["block"].device).is_block_device()
        await volumes.unmount(pod.uid)
        assert read_mounts(root.resolve()) == [], f"step {moment}"
        assert loops_left(root.parent) == []
        assert not list(root.glob("pods/u-1/volumes/*"))

    moment = 1
    while dies_at(moment, root, live):
        asyncio.run(finish(moment))
        moment += 1
    assert moment > 30, "the kills met different moments"
