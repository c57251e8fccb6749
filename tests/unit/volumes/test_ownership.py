"""fsGroup: who gets what, what is left alone, and that nobody is led astray meanwhile."""

import asyncio
import os
import stat
import threading
from pathlib import Path

import pytest

from pykubelet.api.pod import Pod
from pykubelet.linux.mounts import mount, unmount
from pykubelet.linux.untrusted_files import open_subdirectory, walk_tree
from pykubelet.volumes import ownership
from pykubelet.volumes.ownership import IN_PROGRESS, OwnershipWalk, apply_fs_group, apply_group, group_mode
from tests.support.attacker import swapping, tries
from tests.support.threads import forbid_threads
from tests.support.trees import deep_directory, few_open_files, nest
from tests.support.volumes import mode_of, needs_root, pod_with

GROUP = 2345
MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume with a bit of everything, beside files that are none of its business."""
    volume = tmp_path / "volume"
    (volume / "a/b").mkdir(parents=True)
    (volume / "a/file").write_text("x")
    (volume / "program").touch(mode=0o700)
    (volume / "program").chmod(0o4700)
    (volume / "shown").touch()
    (volume / "shown").chmod(0o604)
    os.mkfifo(volume / "pipe")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("y")
    (volume / "link").symlink_to("../outside/file")
    (volume / "folder-link").symlink_to("../outside")
    (volume / "a/dangling").symlink_to("nowhere")
    volume.chmod(0o755)
    (tmp_path / "outside").chmod(0o700)
    (tmp_path / "outside/file").chmod(0o600)
    return volume


def grouped(policy: str | None, group: int | None = GROUP) -> Pod:
    return pod_with(securityContext={"fsGroup": group, "fsGroupChangePolicy": policy})


def nobody(*_: object) -> None:
    raise AssertionError("nothing takes long here")


@pytest.mark.parametrize(
    ("mode", "folder", "read_only", "wanted"),
    [
        (0o600, False, False, 0o660),
        (0o600, False, True, 0o640),
        (0o700, True, False, 0o2770),
        (0o700, True, True, 0o2750),
        (0o000, False, False, 0o660),
        (0o4711, False, False, 0o4771),
        (0o1777, True, False, 0o3777),
    ],
)
def test_group_mode_adds_group_bits(mode: int, folder: bool, read_only: bool, wanted: int) -> None:
    assert oct(group_mode(mode, is_directory=folder, read_only=read_only)) == oct(wanted)


class Groups:
    """Notes the groups of all directories of a tree."""

    def __init__(self, found: list[int]) -> None:
        self._found = found

    def entry(self, entry: os.DirEntry[str], parent: int) -> bool:
        return True

    def enter(self, name: str, parent: int) -> int | None:
        return open_subdirectory(name, parent)

    def leave(self, opened: int) -> None:
        self._found.append(os.fstat(opened).st_gid)


@needs_root
class TestGiving:
    def test_apply_group_changes_volume_and_not_link_targets(self, volume: Path) -> None:
        apply_group(volume, GROUP)
        inside = [volume, *volume.rglob("*")]
        assert len(inside) == 10
        assert {path.lstat().st_gid for path in inside} == {GROUP}
        assert {path.name: mode_of(path) for path in inside if not path.is_symlink()} == {
            "volume": "0o2775",
            "a": "0o2775",
            "b": "0o2775",
            "file": "0o664",
            "program": "0o4760",
            "shown": "0o664",
            "pipe": "0o664",
        }
        outside = volume.parent / "outside"
        assert [(path.stat().st_gid, mode_of(path)) for path in (outside, outside / "file")] == [
            (0, "0o700"),
            (0, "0o600"),
        ]

    def test_ownership_walk_read_only_adds_only_group_read(self, volume: Path) -> None:
        OwnershipWalk(GROUP, read_only=True).apply(volume)
        assert [mode_of(volume / name) for name in (".", "program", "shown")] == [
            "0o2755",
            "0o4740",
            "0o644",
        ]

    def test_apply_group_correct_entries_are_not_modified(self, volume: Path) -> None:
        apply_group(volume, GROUP)
        before = {path: path.lstat().st_ctime_ns for path in volume.rglob("*")}
        apply_group(volume, GROUP)
        assert before == {path: path.lstat().st_ctime_ns for path in volume.rglob("*")}

    def test_apply_group_volume_is_file_changes_file(self, volume: Path) -> None:
        apply_group(volume / "program", GROUP)
        assert ((volume / "program").stat().st_gid, mode_of(volume / "program")) == (GROUP, "0o4760")

    def test_apply_group_volume_is_link_is_not_followed(self, volume: Path) -> None:
        apply_group(volume / "folder-link", GROUP)
        assert (volume.parent / "outside").stat().st_gid == 0

    @pytest.mark.machine
    def test_ownership_walk_read_only_file_system_counts_failures(self, volume: Path) -> None:
        mount(str(volume), volume, "", flags=MS_BIND)
        try:
            mount("", volume, "", flags=MS_BIND | MS_REMOUNT | MS_RDONLY)
            walk = OwnershipWalk(GROUP)
            walk.apply(volume)
            assert walk.failures > 9, "it is told, and that is all"
        finally:
            unmount(volume)

    def test_ownership_walk_deep_tree_uses_few_open_files(self) -> None:
        """Verify that nesting keeps no pod from starting; more than 1,000 levels had."""
        groups: list[int] = []
        with deep_directory() as tree:
            nest(tree, 3000, lambda here: os.mkdir("side", dir_fd=here))
            walk = OwnershipWalk(GROUP)
            with few_open_files(80):
                walk.apply(tree)
                walk_tree(os.open(tree, os.O_RDONLY), Groups(groups))
        assert (walk.files, walk.failures) == (6001, 0)
        assert groups == [GROUP] * 6001

    def test_apply_group_entries_swapped_for_links_not_followed(self, volume: Path) -> None:
        """A container swaps files and folders for links out of the volume as fast as it can."""
        outside = volume.parent / "outside"
        for name in ("one", "two"):
            (volume / name).mkdir()
            (volume / name / "file").touch()
        (volume / "one/trap").symlink_to("../../outside/file")
        (volume / "trap").symlink_to("../outside")
        pairs = [(volume / "one/file", volume / "one/trap"), (volume / "two", volume / "trap")]
        with swapping(*pairs):
            for attempt in tries(2000, seconds=3):
                # Another group each time: what has the right one already is not touched at all.
                apply_group(volume, GROUP + attempt % 7)
        assert [(path.lstat().st_gid, mode_of(path)) for path in (outside, outside / "file")] == [
            (0, "0o700"),
            (0, "0o600"),
        ]

    def test_apply_group_entries_deleted_concurrently_are_skipped(self, volume: Path) -> None:
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                (volume / "a/b/c").mkdir()
                (volume / "a/b/c/file").touch()
                (volume / "a/b/c/file").unlink()
                (volume / "a/b/c").rmdir()

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for attempt in range(200):
                apply_group(volume, GROUP + attempt % 7)
        finally:
            stop.set()
            thread.join()


@needs_root
class TestPolicies:
    @pytest.mark.parametrize("policy", [None, "Always", "OnRootMismatch"])
    async def test_apply_fs_group_first_mount_changes_all_files(
        self, volume: Path, policy: str | None
    ) -> None:
        await apply_fs_group(grouped(policy), volume, nobody)
        assert {path.lstat().st_gid for path in volume.rglob("*")} == {GROUP}

    async def test_apply_fs_group_without_further_threads_raises_os_error(
        self, volume: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forbid_threads(monkeypatch)
        with pytest.raises(OSError, match="raise the limit of tasks"):
            await apply_fs_group(grouped("Always"), volume, nobody)

    @pytest.mark.parametrize(
        ("policy", "mode", "group", "given"),
        [
            (None, 0o2770, GROUP, True),
            ("Always", 0o2770, GROUP, True),
            ("OnRootMismatch", 0o2770, GROUP, False),
            ("OnRootMismatch", 0o2777, GROUP, False),
            ("OnRootMismatch", 0o0770, GROUP, True),
            ("OnRootMismatch", 0o2750, GROUP, True),
            ("OnRootMismatch", 0o2770, GROUP + 1, True),
        ],
    )
    async def test_apply_fs_group_on_root_mismatch_checks_root_directory(
        self, volume: Path, policy: str | None, mode: int, group: int, given: bool
    ) -> None:
        os.chown(volume, -1, group)
        volume.chmod(mode)
        await apply_fs_group(grouped(policy), volume, nobody)
        assert ((volume / "a/file").stat().st_gid == GROUP) is given

    async def test_apply_fs_group_read_only_root_without_group_write_matches(self, volume: Path) -> None:
        os.chown(volume, -1, GROUP)
        volume.chmod(0o2750)
        await apply_fs_group(grouped("OnRootMismatch"), volume, nobody, read_only=True)
        assert (volume / "a/file").stat().st_gid == 0

    async def test_apply_fs_group_volume_is_file_is_always_changed(self, volume: Path) -> None:
        await apply_fs_group(grouped("OnRootMismatch"), volume / "shown", nobody)
        assert (volume / "shown").stat().st_gid == GROUP

    async def test_apply_fs_group_no_fs_group_changes_nothing(self, volume: Path) -> None:
        await apply_fs_group(grouped("Always", None), volume, nobody)
        assert stat.S_IMODE(volume.stat().st_mode) == 0o755

    async def test_apply_fs_group_walk_interrupted_is_repeated(
        self, volume: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def die(*_: object) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as broken:
            broken.setattr(OwnershipWalk, "_apply_entry", die)
            with pytest.raises(OSError, match="Input/output"):
                await apply_fs_group(grouped("OnRootMismatch"), volume, nobody)
        await apply_fs_group(grouped("OnRootMismatch"), volume, nobody)
        assert (volume / "a/file").stat().st_gid == GROUP

    async def test_apply_fs_group_volume_missing_raises(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            await apply_fs_group(grouped("OnRootMismatch"), tmp_path / "missing", nobody)


class _Gate:
    """A walk that is held where the test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        give_entry = OwnershipWalk._apply_entry

        def slow(walk: OwnershipWalk, entry: os.DirEntry[str], folder: int) -> None:
            self.reached.set()
            while not self.go.wait(0.01) and not walk.stop:
                pass
            give_entry(walk, entry, folder)

        monkeypatch.setattr(OwnershipWalk, "_apply_entry", slow)


@needs_root
class TestTakingLong:
    async def test_apply_fs_group_slow_walk_records_events_periodically(
        self, volume: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ownership, "FIRST_EVENT_SECONDS", 0.02)
        monkeypatch.setattr(ownership, "EVENT_INTERVAL_SECONDS", 0.03)
        gate, events = _Gate(monkeypatch), []

        def hear(pod: Pod, kind: str, reason: str, message: str) -> None:
            events.append((pod.uid, kind, reason, message))
            if len(events) == 3:
                gate.go.set()

        place = volume.parent / "pods/u-1/volumes/kubernetes.io~x"
        place.mkdir(parents=True)
        volume.rename(place / "v")
        await apply_fs_group(grouped("Always"), place / "v", hear)
        assert {event[:3] for event in events} == {("u-1", "Warning", IN_PROGRESS)}
        assert events[0][3] == (
            "Setting volume ownership for u-1/volumes/kubernetes.io~x/v is taking longer than expected, "
            "consider using OnRootMismatch - https://kubernetes.io/docs/tasks/configure-pod-container/"
            "security-context/#configure-volume-permission-and-ownership-change-policy-for-pods"
        )
        assert events[2][3] == (
            "Setting volume ownership for u-1/volumes/kubernetes.io~x/v, processed 1 files."
        )

    def test_event_intervals_equal_upstream(self) -> None:
        assert (ownership.FIRST_EVENT_SECONDS, ownership.EVENT_INTERVAL_SECONDS) == (30, 60)

    async def test_apply_fs_group_cancelled_stops_walk(
        self, volume: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = _Gate(monkeypatch)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(apply_fs_group(grouped("Always"), volume, nobody))
            while not gate.reached.is_set():
                await asyncio.sleep(0.01)
            task.cancel()
        assert task.cancelled()
        assert not gate.go.is_set(), "nobody had to let it go"
        assert volume.stat().st_gid != GROUP, "and what is not complete does not look so"
