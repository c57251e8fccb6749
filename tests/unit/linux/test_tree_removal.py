"""Removal of trees of hostile processes: any depth, few open files, and nothing outside of the tree."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pykubelet.linux import untrusted_files as tree_removal
from pykubelet.linux import untrusted_files as tree_walk
from pykubelet.linux.mounts import remove_tree
from pykubelet.linux.untrusted_files import remove_entry
from tests.support.attacker import swapping, tries
from tests.support.trees import deep_directory, few_open_files, nest

DEPTH = 20_000
"""Levels: far beyond Python's recursion limit, PATH_MAX and the number of open files."""


@pytest.fixture
def tree() -> Iterator[Path]:
    with deep_directory() as path:
        (path / "tree").mkdir()
        yield path / "tree"


@contextmanager
def opened(path: Path) -> Iterator[int]:
    at = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        yield at
    finally:
        os.close(at)


def test_remove_tree_deep_chain_removed_with_few_open_files(tree: Path) -> None:
    """Verify the attack on pod deletion: `shutil.rmtree` failed with RecursionError at about 1,000 levels."""
    nest(tree, DEPTH)
    with few_open_files(80):
        remove_tree(tree)
    assert not tree.exists()


def test_remove_tree_deep_and_wide_tree_removed_with_few_open_files(tree: Path) -> None:
    def fill(here: int) -> None:
        for name in ("a", "e"):
            os.mkdir(name, dir_fd=here)
            os.mkdir(f"{name}/inner", dir_fd=here)
            os.symlink("/", f"{name}/link", dir_fd=here)
            os.close(os.open(f"{name}/file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))

    nest(tree, 1500, fill)
    with few_open_files(80):
        remove_tree(tree)
    assert not tree.exists()


def test_remove_tree_deep_sibling_directories_removed(tree: Path) -> None:
    """Verify that directories whose names are no longer known are found again by their parents."""
    for number in range(5):
        here = tree.joinpath(*["x"] * 20)
        here.mkdir(parents=True, exist_ok=True)
        (here / str(number)).mkdir()
        nest(here / str(number), 100)
    remove_tree(tree)
    assert not tree.exists()


def test_remove_tree_swapped_symlinks_are_not_followed(tmp_path: Path) -> None:
    """Verify that a process that swaps directories for links to the host's files gains nothing."""
    outside, precious = tmp_path / "outside", tmp_path / "outside/precious"
    outside.mkdir()
    precious.write_text("precious")
    for _ in tries(20, seconds=5):
        tree = tmp_path / "tree"
        (tree / "one/two").mkdir(parents=True)
        for number in range(200):
            (tree / "one/two" / str(number)).touch()
        (tree / "trap").symlink_to(outside)
        (tree / "one/trap").symlink_to(outside)
        with swapping((tree / "one", tree / "trap"), (tree / "one/two", tree / "one/trap"), vanishing=True):
            remove_tree(tree)
        assert precious.read_text() == "precious"
        assert not tree.exists()


@pytest.mark.parametrize("level", [5, 25, 45, 59])
def test_remove_entry_directory_moved_away_keeps_new_siblings(
    tree: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """Verify that a directory that is moved out of the tree does not lead the removal to its new siblings."""
    outside = tree.parent / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    nest(tree, 60)
    tree.joinpath(*["d"] * 60, "trigger").touch()
    unlink = tree_removal._unlink

    def move_then_unlink(parent: int, name: str) -> bool:
        if name == "trigger":
            tree.joinpath(*["d"] * level).rename(outside / "moved")
        return unlink(parent, name)

    monkeypatch.setattr(tree_removal, "_unlink", move_then_unlink)
    with opened(tree.parent) as parent, few_open_files(80):
        remove_entry(parent, "tree")
    assert not tree.exists()
    assert (outside / "precious").read_text() == "precious"


def test_remove_entry_replaced_directory_is_removed_by_next_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    (tree / "a").mkdir(parents=True)
    (tree / "a/trigger").touch()
    outside.mkdir()
    unlink = tree_removal._unlink

    def replace_then_unlink(parent: int, name: str) -> bool:
        if name == "trigger":
            (tree / "a").rename(outside / "moved")
            (tree / "a/other").mkdir(parents=True)
        return unlink(parent, name)

    monkeypatch.setattr(tree_removal, "_unlink", replace_then_unlink)
    remove_tree(tree)
    assert not tree.exists()


def test_remove_entry_directory_refilled_fails_after_bounded_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    passes = []
    rmdir = tree_removal._rmdir

    def fill_then_rmdir(parent: int, name: str) -> str:
        passes.append(name)
        (tree / "more").touch()
        return rmdir(parent, name)

    monkeypatch.setattr(tree_removal, "_rmdir", fill_then_rmdir)
    with few_open_files(80), pytest.raises(OSError, match="keeps creating files") as caught:
        remove_tree(tree)
    assert caught.value.errno == errno.ENOTEMPTY
    assert len(passes) == tree_removal.MAX_PASSES + 1


@pytest.mark.machine
@pytest.mark.parametrize("is_late", [False, True], ids=["before rmdir", "after rmdir"])
@pytest.mark.parametrize("has_openat2", [True, False], ids=["openat2", "mount ids"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_remove_entry_mount_inside_is_neither_entered_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, has_openat2: bool, is_late: bool
) -> None:
    """Verify that also a bind mount of the same file system stops the removal, whenever it appears."""
    rmdir = tree_removal._rmdir
    if is_late:
        monkeypatch.setattr(
            tree_removal,
            "_rmdir",
            lambda parent, name: "not empty" if name == "point" else rmdir(parent, name),
        )
    if not has_openat2:
        monkeypatch.setattr(tree_removal, "open_on_same_mount", _not_implemented)
    tree, precious = tmp_path / "tree", tmp_path / "precious"
    deep = tree.joinpath(*["d"] * 40)
    deep.mkdir(parents=True)
    (precious / "inner").mkdir(parents=True)
    (precious / "inner/file").write_text("precious")
    source = precious if kind == "directory" else precious / "inner/file"
    point = deep / "point"
    point.mkdir() if kind == "directory" else point.touch()
    subprocess.run(["mount", "--bind", source, point], check=True)
    try:
        with opened(tmp_path) as parent, pytest.raises(OSError, match="mounted here") as caught:
            remove_entry(parent, "tree")
        assert caught.value.errno == errno.EBUSY
        with opened(deep) as parent, pytest.raises(OSError, match="mounted here"):
            remove_entry(parent, "point")
    finally:
        subprocess.run(["umount", point], check=True)
    assert (precious / "inner/file").read_text() == "precious"
    monkeypatch.undo()
    remove_tree(tree)
    assert not tree.exists()


def _not_implemented(parent: int, name: str, flags: int) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_walk_tree_moved_directory_ends_walk(tree: Path) -> None:
    """Verify that `..` of a directory that was moved out of the tree is not walked."""
    outside = tree.parent / "outside"
    (outside / "other").mkdir(parents=True)
    nest(tree, 60)
    names = []

    class Mover:
        def entry(self, entry: os.DirEntry[str], parent: int) -> bool:
            names.append(entry.name)
            return True

        def enter(self, name: str, parent: int) -> int | None:
            if len(names) == 60:
                tree.joinpath(*["d"] * 25).rename(outside / "moved")
            return tree_walk.open_subdirectory(name, parent)

        def leave(self, opened: int) -> None:
            return

    with few_open_files(80), pytest.raises(tree_walk.TreeChangedError):
        tree_walk.walk_tree(os.open(tree, os.O_RDONLY), Mover())
    assert set(names) == {"d"}
