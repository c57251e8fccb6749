import asyncio
import os
import secrets
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.pod import Pod
from pykubelet.api.volume import HostPath
from pykubelet.linux.mounts import mount, unmount
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.paths import EMPTY_DIR, PodVolumePaths
from pykubelet.volumes.plugin import MountedVolume
from pykubelet.volumes.plugins import empty_dir
from pykubelet.volumes.plugins.empty_dir import MediumError, huge_page_option, tmpfs_size
from pykubelet.volumes.plugins.host_path import HostPathError, check_host_path
from tests.support.trees import deep_directory, nest
from tests.support.volumes import Shelf, mode_of, mounted_at, needs_root, pod_with, umask, volumes_at

MIB = 1 << 20
DATA: dict[str, Any] = {"name": "data", "emptyDir": {}}
TMP: dict[str, Any] = {"name": "tmp", "emptyDir": {"medium": "Memory"}}


class TestEmptyDir:
    async def test_mount_default_medium_creates_directory(self, root: Path, volumes: PodVolumes) -> None:
        with umask(0o077):
            mounted = await volumes.mount(pod_with(DATA, {"name": "none"}))
        path = root / "pods/u-1/volumes/kubernetes.io~empty-dir/data"
        assert mounted == {
            "data": MountedVolume(str(path), relabel=True),
            "none": MountedVolume(str(path.parent / "none"), relabel=True),
        }
        assert mode_of(path) == "0o777"
        assert mode_of(path.parent) == "0o755"
        assert mode_of(path.parents[1]) == "0o750"
        assert (root / "pods/u-1/plugins/kubernetes.io~empty-dir/data/ready").exists()

    async def test_mount_again_keeps_content_and_mode(self, volumes: PodVolumes) -> None:
        pod = pod_with(DATA, securityContext={"fsGroup": 4242})
        path = Path((await volumes.mount(pod))["data"].path)
        path.chmod(0o700)
        (path / "file").write_text("theirs")
        assert Path((await volumes.mount(pod))["data"].path) == path
        assert mode_of(path) == "0o700"
        assert (path / "file").read_text() == "theirs"

    async def test_mount_interrupted_set_up_is_completed(self, root: Path, volumes: PodVolumes) -> None:
        path = root / "pods/u-1/volumes/kubernetes.io~empty-dir/data"
        path.mkdir(parents=True, mode=0o700)
        await volumes.mount(pod_with(DATA))
        assert mode_of(path) == "0o777"
        marked_only = root / "pods/u-1/volumes/kubernetes.io~empty-dir/data"
        marked_only.rmdir()
        await volumes.mount(pod_with(DATA))
        assert mode_of(path) == "0o777"

    @needs_root
    async def test_mount_fs_group_applied_without_following_links(
        self, root: Path, volumes: PodVolumes
    ) -> None:
        path = root / "pods/u-1/volumes/kubernetes.io~empty-dir/data"
        (path / "inner").mkdir(parents=True)
        (path / "inner/file").touch(mode=0o600)
        outside = root / "outside"
        outside.touch(mode=0o600)
        (path / "link").symlink_to(outside)
        (path / "folder-link").symlink_to(root)
        await volumes.mount(pod_with(DATA, securityContext={"fsGroup": 4242}))
        made = [path, path / "inner", path / "inner/file", path / "link", path / "folder-link"]
        assert [entry.lstat().st_gid for entry in made] == [4242] * 5
        assert (mode_of(path), mode_of(path / "inner/file")) == ("0o2777", "0o660")
        assert mode_of(path / "inner") == "0o2775"
        assert (outside.stat().st_gid, mode_of(outside)) == (0, "0o600")

    @pytest.mark.machine
    @needs_root
    async def test_mount_memory_medium_is_tmpfs_with_size(self, root: Path, shelf: Shelf) -> None:
        volumes = volumes_at(root, shelf, lambda pod: 8 * MIB)
        pod = pod_with(TMP, {"name": "small", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}})
        mounted = await volumes.mount(pod)
        await volumes.mount(pod)
        sizes = {}
        for name, volume in mounted.items():
            (found,) = mounted_at(Path(volume.path))
            assert found.kind == "tmpfs"
            sizes[name] = next(option for option in found.options if option.startswith("size="))
        assert sizes == {"tmp": "size=8192k", "small": "size=4096k"}
        assert mode_of(Path(mounted["tmp"].path)) == "0o1777"

    @pytest.mark.machine
    @needs_root
    async def test_mount_memory_medium_after_reboot_is_remounted(self, volumes: PodVolumes) -> None:
        path = Path((await volumes.mount(pod_with(TMP)))["tmp"].path)
        unmount(path)
        await volumes.mount(pod_with(TMP))
        assert len(mounted_at(path)) == 1

    @pytest.mark.machine
    @needs_root
    async def test_mount_huge_pages_medium_is_hugetlbfs(self, volumes: PodVolumes) -> None:
        if not Path("/sys/kernel/mm/hugepages/hugepages-2048kB").is_dir():
            pytest.skip("this machine has no huge pages of 2 MiB")
        pages = {"requests": {"hugepages-2Mi": "4Mi"}, "limits": {"hugepages-2Mi": "4Mi"}}
        pod = pod_with(
            {"name": "huge", "emptyDir": {"medium": "HugePages-2Mi"}},
            containers=[{"name": "main", "image": "i", "resources": pages}],
        )
        path = Path((await volumes.mount(pod))["huge"].path)
        (found,) = mounted_at(path)
        assert found.kind == "hugetlbfs"
        assert "pagesize=2M" in found.options
        await volumes.unmount("u-1")
        assert not path.exists()

    @pytest.mark.parametrize(
        ("limits", "size"),
        [((0, 0, 0), 0), ((0, 0, 9), 9), ((0, 5, 9), 5), ((3, 5, 9), 3), ((7, 5, 9), 5), ((20, 0, 9), 9)],
    )
    def test_tmpfs_size_returns_smallest_limit(self, limits: tuple[int, int, int], size: int) -> None:
        assert tmpfs_size(*limits) == size

    @given(st.tuples(*[st.integers(0, 2**50)] * 3))
    def test_tmpfs_size_any_limits_never_exceeds_limit(self, limits: tuple[int, int, int]) -> None:
        size = tmpfs_size(*limits)
        assert all(size <= limit for limit in limits if limit)
        assert size in limits

    @staticmethod
    def asking(*resources: str) -> Pod:
        containers = [
            {"name": f"c{i}", "resources": {"requests": {name: "4Mi"}}} for i, name in enumerate(resources)
        ]
        return pod_with(containers=containers)

    @pytest.mark.parametrize(
        ("medium", "resources", "option"),
        [
            ("HugePages", ["hugepages-2Mi", "cpu"], "pagesize=2Mi"),
            ("HugePages", ["hugepages-2Mi", "hugepages-2048Ki"], "pagesize=2Mi"),
            ("HugePages-1Gi", ["hugepages-2Mi", "hugepages-1Gi"], "pagesize=1Gi"),
        ],
    )
    def test_huge_page_option_returns_page_size(self, medium: str, resources: list[str], option: str) -> None:
        assert huge_page_option(medium, self.asking(*resources)) == option

    @pytest.mark.parametrize(
        ("medium", "resources", "problem"),
        [
            ("HugePages", ["hugepages-2Mi", "hugepages-1Gi"], "multiple huge page sizes"),
            ("HugePages", ["cpu"], "no resource request for huge pages"),
            ("HugePages-1Gi", ["hugepages-2Mi"], "no resource request for huge pages"),
            ("HugePages-x", ["hugepages-2Mi"], "not a quantity"),
        ],
    )
    def test_huge_page_option_invalid_request_raises(
        self, medium: str, resources: list[str], problem: str
    ) -> None:
        with pytest.raises(MediumError, match=problem):
            huge_page_option(medium, self.asking(*resources))


class TestHostPath:
    @pytest.fixture
    def things(self, tmp_path: Path) -> Iterator[dict[str, Path]]:
        things = {name: tmp_path / name for name in ("Directory", "File", "Socket", "BlockDevice", "missing")}
        things["Directory"].mkdir()
        things["File"].touch()
        if os.geteuid() == 0:
            os.mknod(things["BlockDevice"], stat.S_IFBLK | 0o600, os.makedev(7, 255))
        things["CharDevice"] = Path("/dev/null")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/tmp/pyk-{secrets.token_hex(4)}")
            Path(listener.getsockname()).rename(things["Socket"])
            yield things

    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            ("Directory", "a directory"),
            ("File", "a file"),
            ("Socket", "a socket file"),
            ("CharDevice", "a character device"),
            ("BlockDevice", "a block device"),
        ],
    )
    @needs_root
    def test_check_host_path_type_mismatch_raises(
        self, things: dict[str, Path], kind: str, words: str, tmp_path: Path
    ) -> None:
        for name, path in things.items():
            link = tmp_path / "link"
            link.symlink_to(path)
            for place in (path, link):
                if name == kind:
                    check_host_path(HostPath(path=str(place), type=kind))
                else:
                    with pytest.raises(HostPathError) as caught:
                        check_host_path(HostPath(path=str(place), type=kind))
                    assert str(caught.value) == f"hostPath type check failed: {place} is not {words}"
            link.unlink()

    def test_check_host_path_or_create_creates_missing_path(self, tmp_path: Path) -> None:
        folder, file = tmp_path / "a/b/c", tmp_path / "a/b/c/file"
        with umask(0o022):
            check_host_path(HostPath(path=str(folder), type="DirectoryOrCreate"))
            check_host_path(HostPath(path=str(file), type="FileOrCreate"))
        assert (mode_of(folder), mode_of(file)) == ("0o755", "0o644")
        file.write_text("kept")
        check_host_path(HostPath(path=str(folder), type="DirectoryOrCreate"))
        check_host_path(HostPath(path=str(file), type="FileOrCreate"))
        assert file.read_text() == "kept"
        with pytest.raises(HostPathError, match="is not a file"):
            check_host_path(HostPath(path=str(folder), type="FileOrCreate"))
        with pytest.raises(HostPathError, match="is not a directory"):
            check_host_path(HostPath(path=str(file), type="DirectoryOrCreate"))

    @pytest.mark.parametrize("kind", ["Folder", "SocketOrCreate", "OrCreate", "directory"])
    def test_check_host_path_unknown_type_raises(self, kind: str) -> None:
        with pytest.raises(HostPathError, match=f"^{kind} is an invalid volume type$"):
            check_host_path(HostPath(path="/tmp", type=kind))

    def test_check_host_path_with_dot_dot_raises(self) -> None:
        with pytest.raises(HostPathError, match=r"invalid HostPath `/a/\.\./etc`: must not contain '\.\.'"):
            check_host_path(HostPath(path="/a/../etc"))

    async def test_mount_returns_host_path_and_unmount_keeps_it(
        self, volumes: PodVolumes, tmp_path: Path
    ) -> None:
        given = [
            {"name": "any", "hostPath": {"path": "/nowhere/at/all"}},
            {"name": "dir", "hostPath": {"path": str(tmp_path), "type": "Directory"}},
        ]
        assert await volumes.mount(pod_with(*given)) == {
            "any": MountedVolume("/nowhere/at/all"),
            "dir": MountedVolume(str(tmp_path)),
        }
        await volumes.unmount("u-1")
        assert tmp_path.exists()


class TestRefusals:
    async def test_mount_several_volumes_fail_raises_problem_for_each(
        self, volumes: PodVolumes, root: Path
    ) -> None:
        pod = pod_with(
            DATA,
            {"name": "share", "glusterfs": {"endpoints": "e", "path": "p"}},
            {"name": "disk", "emptyDir": {"medium": "Floppy"}},
            {"name": "gone", "hostPath": {"path": "/nowhere", "type": "File"}},
        )
        with pytest.raises(VolumeError) as caught:
            await volumes.mount(pod)
        assert str(caught.value).split("; M") == [
            'MountVolume.NewMounter initialization failed for volume "share" : glusterfs volumes were '
            "removed from Kubernetes: use a CSI driver, nfs or local volumes instead",
            'ountVolume.SetUp failed for volume "disk" : unknown storage medium "Floppy"',
            'ountVolume.SetUp failed for volume "gone" : hostPath type check failed: /nowhere is not a file',
        ]
        assert len(caught.value.problems) == 3, "for an event each"
        assert PodVolumePaths.for_pod(root, "u-1").volume(EMPTY_DIR, "data").is_dir()

    async def test_mount_os_error_names_path(self, volumes: PodVolumes, root: Path) -> None:
        root.mkdir()
        (root / "pods").touch()
        with pytest.raises(VolumeError, match=r'volume "data" : .*root/pods.*: Not a directory'):
            await volumes.mount(pod_with(DATA))

    @pytest.mark.parametrize("name", ["..", "a/b", "", "."])
    async def test_mount_invalid_volume_name_or_uid_raises(
        self, volumes: PodVolumes, root: Path, name: str
    ) -> None:
        with pytest.raises(VolumeError, match="cannot be a folder's name"):
            await volumes.mount(pod_with({"name": name, "emptyDir": {}}))
        pod = pod_with(DATA)
        pod.metadata.uid = name
        with pytest.raises(VolumeError, match="cannot be a folder's name"):
            await volumes.mount(pod)
        with pytest.raises(VolumeError, match="cannot be a folder's name"):
            await volumes.unmount(name)


class TestUnmount:
    async def test_unmount_deep_tree_in_empty_dir_is_removed(self, shelf: Shelf) -> None:
        """Verify that no depth of directories in an emptyDir makes its pod undeletable."""
        with deep_directory() as root:
            volumes = volumes_at(root, shelf)
            path = Path((await volumes.mount(pod_with(DATA)))["data"].path)
            nest(path, 5000)
            await volumes.unmount("u-1")
            assert not path.exists()

    async def test_unmount_removes_only_pod_volumes(self, volumes: PodVolumes, root: Path) -> None:
        other = root / "pods/u-1/volumes/example.com~unheard/share"
        other.mkdir(parents=True)
        path = Path((await volumes.mount(pod_with(DATA)))["data"].path)
        treasure = root / "treasure"
        treasure.mkdir()
        (treasure / "gold").touch()
        (path / "way-out").symlink_to(treasure)
        (path / "deep/er").mkdir(parents=True)
        await volumes.unmount("u-1")
        assert not path.parent.exists()
        assert not (root / "pods/u-1/plugins/kubernetes.io~empty-dir").exists()
        assert (treasure / "gold").exists()
        assert other.is_dir()
        await volumes.unmount("u-1")
        await volumes.unmount("never-seen")

    @pytest.mark.machine
    @needs_root
    async def test_unmount_kubelet_restarted_removes_nested_mounts(
        self, root: Path, tmp_path: Path, shelf: Shelf
    ) -> None:
        """Through a link to the root, with a mount that a container left in a volume."""
        link = tmp_path / "link"
        link.symlink_to(root)
        root.mkdir()
        first = volumes_at(link, shelf)
        mounted = await first.mount(pod_with(DATA, TMP))
        inner = Path(mounted["data"].path) / "inner"
        inner.mkdir()
        mount("tmpfs", inner, "tmpfs")
        (inner / "file").touch()
        again = volumes_at(link, shelf)
        await again.unmount("u-1")
        assert not Path(mounted["tmp"].path).exists()
        assert mounted_at(inner) == []
        assert not inner.exists()

    @pytest.mark.machine
    @needs_root
    async def test_unmount_busy_volume_raises_and_keeps_content(self, volumes: PodVolumes) -> None:
        path = Path((await volumes.mount(pod_with(DATA, TMP)))["tmp"].path)
        (path / "file").write_text("kept")
        with subprocess.Popen(["sleep", "60"], cwd=path) as user:
            try:
                with pytest.raises(VolumeError, match=r"TearDown failed for pod u-1 : .*/tmp: .*busy"):
                    await volumes.unmount("u-1")
                assert (path / "file").read_text() == "kept"
            finally:
                user.kill()
        await volumes.unmount("u-1")
        assert not path.exists()


class TestCancellation:
    async def test_mount_cancelled_waits_for_thread(
        self, volumes: PodVolumes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, go, ended = threading.Event(), threading.Event(), threading.Event()
        make = empty_dir.make_empty_dir

        def slow(*args: Any) -> None:
            begun.set()
            go.wait(60)
            make(*args)
            ended.set()

        monkeypatch.setattr(empty_dir, "make_empty_dir", slow)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(volumes.mount(pod_with(DATA)))
            while not begun.is_set():
                await asyncio.sleep(0.01)
            for _ in range(2):
                task.cancel()
                await asyncio.sleep(0.01)
            assert not task.done()
            go.set()
        assert task.cancelled()
        assert ended.is_set()

    async def test_mount_fails_after_cancellation_raises_timeout_error(
        self, volumes: PodVolumes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go = threading.Event()

        def fail(*_: Any) -> None:
            go.wait(10)
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(empty_dir, "make_empty_dir", fail)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                asyncio.get_running_loop().call_later(0.05, go.set)
                await volumes.mount(pod_with(DATA))
