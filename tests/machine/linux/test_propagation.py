"""Folders whose mounts are shared: made so once, never over what is mounted already, and taken back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.linux.mounts import (
    MOUNTINFO,
    is_shared,
    mount,
    read_mounts,
    share_mounts,
    unmount,
    unshare_mounts,
)

pytestmark = pytest.mark.machine


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that lies on a mount of its own, which is private."""
    mount("tmpfs", tmp_path, "tmpfs", flags=0)
    mount("", tmp_path, "", flags=1 << 18)  # MS_PRIVATE
    made = tmp_path / "root"
    made.mkdir()
    try:
        yield made
    finally:
        for one in reversed(read_mounts(tmp_path)):
            unmount(one.point, detach=True)
        assert str(tmp_path) not in MOUNTINFO.read_text()


def test_share_mounts_private_directory_becomes_shared_once(folder: Path) -> None:
    (folder / "file").touch()
    assert not is_shared(folder)
    assert share_mounts(folder)
    assert is_shared(folder)
    assert (folder / "file").exists()
    assert not share_mounts(folder)
    (folder / "inner").mkdir()
    assert is_shared(folder / "inner")
    unshare_mounts(folder)
    assert not is_shared(folder)
    assert [one.point for one in read_mounts(folder)] == []


def test_share_mounts_mount_inside_stays_visible(folder: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    mount("tmpfs", inner, "tmpfs")
    (inner / "file").touch()
    assert not share_mounts(folder)
    assert (inner / "file").exists()
    assert [one.point for one in read_mounts(folder)] == [inner]
    # Nor is it taken from under those who use it.
    unmount(inner)
    share_mounts(folder)
    mount("tmpfs", inner, "tmpfs")
    unshare_mounts(folder)
    assert is_shared(folder)


def test_share_mounts_symlink_path_is_resolved(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert share_mounts(link)
    assert is_shared(folder)
    unshare_mounts(link)
    assert not is_shared(folder)
    unshare_mounts(folder)
