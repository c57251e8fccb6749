"""Atomic replacement of files: content, mode, and what a failure leaves."""

import os
import stat
from pathlib import Path

import pytest

from pykubelet.util.files import write_atomically, write_if_changed


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_write_atomically_new_file_has_content_and_mode(tmp_path: Path, mode: int, durable: bool) -> None:
    path = tmp_path / "state"
    write_atomically(path, b"one", mode, durable=durable, sync_directory=durable)
    assert path.read_bytes() == b"one"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomically_existing_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"a longer old content")
    before = path.stat().st_ino
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_ino != before


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("call", ["fsync", "fchmod"])
def test_write_atomically_failure_keeps_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, named: bool
) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new", temporary=tmp_path / ".new" if named else None)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomically_symlink_at_temporary_path_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched")
    (tmp_path / ".new").symlink_to(victim)
    write_atomically(tmp_path / "state", b"new", temporary=tmp_path / ".new")
    assert victim.read_bytes() == b"untouched"
    assert (tmp_path / "state").read_bytes() == b"new"
    assert not (tmp_path / "state").is_symlink()


def test_write_if_changed_same_content_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "state"
    assert write_if_changed(file, b"one", 0o644)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"one", 0o644)
    before = file.stat().st_ino
    assert not write_if_changed(file, b"one")
    assert file.stat().st_ino == before
    assert write_if_changed(file, b"two")
    assert file.read_bytes() == b"two"


def test_write_if_changed_unreadable_file_raises(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_if_changed(tmp_path, b"one")
