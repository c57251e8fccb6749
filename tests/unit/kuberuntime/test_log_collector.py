"""Removal of the logs of deleted pods."""

import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from pykubelet.kuberuntime.gc import LogCollector


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


async def test_remove_log_dirs_missing_directory_is_empty(tmp_path: Path) -> None:
    collector = LogCollector(cast(Any, None), tmp_path / "none", None)
    await collector.remove_log_dirs(lambda uid: True)
