"""Ways out of a volume that others have found, and those that they might: none of them is one.

The published ones: CVE-2017-1002101 (a link in a volume, followed by a sub-path), CVE-2021-25741 (a link
put there between looking and mounting), CVE-2017-1002102 (a link in a volume of files that the agent
replaces or deletes), CVE-2024-10220 and CVE-2025-1767 (gitRepo, which is refused altogether).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.linux.mounts import mount, read_mounts, unmount
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.mounts.sub_path import bind_opened, opened_inside
from tests.support.attacker import swapping, tries
from tests.support.volumes import Shelf, needs_root, pod_with

MS_BIND = 4096
DATA = {"name": "data", "emptyDir": {}}
OUTSIDE = {
    "absolute": "{secret}",
    "relative": "../secret",
    "far up": "../../../../../../../../../../../../etc",
    "the machine's root": "/",
    "a process' root": "/proc/1/root/etc",
    "a descriptor of ours": "/proc/self/fd",
    "our own folder": "/proc/self/cwd",
    "there and on": "{secret}/b/../b",
}


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    volume = tmp_path / "volume"
    (volume / "a/swapped/b").mkdir(parents=True)
    (tmp_path / "secret/b").mkdir(parents=True)
    (tmp_path / "secret/b/file").write_text("secret")
    return volume


def secrets(volume: Path) -> set[int]:
    secret = volume.parent / "secret"
    return {path.stat().st_ino for path in (secret, *secret.rglob("*"))}


@pytest.mark.machine
class TestRaces:
    """Somebody swaps a folder for a link out of the volume, or a link for another, all the time."""

    @pytest.mark.parametrize("make", [True, False], ids=["making", "looking"])
    def test_opened_inside_parent_swapped_for_link_never_leaves_volume(
        self, volume: Path, make: bool
    ) -> None:
        (volume / "a/trap").symlink_to("../../secret")
        outcomes = set[str]()
        with swapping((volume / "a/swapped", volume / "a/trap")):
            for _ in tries(5000, seconds=1.5, enough=lambda: len(outcomes) > 1):
                outcomes.add(self.outcome(volume, "a/swapped/b", make=make))
        assert outcomes == {"inside", "refused"}, "both were met, so that the race was a race"

    def test_opened_inside_last_directory_swapped_never_leaves_volume(self, volume: Path) -> None:
        (volume / "a/trap").symlink_to("../../secret/b")
        outcomes = set[str]()
        with swapping((volume / "a/swapped", volume / "a/trap")):
            for _ in tries(5000, seconds=1.5, enough=lambda: len(outcomes) > 1):
                outcomes.add(self.outcome(volume, "a/swapped"))
        assert outcomes == {"inside", "refused"}

    def test_opened_inside_link_swapped_never_leaves_volume(self, volume: Path) -> None:
        (volume / "good").symlink_to("a/swapped")
        (volume / "bad").symlink_to("../secret")
        outcomes = set[str]()
        with swapping((volume / "good", volume / "bad")):
            for _ in tries(5000, seconds=1.5, enough=lambda: len(outcomes) > 1):
                outcomes.add(self.outcome(volume, "good/b"))
        assert outcomes == {"inside", "refused"}

    def test_opened_inside_make_during_swap_creates_nothing_outside(self, volume: Path) -> None:
        (volume / "a/trap").symlink_to("../../secret")
        before, outcomes = secrets(volume), list[str]()
        with swapping((volume / "a/swapped", volume / "a/trap")):
            for number in tries(3000, seconds=1.5, enough=lambda: outcomes.count("inside") > 10):
                outcomes.append(self.outcome(volume, f"a/swapped/new{number}/er"))
        assert secrets(volume) == before
        made = [path for path in (volume / "a").rglob("new*/er") if not path.is_symlink()]
        assert len(made) > 10

    def outcome(self, volume: Path, path: str, *, make: bool = True) -> str:
        try:
            with opened_inside(volume, path, make=make) as found:
                assert os.fstat(found).st_ino not in secrets(volume)
        except OSError:
            return "refused"
        return "inside"


@pytest.mark.machine
@needs_root
class TestMountingRaces:
    """CVE-2021-25741: what counts is what is mounted in the end."""

    @pytest.fixture
    def target(self, tmp_path: Path) -> Iterator[Path]:
        target = tmp_path / "target"
        yield target
        while unmount(target, detach=True):
            pass

    def test_bind_opened_path_swapped_mounts_opened_directory(self, volume: Path, target: Path) -> None:
        (volume / "a/swapped/b/file").write_text("mine")
        (volume / "a/trap").symlink_to("../../secret")
        mounted = list[str]()
        with swapping((volume / "a/swapped", volume / "a/trap")):
            for _ in tries(2000, seconds=3, enough=lambda: len(mounted) > 10):
                try:
                    with opened_inside(volume, "a/swapped/b", make=False) as found:
                        bind_opened(found, target, [])
                except OSError:
                    continue
                mounted.append((target / "file").read_text())
                unmount(target)
        assert set(mounted) == {"mine"}
        assert len(mounted) > 10

    @pytest.mark.parametrize("what", ["folder", "file"])
    def test_bind_opened_path_swapped_after_opening_mounts_opened_file(
        self, volume: Path, target: Path, what: str
    ) -> None:
        """Verify without a race that a directory swapped for a link before the mount is of no use."""
        path = "a/swapped/b" if what == "folder" else "a/swapped/b/file"
        (volume / "a/swapped/b/file").write_text("mine")
        (volume / "a/trap").symlink_to("../../secret")
        with opened_inside(volume, path, make=False) as found:
            (volume / "a/swapped").rename(volume / "a/away")
            (volume / "a/trap").rename(volume / "a/swapped")
            bind_opened(found, target, [])
        shown = target / "file" if what == "folder" else target
        assert shown.read_text() == "mine"
        unmount(target)
        # A second time: the link is in the place of the last directory.
        with opened_inside(volume, path.replace("swapped", "away"), make=False) as found:
            away = volume / "a/away" / path.removeprefix("a/swapped/")
            away.rename(volume / "a/further")
            away.symlink_to(volume.parent / "secret/b" / ("file" if what == "file" else ""))
            bind_opened(found, target, [])
        assert shown.read_text() == "mine"

    def test_bind_opened_path_overmounted_mounts_opened_directory(self, volume: Path, target: Path) -> None:
        """Verify that no path is resolved again, not even the one that the kernel knows."""
        (volume / "a/swapped/b/file").write_text("mine")
        with opened_inside(volume, "a/swapped/b", make=False) as found:
            mount(str(volume.parent / "secret/b"), volume / "a/swapped/b", "", flags=MS_BIND)
            try:
                bind_opened(found, target, [])
            finally:
                unmount(volume / "a/swapped/b")
        assert (target / "file").read_text() == "mine"

    async def test_sub_paths_directory_swapped_mounts_only_volume_content(
        self, volumes: PodVolumes, root: Path, volume: Path
    ) -> None:
        """As above, with a pod's own volume and all that is around it."""
        pod = pod_with(
            DATA,
            containers=[
                {"name": "main", "image": "i", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}
            ],
        )
        mounted = await volumes.mount(pod)
        data = Path(mounted["data"].path)
        (data / "swapped/b").mkdir(parents=True)
        (data / "swapped/b/file").write_text("mine")
        (data / "trap").symlink_to(volume.parent / "secret")
        target, outcomes = root / "pods/u-1/volume-subpaths/data/main/0", set[str]()
        with swapping((data / "swapped", data / "trap")):
            for _ in tries(1000, seconds=3, enough=lambda: len(outcomes) > 1):
                try:
                    await volumes.sub_paths(pod, pod.spec.containers[0], mounted, {0: "swapped/b"})
                except VolumeError:
                    outcomes.add("refused")
                    continue
                outcomes.add("mounted")
                assert (target / "file").read_text() == "mine"
                unmount(target)
        assert outcomes == {"mounted", "refused"}
        await volumes.unmount("u-1")
        assert (volume.parent / "secret/b/file").exists()


@needs_root
@pytest.mark.machine
@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("path", ["link", "link/b", "a/up/b"])
async def test_sub_paths_link_outside_volume_raises_and_creates_nothing(
    volumes: PodVolumes, root: Path, volume: Path, name: str, path: str
) -> None:
    """CVE-2017-1002101: however it is put, a link out of the volume shows nothing and makes nothing."""
    secret = volume.parent / "secret"
    pod = pod_with(
        DATA,
        containers=[{"name": "main", "image": "i", "volumeMounts": [{"name": "data", "mountPath": "/d"}]}],
    )
    mounted = await volumes.mount(pod)
    data = Path(mounted["data"].path)
    (data / "a").mkdir()
    (data / "link").symlink_to(OUTSIDE[name].format(secret=secret))
    (data / "a/up").symlink_to("../link")
    (data / "../secret").mkdir()
    with pytest.raises(VolumeError, match=r'^failed to prepare subPath for volumeMount "data"'):
        await volumes.sub_paths(pod, pod.spec.containers[0], mounted, {0: path})
    assert [entry.name for entry in secret.iterdir()] == ["b"]
    assert not (root / "pods/u-1/volume-subpaths").exists()
    await volumes.unmount("u-1")


@needs_root
@pytest.mark.machine
class TestTakingDown:
    """What is deleted with a pod is the pod's: never what a link or a mount leads to."""

    @pytest.fixture
    def data(self, root: Path) -> Path:
        return root / "pods/u-1/volumes/kubernetes.io~empty-dir/data"

    async def test_unmount_links_deleted_and_not_followed(
        self, volumes: PodVolumes, volume: Path, data: Path
    ) -> None:
        await volumes.mount(pod_with(DATA))
        (data / "folder").symlink_to(volume.parent / "secret")
        (data / "file").symlink_to(volume.parent / "secret/b/file")
        await volumes.unmount("u-1")
        assert not data.exists()
        assert (volume.parent / "secret/b/file").read_text() == "secret"

    async def test_unmount_directories_swapped_for_links_not_followed(
        self, volumes: PodVolumes, volume: Path, data: Path
    ) -> None:
        for _ in tries(15, seconds=3):
            await volumes.mount(pod_with(DATA))
            (data / "trap").symlink_to(volume.parent / "secret")
            for number in range(200):
                (data / f"folder{number}/b").mkdir(parents=True)
            pairs = ((data / f"folder{number}", data / "trap") for number in range(200))
            with swapping(*pairs, vanishing=True):
                await self.gone(volumes)
            assert (volume.parent / "secret/b/file").read_text() == "secret"

    async def gone(self, volumes: PodVolumes) -> None:
        for _ in range(100):
            try:
                await volumes.unmount("u-1")
                return
            except VolumeError:
                continue
        raise AssertionError("a pod can always be deleted")

    async def test_unmount_foreign_mount_in_volume_is_unmounted_not_emptied(
        self, volumes: PodVolumes, volume: Path, data: Path
    ) -> None:
        await volumes.mount(pod_with(DATA))
        (data / "mine").mkdir()
        mount(str(volume.parent / "secret"), data / "mine", "", flags=MS_BIND)
        await volumes.unmount("u-1")
        assert not data.exists()
        assert (volume.parent / "secret/b/file").read_text() == "secret"
        assert not [one for one in read_mounts() if one.point == data / "mine"]

    async def test_unmount_plugin_directory_is_link_is_not_followed(
        self, volumes: PodVolumes, volume: Path, data: Path
    ) -> None:
        data.parent.parent.mkdir(parents=True)
        data.parent.symlink_to(volume.parent / "secret")
        await volumes.unmount("u-1")
        assert (volume.parent / "secret/b/file").read_text() == "secret"
        assert not data.parent.is_symlink()


@needs_root
@pytest.mark.machine
class TestWrittenFiles:
    """CVE-2017-1002102: who can write to a volume of files might have the agent delete others' files."""

    POD = pod_with({"name": "config", "configMap": {"name": "c"}})

    async def test_refresh_version_is_link_is_not_followed(
        self, volumes: PodVolumes, shelf: Shelf, volume: Path
    ) -> None:
        shelf.config_maps["c"] = {"file": "one"}
        folder = Path((await volumes.mount(self.POD))["config"].path)
        current = folder / (folder / "..data").readlink()
        secret = volume.parent / "secret/b"
        for entry in list(current.iterdir()):
            entry.unlink()
        current.rmdir()
        current.symlink_to(secret)
        (folder / "planted").symlink_to(secret)
        shelf.config_maps["c"] = {"file": "two"}
        await volumes.refresh(self.POD)
        assert (folder / "file").read_text() == "two"
        assert [(entry.name, entry.read_text()) for entry in secret.iterdir()] == [("file", "secret")]
        await volumes.unmount("u-1")
        assert (secret / "file").exists()

    async def test_mount_config_map_is_read_only(self, volumes: PodVolumes, shelf: Shelf) -> None:
        shelf.config_maps["c"] = {"file": "one"}
        assert (await volumes.mount(self.POD))["config"].read_only
        await volumes.unmount("u-1")
