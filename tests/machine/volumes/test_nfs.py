"""nfs, without a server: this machine's kernel has no NFS, so `mount` is a stand-in that binds a folder."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.storage import PersistentVolume
from pykubelet.linux.mounts import read_mounts
from pykubelet.volumes.errors import BadSource
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.mounts.mount_helper import HelperError
from pykubelet.volumes.mounts.sub_path import bind_opened, opened_inside
from pykubelet.volumes.paths import PodVolumePaths
from pykubelet.volumes.plugins.nfs import NfsPlugin, nfs_source
from tests.support.volume_programs import MOUNT, StandIns, stand_ins, surroundings, wanted
from tests.support.volumes import Shelf, needs_root, pod_with


def pod_of(**source: Any) -> Any:
    return pod_with({"name": "v", "nfs": {"server": "192.0.2.9", "path": "/x"} | source})


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[StandIns]:
    with stand_ins(tmp_path / "bin") as made:
        yield made


@pytest.fixture
def export(tmp_path: Path) -> Path:
    (tmp_path / "export/sub").mkdir(parents=True)
    (tmp_path / "export/file").write_text("exported")
    return tmp_path / "export"


@pytest.fixture
def kind(root: Path, shelf: Shelf) -> NfsPlugin:
    return NfsPlugin(surroundings(root, shelf))


@pytest.mark.parametrize(
    ("server", "remote"),
    [
        ("192.0.2.9", "192.0.2.9:/x"),
        ("nfs.example", "nfs.example:/x"),
        ("2001:db8::9", "[2001:db8::9]:/x"),
        ("[2001:db8::9]", "[2001:db8::9]:/x"),
    ],
)
def test_nfs_source_valid_server_returns_remote(server: str, remote: str) -> None:
    assert nfs_source(wanted(pod_of(server=server)).source) == remote


@pytest.mark.parametrize("server", ["", "-o", "--bind"])
def test_nfs_source_invalid_server_raises(server: str) -> None:
    with pytest.raises(BadSource, match="is no server"):
        nfs_source(wanted(pod_of(server=server)).source)


@pytest.mark.machine
@needs_root
class TestMounting:
    async def test_nfs_set_up_mounts_once_and_tear_down_unmounts(
        self, kind: NfsPlugin, root: Path, programs: StandIns, export: Path
    ) -> None:
        programs.add("mount", MOUNT)
        mounted = await kind.set_up(wanted(pod_of(path=str(export))))
        place = root / "pods/u-1/volumes/kubernetes.io~nfs/v"
        assert (mounted.path, mounted.read_only, mounted.relabel) == (str(place), False, False)
        assert (place / "file").read_text() == "exported"
        (place / "new").touch()
        assert (export / "new").exists()
        await kind.set_up(wanted(pod_of(path=str(export))))
        assert programs.calls == [["mount", "-t", "nfs", f"192.0.2.9:{export}", str(place)]], "once"
        await kind.tear_down("u-1", "v")
        await kind.tear_down("u-1", "v")
        assert not self.left(root)

    async def test_nfs_set_up_read_only_passes_ro(
        self, kind: NfsPlugin, root: Path, programs: StandIns, export: Path
    ) -> None:
        programs.add("mount", MOUNT)
        mounted = await kind.set_up(wanted(pod_of(path=str(export), readOnly=True)))
        assert mounted.read_only
        with pytest.raises(OSError, match="Read-only"):
            Path(mounted.path, "new").touch()
        assert programs.calls[0][1:5] == ["-t", "nfs", "-o", "ro"]
        await kind.tear_down("u-1", "v")

    async def test_nfs_set_up_persistent_volume_passes_mount_options(
        self, kind: NfsPlugin, root: Path, programs: StandIns, export: Path
    ) -> None:
        """Whether it is read-only is for the claim to say, as everywhere."""
        programs.add("mount", MOUNT)
        volume = wanted(
            pod_of(path=str(export), readOnly=True),
            name="pv-1",
            persistent=PersistentVolume(),
            mount_options=("vers=4.1", "hard"),
        )
        mounted = await kind.set_up(volume)
        assert (mounted.path, mounted.read_only) == (
            str(root / "pods/u-1/volumes/kubernetes.io~nfs/pv-1"),
            False,
        )
        assert programs.calls[0][3:5] == ["-o", "hard,vers=4.1"]
        await kind.tear_down("u-1", "pv-1")

    async def test_nfs_tear_down_unmounts_sub_paths(
        self, kind: NfsPlugin, root: Path, programs: StandIns, export: Path
    ) -> None:
        programs.add("mount", MOUNT)
        mounted = await kind.set_up(wanted(pod_of(path=str(export))))
        target = PodVolumePaths.for_pod(root, "u-1").sub_path("v", "main", 0)
        with opened_inside(Path(mounted.path), "sub") as source:
            bind_opened(source, target, [])
        await kind.tear_down("u-1", "v")
        assert not self.left(root)

    async def test_nfs_set_up_access_denied_raises_and_leaves_nothing(
        self, kind: NfsPlugin, root: Path, programs: StandIns
    ) -> None:
        programs.add("mount", "sys.exit('mount.nfs: access denied by server while mounting 192.0.2.9:/x')")
        with pytest.raises(HelperError, match=r"^mount failed: .* access denied by server while mounting"):
            await kind.set_up(wanted(pod_of()))
        assert not (root / "pods/u-1/volumes/kubernetes.io~nfs/v").exists()

    async def test_nfs_set_up_fails_after_mounting_is_unmounted(
        self, kind: NfsPlugin, root: Path, programs: StandIns, export: Path
    ) -> None:
        programs.add("mount", MOUNT + "sys.exit('too late')")
        with pytest.raises(HelperError, match="too late"):
            await kind.set_up(wanted(pod_of(path=str(export))))
        assert not self.left(root)

    async def test_nfs_tear_down_busy_stays_mounted_until_released(
        self, kind: NfsPlugin, root: Path, programs: StandIns, export: Path
    ) -> None:
        programs.add("mount", MOUNT)
        mounted = await kind.set_up(wanted(pod_of(path=str(export))))
        with subprocess.Popen(["sleep", "60"], cwd=mounted.path) as user:
            try:
                await kind.tear_down("u-1", "v")
                assert self.left(root) == [Path(mounted.path)], "that is for others to wait for"
            finally:
                user.kill()
        await kind.tear_down("u-1", "v")
        assert not self.left(root)

    def left(self, root: Path) -> list[Path]:
        return [one.point for one in read_mounts(root.resolve())]


@pytest.mark.machine
@needs_root
async def test_mount_nfs_server_hangs_other_pods_mounted(
    volumes: PodVolumes, root: Path, programs: StandIns, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    programs.add("mount", f"import time\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(volumes.mount(pod_of()))
        async with asyncio.timeout(30):
            while not begun.exists() or not begun.read_text():
                await asyncio.sleep(0.02)
        for number in range(20):
            uid = f"u-{number + 2}"
            await volumes.mount(pod_with({"name": "data", "emptyDir": {}}, metadata={"uid": uid}))
            await volumes.unmount(uid)
        assert not waiting.done()
        waiting.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
    await volumes.unmount("u-1")
    assert not (root / "pods/u-1/volumes/kubernetes.io~nfs").exists()
