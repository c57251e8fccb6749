"""Removal of the logs of deleted pods."""

import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from pykubelet.kuberuntime.gc import LogCollector, PodLogsError


async def test_remove_log_dirs_deleted_pods_removed_and_directory_read_in_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ns_old_u1", "ns_new_u2", "other"):
        (tmp_path / name / "app").mkdir(parents=True)
    (tmp_path / "ns_file_u1").touch()
    real, threads = os.scandir, list[threading.Thread]()

    def scandir(path: Any) -> Any:
        threads.append(threading.current_thread())
        return real(path)

    monkeypatch.setattr("pykubelet.kuberuntime.gc.os.scandir", scandir)
    collector = LogCollector(cast(Any, None), tmp_path, None)
    await collector.remove_log_dirs(lambda uid: uid == "u1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ns_file_u1", "ns_new_u2", "other"]
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (PermissionError(13, "Permission denied", "/x"), "permission denied"),
        (OSError(5, "Input/output error", "/x"), "input/output error"),
        (None, "not a directory"),
    ],
    ids=["permission", "disk", "file"],
)
async def test_remove_log_dirs_unreadable_directory_raises_upstream_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: OSError | None, reason: str
) -> None:
    path = tmp_path / "pods"
    path.touch()

    def scandir(path: Any) -> Any:
        raise failure or AssertionError

    if failure is not None:
        monkeypatch.setattr("pykubelet.kuberuntime.gc.os.scandir", scandir)
    with pytest.raises(PodLogsError) as caught:
        await LogCollector(cast(Any, None), path, None).remove_log_dirs(lambda uid: True)
    assert str(caught.value) == f'failed to read podLogsDirectory "{path}": open {path}: {reason}'


async def test_remove_dangling_links_failures_are_logged_and_others_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, links = tmp_path / "pods", tmp_path / "containers"
    links.mkdir()
    names = ("locked.log", "vanished.log", "web.log")
    for name in names:
        (links / name).symlink_to(logs / "gone" / "0.log")
    unlink, readlink = Path.unlink, Path.readlink

    def locked(path: Path, **options: Any) -> None:
        if path.name == "locked.log":
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, **options)

    def vanished(path: Path) -> Path:
        if path.name == "vanished.log":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return readlink(path)

    monkeypatch.setattr(Path, "unlink", locked)
    monkeypatch.setattr(Path, "readlink", vanished)
    await LogCollector(cast(Any, None), logs, links).remove_dangling_links()
    assert sorted(path.name for path in links.iterdir()) == ["locked.log", "vanished.log"]


async def test_remove_log_dirs_missing_directory_is_empty(tmp_path: Path) -> None:
    collector = LogCollector(cast(Any, None), tmp_path / "none", None)
    await collector.remove_log_dirs(lambda uid: True)
