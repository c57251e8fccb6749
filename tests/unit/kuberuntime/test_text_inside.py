"""Texts that containers leave in volumes: read whoever wrote them, and never from elsewhere."""

import os
from pathlib import Path

import pytest

from pykubelet.kuberuntime.configuration.env import LARGEST, read_inside


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    volume = tmp_path / "volume"
    (volume / "a").mkdir(parents=True)
    (volume / "a/file").write_bytes(b"text \xff")
    (tmp_path / "secret").write_text("secret")
    return volume


def test_read_inside_file_or_link_returns_bytes(volume: Path) -> None:
    (volume / "link").symlink_to("a/file")
    assert read_inside(volume, "a/file") == read_inside(volume, "link") == b"text \xff"


@pytest.mark.parametrize("path", ["a", "pipe"])
def test_read_inside_directory_or_fifo_raises(volume: Path, path: str) -> None:
    os.mkfifo(volume / "pipe")
    with pytest.raises(ValueError, match="not a file"):
        read_inside(volume, path)


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "a/../../secret"])
def test_read_inside_path_outside_volume_raises(volume: Path, path: str) -> None:
    with pytest.raises(ValueError, match="relative"):
        read_inside(volume, path)


@pytest.mark.parametrize("target", ["../secret", "/etc/hostname", "/proc/self/environ"])
def test_read_inside_link_outside_volume_raises(volume: Path, target: str) -> None:
    (volume / "link").symlink_to(target)
    with pytest.raises(OSError, match="leads out of the volume") as caught:
        read_inside(volume, "link")
    assert str(volume) not in str(caught.value)


def test_read_inside_missing_path_creates_nothing(volume: Path) -> None:
    for path in ("absent", "b/absent", "a/file/absent"):
        with pytest.raises(OSError, match=r"^\[Errno"):
            read_inside(volume, path)
    assert sorted(path.name for path in volume.rglob("*")) == ["a", "file"]


def test_read_inside_file_too_large_raises(volume: Path) -> None:
    (volume / "large").touch()
    os.truncate(volume / "large", LARGEST)
    assert len(read_inside(volume, "large")) == LARGEST
    os.truncate(volume / "large", LARGEST + 1)
    with pytest.raises(ValueError, match="more than"):
        read_inside(volume, "large")
