"""Disk usage of logs, hosts files and volumes: counted like `du`, while files come and go."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.server.metrics.registry_text import text_format
from pykubelet.stats.storage import pod_storage
from pykubelet.stats.storage.pod_storage import (
    FileUsage,
    LoggedPod,
    LoggingContainer,
    LogMetrics,
    PodStorageMeter,
    measure,
    volume_usage,
)
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.usage import VolumeStats, WalkThrottle
from tests.support.metrics_page import Page
from tests.support.threads import forbid_threads
from tests.support.volumes import pod_with

STATS = VolumeStats(capacity=9, available=8, used=7, inodes=6, inodes_free=5, inodes_used=4, moment=1.0)


def throttle() -> WalkThrottle:
    return WalkThrottle(threading.Event())


def logged(root: Path, number: int = 0, containers: int = 1, files: int = 2) -> LoggedPod:
    """Write the logs and the hosts file of a pod."""
    logs = root / f"default_pod-{number}_uid-{number}"
    for each in range(containers):
        directory = logs / f"c{each}"
        directory.mkdir(parents=True)
        for file in range(files):
            (directory / f"{file}.log").write_bytes(b"x" * 5000)
    hosts = root / f"hosts-{number}"
    hosts.write_text("127.0.0.1 localhost\n")
    return LoggedPod(f"uid-{number}", str(logs), str(hosts))


def blocks(*paths: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in paths)


def test_measure_counts_blocks_and_inodes_of_rotated_files(tmp_path: Path) -> None:
    pod = logged(tmp_path, files=1)
    directory = Path(pod.log_dir, "c0")
    rotated = directory / "0.log.20260101-000000.gz"
    rotated.write_bytes(b"y" * 20_000)
    sparse = directory / "1.log"
    with sparse.open("wb") as file:
        file.truncate(1 << 30)
    (directory / "link.log").symlink_to("/dev/zero")
    (directory / "inner").mkdir()
    (directory / "inner" / "ignored").write_bytes(b"z" * 5000)
    loose = Path(pod.log_dir, "loose.log")
    loose.write_bytes(b"w" * 5000)
    found = measure([pod], throttle(), lambda: 7.0)["uid-0"]
    files = [directory / "0.log", rotated, sparse, directory / "link.log"]
    assert found.container_logs == {"c0": FileUsage(blocks(*files), 4)}
    assert found.container_logs["c0"].used is not None
    assert found.container_logs["c0"].used < 1 << 20
    assert found.pod_logs == FileUsage(blocks(loose), 1)
    assert found.hosts == FileUsage(blocks(Path(pod.hosts_file)), 1)
    assert found.time == 7.0


def test_measure_missing_directories_omits_them(tmp_path: Path) -> None:
    (tmp_path / "empty" / "c0").mkdir(parents=True)
    pods = [
        LoggedPod("gone", str(tmp_path / "gone"), str(tmp_path / "gone-hosts")),
        LoggedPod("empty", str(tmp_path / "empty"), ""),
    ]
    found = measure(pods, throttle())
    assert found["gone"].pod_logs is None
    assert found["gone"].hosts is None
    assert found["gone"].container_logs == {}
    assert found["empty"].container_logs == {"c0": FileUsage()}


def test_measure_symlinked_container_directory_not_followed(tmp_path: Path) -> None:
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod" / "c0").symlink_to("/")
    found = measure([LoggedPod("uid", str(tmp_path / "pod"), "")], throttle())["uid"]
    assert found.container_logs == {}
    assert found.pod_logs == FileUsage(0, 1)


class Interfering(WalkThrottle):
    """Changes the tree at a step of the measurement."""

    def __init__(self, step: int, change: Callable[[], None]) -> None:
        super().__init__(threading.Event())
        self._at, self._change = step, change

    def step(self) -> None:
        super().step()
        if self.steps == self._at:
            self._change()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_measure_directory_vanishes_meanwhile_skips_it(tmp_path: Path, step: int) -> None:
    pod = logged(tmp_path)

    def remove() -> None:
        directory = Path(pod.log_dir, "c0")
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()

    found = measure([pod, logged(tmp_path, 1)], Interfering(step, remove))
    assert found["uid-0"].hosts is not None
    assert found["uid-1"].container_logs["c0"].inodes == 2


def test_measure_directory_grows_meanwhile_ends(tmp_path: Path) -> None:
    pod = logged(tmp_path)

    def grow() -> None:
        for number in range(200):
            Path(pod.log_dir, "c0", f"new-{number}.log").touch()

    found = measure([pod], Interfering(2, grow))["uid-0"]
    assert 2 <= (found.container_logs["c0"].inodes or 0) <= 202


def test_measure_too_many_files_usage_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_storage, "MAX_ENTRIES", 20)
    found = measure([logged(tmp_path, files=30), logged(tmp_path, 1)], throttle())
    assert found["uid-0"].container_logs == {}
    assert found["uid-0"].pod_logs is None
    assert found["uid-0"].hosts is not None
    assert found["uid-1"].container_logs["c0"].inodes == 2


async def test_meter_500_pods_measured_once_for_many_readers(tmp_path: Path, tasks: TaskScope) -> None:
    pods = [logged(tmp_path, number, files=1) for number in range(500)]
    passes: list[float] = []
    meter = PodStorageMeter(lambda: pods, tasks, observe_duration=passes.append, wait=60.0)
    results = await asyncio.gather(*(meter.get() for _ in range(20)))
    assert all(len(found) == 500 for found in results)
    assert meter.latest() is results[0]
    assert len(passes) == 1


async def test_meter_hanging_file_system_returns_nothing_in_time_and_one_thread(
    tmp_path: Path, tasks: TaskScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, scans = threading.Event(), []

    def hang(path: str) -> object:
        scans.append(path)
        released.wait(60)
        raise OSError("stale file handle")

    monkeypatch.setattr(os, "scandir", hang)
    pod = LoggedPod("uid", str(tmp_path), "")
    meter = PodStorageMeter(lambda: [pod], tasks, wait=0.05, interval=0.0)
    try:
        for _ in range(5):
            assert await meter.get() == {}
        assert len(scans) == 1
    finally:
        released.set()


async def test_log_metrics_reports_running_containers(tmp_path: Path, tasks: TaskScope) -> None:
    pod = logged(tmp_path, containers=2)
    meter = PodStorageMeter(lambda: [pod], tasks)
    registry = CollectorRegistry()
    running = [
        LoggingContainer("uid-0", "default", "pod-0", "c1"),
        LoggingContainer("uid-0", "default", "pod-0", "without-logs"),
        LoggingContainer("uid-9", "default", "pod-9", "c0"),
    ]
    registry.register(LogMetrics(lambda: running, meter.latest))
    name = "kubelet_container_log_filesystem_used_bytes"
    assert name not in text_format(registry.collect()).decode()
    await meter.get()
    text = text_format(registry.collect()).decode()
    value = Page(text).value(name, uid="uid-0", namespace="default", pod="pod-0", container="c1")
    assert value == blocks(*Path(pod.log_dir, "c1").iterdir())
    assert text.count(name + "{") == 1


def test_volume_usage_has_claims_and_ephemeral_first() -> None:
    pod = pod_with(
        {"name": "claimed", "persistentVolumeClaim": {"claimName": "claim"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "disk", "emptyDir": {}},
        {"name": "made", "ephemeral": {}},
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "unmeasured", "hostPath": {"path": "/"}},
    )
    names = ("claimed", "memory", "disk", "made", "config", "left-over")
    found = volume_usage(pod, dict.fromkeys(names, STATS))
    assert [(usage.name, usage.claim, usage.ephemeral) for usage in found] == [
        ("disk", "", True),
        ("config", "", True),
        ("claimed", "claim", False),
        ("memory", "", False),
        ("made", f"{pod.metadata.name}-made", False),
    ]
    assert volume_usage(pod, {}) == ()


async def test_get_without_further_threads_is_empty_and_recovers(
    tmp_path: Path, tasks: TaskScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = logged(tmp_path)
    meter = PodStorageMeter(lambda: [pod], tasks, interval=0)
    with monkeypatch.context() as patch:
        forbid_threads(patch)
        assert await meter.get() == {}
    assert list(await meter.get()) == [pod.uid]
