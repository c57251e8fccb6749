"""The mount table: read as the kernel writes it, and planned so that every step of unmounting can work."""

import errno
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.linux.mounts import (
    Mount,
    has_mounts_inside,
    mount,
    mounts_below,
    parse_mountinfo,
    plan_unmounts,
    read_mounts,
    remove_tree,
    unmount,
)

TABLE = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw,discard
41 31 0:38 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw
50 27 0:40 /sub\040dir /d/with\040space\134and\011tab rw - ext4 /dev/my\040disk rw
nonsense
60 27 0:41
"""


def test_parse_mountinfo_returns_unescaped_mounts() -> None:
    proc, root, cgroup, odd = parse_mountinfo(TABLE)
    assert (proc.id, proc.parent, proc.point, proc.kind) == (22, 27, Path("/proc"), "proc")
    assert root.options == {"rw", "relatime", "discard"}
    assert (proc.shared, root.shared) == (False, True)
    assert cgroup.kind == "cgroup2"
    assert odd.point == Path("/d/with space\\and\ttab")
    assert (odd.root, odd.source) == ("/sub dir", "/dev/my disk")


def test_read_mounts_on_host_includes_root() -> None:
    assert any(found.point == Path("/") for found in read_mounts())


def at(number: int, parent: int, point: str) -> Mount:
    return Mount(number, parent, "/", Path(point), "tmpfs", "tmpfs", frozenset())


def test_mounts_below_similar_prefix_is_excluded() -> None:
    assert mounts_below([at(1, 0, "/data-other/x"), at(2, 0, "/data")], Path("/data")) == []


def resolve(standing: list[Mount], path: Path) -> Mount:
    """Walk a path as the kernel does: into every mount that is met, the topmost last."""
    current = standing[0]
    while met := [
        m for m in standing if m.parent == current.id and (m.point == path or m.point in path.parents)
    ]:
        current = min(met, key=lambda m: len(m.point.parts))
    return current


@given(st.lists(st.lists(st.sampled_from("xy"), min_size=1, max_size=3), max_size=12))
def test_plan_unmounts_any_mounts_each_step_is_possible(made: list[list[str]]) -> None:
    standing = [at(1, 0, "/d")]
    for number, names in enumerate(made, 2):
        path = Path("/d", *names)
        standing.append(at(number, resolve(standing, path).id, str(path)))
    for point in plan_unmounts(standing, Path("/d")):
        top = resolve(standing, point)
        assert top.point == point
        assert not any(found.parent == top.id for found in standing)
        standing.remove(top)
    assert standing == [at(1, 0, "/d")]


@pytest.mark.machine
def test_mount_and_unmount_tmpfs_succeed(tmp_path: Path) -> None:
    point = tmp_path / "point with space"
    point.mkdir()
    assert unmount(point) is False, "nothing is mounted there"
    assert unmount(tmp_path / "missing") is False
    mount("tmpfs", point, "tmpfs", "size=64k")
    try:
        assert [found.point for found in mounts_below(read_mounts(), tmp_path)] == [point]
        for above in (tmp_path.resolve(), point.resolve()):
            assert [found.point for found in read_mounts(above)] == [point]
        assert read_mounts(tmp_path / "point") == []
        with (point / "busy").open("w"):
            with pytest.raises(OSError, match=r"(?i)busy"):
                unmount(point)
            assert unmount(point, detach=True) is True
        assert mounts_below(read_mounts(), tmp_path) == []
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False, capture_output=True)
    with pytest.raises(OSError):
        mount("none", point, "no-such-fs")


@pytest.mark.machine
def test_remove_tree_bind_mount_inside_raises_ebusy(tmp_path: Path) -> None:
    tree, precious = tmp_path / "tree", tmp_path / "precious"
    (tree / "a" / "b").mkdir(parents=True)
    precious.mkdir()
    (precious / "file").write_text("kept")
    subprocess.run(["mount", "--bind", str(precious), str(tree / "a" / "b")], check=True)
    try:
        with pytest.raises(OSError) as caught:
            remove_tree(tree)
        assert caught.value.errno == errno.EBUSY
        assert (tree / "a").is_dir()
    finally:
        subprocess.run(["umount", str(tree / "a" / "b")], check=True)
    remove_tree(tree)
    assert not tree.exists()
    assert (precious / "file").read_text() == "kept"


@pytest.mark.machine
@pytest.mark.parametrize("files", [0, 300], ids=["few files", "many files"])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_has_mounts_inside_bind_mount_returns_true(tmp_path: Path, what: str, files: int) -> None:
    """Also a mounted file, and one of the same file system, whose device number tells nothing."""
    tree, precious = tmp_path / "tree", tmp_path / "precious"
    tree.mkdir()
    for number in range(files):
        (tree / str(number)).touch()
    point = tree / "a" / "b"
    for path in (point, precious):
        if what == "folder":
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(exist_ok=True)
            path.touch()
    assert not has_mounts_inside(tree)
    subprocess.run(["mount", "--bind", str(precious), str(point)], check=True)
    try:
        assert has_mounts_inside(tree)
        assert has_mounts_inside(tree / "a")
        assert not has_mounts_inside(point), "what is mounted on the place itself is not inside"
    finally:
        subprocess.run(["umount", str(point)], check=True)
    assert not has_mounts_inside(tree)


def test_has_mounts_inside_not_directory_returns_false(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/proc")
    for name in ("file", "link", "gone"):
        assert not has_mounts_inside(tmp_path / name)
    assert not has_mounts_inside(tmp_path)


def test_remove_tree_file_symlink_or_missing_path_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").touch()
    link = tmp_path / "link"
    link.symlink_to(target)
    remove_tree(link)
    assert not link.is_symlink()
    assert (target / "file").exists(), "a link is removed, not what it points to"
    remove_tree(target / "file")
    remove_tree(target / "file")
    assert list(target.iterdir()) == []
