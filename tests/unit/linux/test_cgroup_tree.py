"""A cgroup in every hierarchy: found, emptied and removed, on this machine's own hierarchies."""

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.linux import cgroupfs as cgroup_tree
from pykubelet.linux.cgroupfs import find_trees, hierarchies, kill_members, members, remove
from pykubelet.linux.mounts import parse_mountinfo, read_mounts
from pykubelet.linux.untrusted_files import Visitor, walk_tree
from tests.support.trees import deep_directory, few_open_files, nest

TABLE = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw
32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
33 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""


def test_hierarchies_returns_mounted_cgroup_roots() -> None:
    assert hierarchies(parse_mountinfo(TABLE)) == [Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/unified")]
    assert hierarchies([]) == []


@pytest.fixture
def tree() -> Iterator[str]:
    """A cgroup with one below it, in all hierarchies."""
    name = "pykubelet-test-tree"
    roots = hierarchies(read_mounts())
    if not roots:
        pytest.skip("no cgroups here")
    for root in roots:
        (root / name / "below").mkdir(parents=True, exist_ok=True)
    yield name
    for root in roots:
        for path in (root / name / "below", root / name):
            if path.is_dir():
                path.rmdir()


@pytest.mark.machine
async def test_cgroup_tree_with_processes_found_emptied_and_removed(tree: str) -> None:
    trees = find_trees(tree)
    assert trees == [root / tree for root in hierarchies(read_mounts())]
    place = trees[0] / "below" / "cgroup.procs"
    # Its child shows that those who come to be while we kill are found, too.
    # The shell does not end by itself when its child is killed first.
    command = ["sh", "-c", f"echo $$ >{place}; sleep 1000 & echo ready; read never"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sh:
        assert sh.stdout is not None
        sh.stdout.readline()
        assert members(trees[0]) >= {sh.pid}
        assert len(members(trees[0])) == 2
        assert await remove(trees[0], timeout=0.1) is False, "a cgroup with processes stays"
        assert await kill_members(trees[0], timeout=45)
        assert sh.wait() == -9
    for found in trees:
        assert await remove(found, timeout=45)
    assert find_trees(tree) == []
    assert await remove(trees[0]), "removing twice is fine"
    assert members(trees[0]) == set()


async def test_remove_deep_tree_removed_with_few_open_files() -> None:
    """Verify that nested cgroups do not keep a pod from being deleted.

    `os.walk` failed with RecursionError at about 1,000 levels, and its paths exceed PATH_MAX at 2,000.
    """
    with deep_directory() as path:
        tree = path / "tree"
        tree.mkdir()

        def fill(here: int) -> None:
            os.mkdir("beside", dir_fd=here)
            with open(
                "cgroup.procs", "w", opener=lambda name, flags: os.open(name, flags, dir_fd=here)
            ) as file:
                file.write("1234567\n")

        nest(tree, 3000, fill)
        with few_open_files(80):
            assert members(tree) == {1234567}
        subprocess.run(["find", tree, "-name", "cgroup.procs", "-delete"], check=True)
        with few_open_files(80):
            assert await remove(tree)
        assert not tree.exists()


async def test_kill_members_and_remove_walk_in_worker_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that the number of a container's cgroups does not hold up other pods."""
    threads = set()

    def recorded(top: int, visitor: Visitor) -> None:
        threads.add(threading.current_thread())
        walk_tree(top, visitor)

    monkeypatch.setattr(cgroup_tree, "walk_tree", recorded)
    (tmp_path / "tree/below").mkdir(parents=True)
    assert await kill_members(tmp_path / "tree")
    assert await remove(tmp_path / "tree")
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.machine
async def test_members_mount_over_cgroup_is_not_entered(tmp_path: Path) -> None:
    """Verify that cgroups which a privileged pod mounts over its own are neither killed nor removed."""
    tree, others = tmp_path / "tree", tmp_path / "others"
    (tree / "point").mkdir(parents=True)
    (others / "inner").mkdir(parents=True)
    (others / "cgroup.procs").write_text("1234567\n")
    subprocess.run(["mount", "--bind", others, tree / "point"], check=True)
    try:
        assert members(tree) == set()
        assert await remove(tree, timeout=0) is False
        assert (others / "inner").is_dir()
    finally:
        subprocess.run(["umount", tree / "point"], check=True)
