import gc
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.pod import Pod
from pykubelet.linux.mounts import read_mounts
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.mounts.sub_path import SubPathEscapeError, opened_inside
from pykubelet.volumes.plugin import MountedVolume
from tests.support.volumes import needs_root, pod_with


def inode(path: Path) -> int:
    return path.stat().st_ino


def showing(*volumes: str) -> Pod:
    """A pod whose container mounts these volumes."""
    mounts = [{"name": name, "mountPath": f"/m{i}"} for i, name in enumerate(volumes)]
    return pod_with(
        *({"name": name, "emptyDir": {}} for name in set(volumes)),
        containers=[{"name": "main", "image": "i", "volumeMounts": mounts}],
    )


class TestOpening:
    @pytest.fixture
    def volume(self, tmp_path: Path) -> Path:
        volume = tmp_path / "volume"
        (volume / "a/b").mkdir(parents=True)
        (volume / "a/file").touch()
        (tmp_path / "secret").mkdir()
        volume.chmod(0o2770)
        return volume

    @pytest.mark.parametrize("path", ["a", "a/b", "a/./b", "a/file", "a//b/", "."])
    def test_opened_inside_existing_path_is_opened(self, volume: Path, path: str) -> None:
        with opened_inside(volume, path) as found:
            assert os.fstat(found).st_ino == inode(volume / path)

    def test_opened_inside_missing_path_created_with_volume_mode(self, volume: Path) -> None:
        before = os.umask(0o077)
        try:
            with opened_inside(volume, "a/new/er") as found:
                assert os.fstat(found).st_ino == inode(volume / "a/new/er")
        finally:
            os.umask(before)
        modes = [stat.S_IMODE((volume / path).stat().st_mode) for path in ("a/new", "a/new/er")]
        assert modes == [0o2770, 0o2770]

    def test_opened_inside_link_inside_volume_is_followed(self, volume: Path) -> None:
        (volume / "relative").symlink_to("a/b")
        (volume / "absolute").symlink_to(volume / "a")
        with opened_inside(volume, "relative") as found:
            assert os.fstat(found).st_ino == inode(volume / "a/b")
        with opened_inside(volume, "absolute/b") as found:
            assert os.fstat(found).st_ino == inode(volume / "a/b")

    @pytest.mark.parametrize(
        "target", ["/etc", "../secret", "../../..", "/proc/self/root/etc", "../secret/new"]
    )
    @pytest.mark.parametrize("path", ["link", "link/new"])
    def test_opened_inside_link_outside_volume_raises(self, volume: Path, target: str, path: str) -> None:
        (volume / "link").symlink_to(target)
        with pytest.raises(SubPathEscapeError), opened_inside(volume, path):
            pass
        assert list((volume.parent / "secret").iterdir()) == []

    def test_opened_inside_link_loop_raises(self, volume: Path) -> None:
        (volume / "one").symlink_to("two")
        (volume / "two").symlink_to("one")
        with pytest.raises(OSError, match="link"), opened_inside(volume, "one/x"):
            pass

    def test_opened_inside_more_than_forty_links_raises(self, volume: Path) -> None:
        for number in range(2000):
            (volume / f"l{number}").symlink_to(f"l{number + 1}")
        (volume / "l2000").mkdir()
        with opened_inside(volume, "l1960") as found:
            assert os.fstat(found).st_ino == inode(volume / "l2000")
        for path in ("l1959", "l0", "l0/new"):
            with pytest.raises(SubPathEscapeError, match="too many links"), opened_inside(volume, path):
                pass

    def test_opened_inside_exponential_links_raises(self, volume: Path) -> None:
        """Each leads twice through the next: a trillion steps for who counts neither steps nor links."""
        for number in range(40):
            (volume / f"l{number}").symlink_to(f"l{number + 1}/../l{number + 1}")
        (volume / "l40").mkdir()
        with pytest.raises(SubPathEscapeError, match="too many links"), opened_inside(volume, "l0"):
            pass

    def test_opened_inside_link_leaving_and_reentering_is_followed(self, volume: Path) -> None:
        (volume / "around").symlink_to("../volume/a")
        (volume.parent / "other").symlink_to(volume)
        (volume / "elsewhere").symlink_to(volume.parent / "other/a")
        for path in ("around/b", "elsewhere/b"):
            with opened_inside(volume, path) as found:
                assert os.fstat(found).st_ino == inode(volume / "a/b")

    def test_opened_inside_volume_is_link_is_resolved(self, volume: Path) -> None:
        (volume.parent / "other").symlink_to("volume")
        with opened_inside(volume.parent / "other", "a/b") as found:
            assert os.fstat(found).st_ino == inode(volume / "a/b")

    def test_opened_inside_relative_volume_path_is_opened(
        self, volume: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(volume.parent)
        with opened_inside(Path("volume"), "a/b") as found:
            assert os.fstat(found).st_ino == inode(volume / "a/b")

    def test_opened_inside_directory_created_concurrently_keeps_mode(
        self, volume: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make = os.mkdir

        def late(path: str, mode: int, *, dir_fd: int) -> None:
            make(path, 0o700, dir_fd=dir_fd)
            make(path, mode, dir_fd=dir_fd)

        monkeypatch.setattr(os, "mkdir", late)
        with opened_inside(volume, "new") as found:
            assert os.fstat(found).st_mode & 0o777 == 0o700

    def test_opened_inside_path_below_file_raises(self, volume: Path) -> None:
        with pytest.raises(NotADirectoryError), opened_inside(volume, "a/file/x"):
            pass

    def test_opened_inside_fifo_does_not_block(self, volume: Path) -> None:
        os.mkfifo(volume / "pipe")
        with opened_inside(volume, "pipe") as found:
            assert stat.S_ISFIFO(os.fstat(found).st_mode)

    def test_opened_inside_closes_descriptors(self, volume: Path) -> None:
        gc.collect()  # what earlier tests left open is closed now and not meanwhile
        before = sorted(Path("/proc/self/fd").iterdir())
        for path in ("a/b", "x/y/z", "a/file/x"):
            try:
                with opened_inside(volume, path):
                    pass
            except NotADirectoryError:
                pass
        assert sorted(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.machine
@needs_root
class TestBinding:
    async def mounted(self, volumes: PodVolumes, *names: str) -> tuple[Pod, dict[str, MountedVolume], Path]:
        pod = showing(*names)
        mounted = await volumes.mount(pod)
        return pod, mounted, Path(mounted[names[0]].path)

    async def test_sub_paths_directory_and_file_are_bound_and_unmounted(
        self, volumes: PodVolumes, root: Path
    ) -> None:
        pod, mounted, data = await self.mounted(volumes, "data", "data", "data")
        (data / "file").write_text("content")
        paths = {0: "sub/folder", 2: "file"}
        bound = await volumes.sub_paths(pod, pod.spec.containers[0], mounted, paths)
        folder = root / "pods/u-1/volume-subpaths/data/main"
        assert bound == {0: str(folder / "0"), 2: str(folder / "2")}
        (folder / "0/made").touch()
        assert (data / "sub/folder/made").exists()
        assert (folder / "2").read_text() == "content"
        assert stat.S_IMODE((data / "sub").stat().st_mode) == 0o777
        await volumes.unmount("u-1")
        assert not (root / "pods/u-1/volume-subpaths").exists()
        assert not data.exists()

    async def test_sub_paths_source_replaced_is_rebound(self, volumes: PodVolumes, root: Path) -> None:
        pod, mounted, data = await self.mounted(volumes, "data")
        target = root / "pods/u-1/volume-subpaths/data/main/0"

        async def bind() -> None:
            await volumes.sub_paths(pod, pod.spec.containers[0], mounted, {0: "part"})
            assert len([mount for mount in read_mounts() if mount.point == target.resolve()]) == 1

        await bind()
        await bind()
        (data / "part").rename(data / "old")
        (data / "part").mkdir()
        await bind()
        (target / "new").touch()
        assert (data / "part/new").exists()
        for number, content in enumerate(("a file now", "another")):
            (data / "part").rename(data / f"old{number}")
            (data / "part").write_text(content)
            await bind()
            assert target.read_text() == content
        (data / "part").unlink()
        await bind()
        assert target.is_dir()
        await volumes.unmount("u-1")
        assert not target.exists()

    async def test_sub_paths_link_to_host_raises_without_host_details(
        self, volumes: PodVolumes, root: Path
    ) -> None:
        pod, mounted, data = await self.mounted(volumes, "data")
        (data / "link").symlink_to("/etc")
        with pytest.raises(VolumeError) as caught:
            await volumes.sub_paths(pod, pod.spec.containers[0], mounted, {0: "link/ssl"})
        message = 'failed to prepare subPath for volumeMount "data" of container "main"'
        assert str(caught.value) == message, "and nothing is told of the host"
        assert not (root / "pods/u-1/volume-subpaths").exists()

    @pytest.mark.parametrize("path", ["/etc", "a/../b", ".."])
    async def test_sub_paths_invalid_path_raises(self, volumes: PodVolumes, path: str) -> None:
        pod, mounted, _ = await self.mounted(volumes, "data")
        with pytest.raises(VolumeError, match="must be a relative path"):
            await volumes.sub_paths(pod, pod.spec.containers[0], mounted, {0: path})

    async def test_sub_paths_empty_path_is_skipped_and_missing_volume_raises(
        self, volumes: PodVolumes
    ) -> None:
        pod, mounted, _ = await self.mounted(volumes, "data")
        nothing: dict[str, Any] = {}
        assert await volumes.sub_paths(pod, pod.spec.containers[0], mounted, {0: ""}) == {}
        with pytest.raises(VolumeError, match='cannot find volume "data" to mount into container "main"'):
            await volumes.sub_paths(pod, pod.spec.containers[0], nothing, {0: "x"})
