"""A cgroup in every hierarchy: found, emptied and removed, on this machine's own hierarchies."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.host.cgroup_tree import find_trees, hierarchies, kill_members, members, remove
from pykubelet.host.mounts import parse_mountinfo, read_mounts

TABLE = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw
32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
33 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""


def test_hierarchies_are_what_is_mounted() -> None:
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
async def test_a_tree_is_found_emptied_and_removed(tree: str) -> None:
    trees = find_trees(tree)
    assert trees == [root / tree for root in hierarchies(read_mounts())]
    place = trees[0] / "below" / "cgroup.procs"
    # Its child shows that those who come to be while we kill are found, too.
    with subprocess.Popen(
        ["sh", "-c", f"echo $$ >{place}; sleep 1000 & echo ready; wait"], stdout=subprocess.PIPE
    ) as sh:
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
