"""Counting: the same as `du` says, whatever lies there and whoever changes it meanwhile."""

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pykubelet.linux import untrusted_files as tree_walk
from pykubelet.linux.mounts import mount, unmount
from pykubelet.volumes import usage as usage_count
from pykubelet.volumes.usage import DirectoryUsage, Interrupted, WalkThrottle, directory_usage, file_system
from tests.support.trees import deep_directory, few_open_files, nest
from tests.support.volumes import needs_root

MIB = 1 << 20


def du(path: Path) -> DirectoryUsage:
    """Count with the machine's own program."""
    bytes_, inodes = (
        int(
            subprocess.run(["du", "-sx", *more, str(path)], capture_output=True, check=True).stdout.split()[0]
        )
        for more in (["--block-size=1"], ["--inodes"])
    )
    return DirectoryUsage(bytes_, inodes)


def count(path: Path) -> DirectoryUsage:
    return directory_usage(path, WalkThrottle(threading.Event()))


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tmpfs"
    path.mkdir()
    mount("tmpfs", path, "tmpfs", "size=8m")
    try:
        yield path
    finally:
        unmount(path, detach=True)


def fill(path: Path) -> None:
    (path / "plain").write_bytes(os.urandom(300_000))
    (path / "empty").touch()
    with (path / "sparse").open("wb") as sparse:
        sparse.truncate(500 * MIB)
        sparse.seek(100 * MIB)
        sparse.write(b"x" * 5000)
    (path / "a" / "b" / "c").mkdir(parents=True)
    (path / "a" / "b" / "linked").write_bytes(os.urandom(200_000))
    for name in ("one", "two", "a/three"):
        (path / name).hardlink_to(path / "a" / "b" / "linked")
    (path / "out").symlink_to("/usr")
    (path / "long").symlink_to("x" * 200)
    os.mkfifo(path / "pipe")


def test_directory_usage_equals_du(tmp_path: Path) -> None:
    fill(tmp_path)
    found = count(tmp_path)
    assert found == du(tmp_path)
    assert 500_000 < found.used < 2 * MIB


@needs_root
def test_directory_usage_tmpfs_equals_du_and_statvfs(tmpfs: Path) -> None:
    fill(tmpfs)
    assert count(tmpfs) == du(tmpfs)
    asked = file_system(tmpfs)
    assert asked.capacity == 8 * MIB
    assert asked.used == count(tmpfs).used
    assert asked.inodes_used == count(tmpfs).inodes + 3, "in memory each further name takes an inode"


@needs_root
def test_directory_usage_other_file_system_inside_is_excluded(tmp_path: Path, tmpfs: Path) -> None:
    (tmp_path / "plain").write_bytes(b"x" * 10_000)
    (tmpfs / "much").write_bytes(b"x" * 5 * MIB)
    assert count(tmp_path).used < MIB
    # `du` counts the folder that is mounted over as well; here it is somebody else's altogether.
    assert count(tmp_path) == DirectoryUsage(du(tmp_path).used, 2)


names = st.text("abc", min_size=1, max_size=2)
steps = st.tuples(
    st.sampled_from(["file", "folder", "link", "symlink"]), st.lists(names, min_size=1, max_size=4)
)


@given(st.lists(steps, max_size=25))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_directory_usage_any_tree_equals_du(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[str, list[str]]]
) -> None:
    top = tmp_path_factory.mktemp("tree")
    files = []
    for kind, parts in plan:
        path = top.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            match kind:
                case "file":
                    path.write_bytes(b"x" * len(parts) * 3000)
                    files.append(path)
                case "folder":
                    path.mkdir()
                case "link" if files:
                    path.hardlink_to(files[0])
                case "symlink":
                    path.symlink_to("..")
        except OSError:
            continue
    assert count(top) == du(top)


def test_directory_usage_deep_tree_uses_few_open_files() -> None:
    """Verify that nesting does not hide files from the measurement; more than 1,000 levels had."""
    with deep_directory() as tree:
        nest(tree, 3000, lambda here: os.mkdir("side", dir_fd=here))
        with few_open_files(80):
            assert count(tree).inodes == 6001


def test_directory_usage_too_many_subdirectories_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_walk, "MAX_PENDING", 50)

    def fill(here: int) -> None:
        for number in range(5):
            os.mkdir(str(number), dir_fd=here)

    with deep_directory() as tree:
        nest(tree, 200, fill)
        with few_open_files(80), pytest.raises(OSError, match="more than 50 subdirectories"):
            count(tree)


def test_directory_usage_many_hard_links_equals_du(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (tmp_path / f"a{number}").write_bytes(b"x" * 5000)
        (tmp_path / f"b{number}").hardlink_to(tmp_path / f"a{number}")
    monkeypatch.setattr(usage_count, "MAX_LINKED", 3)
    assert count(tmp_path) == du(tmp_path)


def test_directory_usage_missing_or_link_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        count(tmp_path / "gone")
    (tmp_path / "link").symlink_to("/usr")
    with pytest.raises(OSError):
        count(tmp_path / "link")


def test_directory_usage_directories_swapped_for_links_not_followed(tmp_path: Path) -> None:
    """Someone swaps folders for links to the machine's own files, as fast as they can."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    for n in range(50):
        (outside / f"many{n}").mkdir(parents=True)
    for n in range(20):
        (inside / f"d{n}" / "e").mkdir(parents=True)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for n in range(20):
                (inside / f"d{n}").rename(inside / "away")
                (inside / f"d{n}").symlink_to(outside)
                (inside / f"d{n}").unlink()
                (inside / "away").rename(inside / f"d{n}")

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        # The folder itself, each entry twice if it moves at the worst moment; never fifty more.
        assert all(count(inside).inodes <= 1 + 2 * 20 * 2 + 2 for _ in range(200))
    finally:
        stop.set()
        swapper.join()


def test_directory_usage_directory_swapped_before_entering_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify without a race that a link in the place of a directory is not followed."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    for number in range(50):
        (outside / f"many{number}").mkdir(parents=True)
    (inside / "d/e").mkdir(parents=True)
    count_entry = usage_count._Walk.entry

    def count_then_swap(walk: usage_count._Walk, entry: os.DirEntry[str], parent: int) -> bool:
        is_directory = count_entry(walk, entry, parent)
        if entry.name == "d":
            (inside / "d").rename(tmp_path / "away")
            (inside / "d").symlink_to(outside)
        return is_directory

    monkeypatch.setattr(usage_count._Walk, "entry", count_then_swap)
    assert count(inside).inodes == 2


def test_walk_throttle_rests_and_stop_event_interrupts(tmp_path: Path) -> None:
    for n in range(1000):
        (tmp_path / f"f{n}").touch()
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += usage_count.WORK_SECONDS * 2
        return now

    rests = Rests()
    assert directory_usage(tmp_path, WalkThrottle(rests, clock)).inodes == 1001
    assert rests.given
    assert all(seconds >= usage_count.WORK_SECONDS * usage_count.REST_FACTOR for seconds in rests.given)
    rests.set()
    with pytest.raises(Interrupted):
        directory_usage(tmp_path, WalkThrottle(rests, clock))


class Rests(threading.Event):
    """Notes how long somebody wanted to wait, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.given.append(timeout or 0)
        return self.is_set()
