"""Log of the usage of cAdvisor's own cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pykubelet.linux.cgroupfs import CgroupMode, Cgroups
from pykubelet.stats import usage_log
from pykubelet.stats.usage_log import SAMPLES, UsageLog, own_cadvisor_cgroup
from tests.support.stats_records import NOW, record, usage


class Log:
    """Values of logged lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def info(self, message: str, **values: object) -> None:
        assert message == "Usage of own cgroup"
        self.lines.append(values)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(usage_log, "log", log)
    return log


def feed(listener: UsageLog, path: str, count: int, *, seconds: float, start: int = 0) -> None:
    """Report samples of a cgroup that uses half a CPU, and two of them in the last interval."""
    found = record("root", path)
    for index in range(start, start + count):
        busy = 1.5 * seconds if index == SAMPLES - 1 else 0
        cpu = round((index * seconds * 0.5 + busy) * 1e9)
        found.usage = usage(time=NOW + index * seconds, cpu=cpu, memory=5000 + index)
        listener.on_sample(found)


def test_on_sample_sixty_samples_logged_with_average(log: Log) -> None:
    listener = UsageLog("/")
    feed(listener, "/", SAMPLES - 1, seconds=1)
    assert log.lines == []
    feed(listener, "/", 1, seconds=1, start=SAMPLES - 1)
    assert log.lines == [
        {"cgroup": "/", "cores": "2.000", "averageCores": "0.525", "memoryBytes": 5000 + SAMPLES - 1}
    ]


def test_on_sample_long_interval_nothing_logged(log: Log) -> None:
    # cAdvisor keeps samples for two minutes, in which there are fewer than it needs.
    feed(UsageLog("/"), "/", 200, seconds=10)
    assert log.lines == []


def test_on_sample_other_cgroup_nothing_logged(log: Log) -> None:
    feed(UsageLog("/"), "/kubepods", 100, seconds=1)
    assert log.lines == []


def test_on_sample_repeated_or_reset_sample_not_counted(log: Log) -> None:
    listener, found = UsageLog("/"), record("root", "/")
    feed(listener, "/", SAMPLES - 1, seconds=1)
    found.usage = usage(time=NOW + SAMPLES - 2, cpu=10**12)
    listener.on_sample(found)
    assert log.lines == []
    found.usage = replace(found.usage, time=NOW)  # the clock was set back
    listener.on_sample(found)
    feed(listener, "/", SAMPLES - 1, seconds=1, start=1)
    assert log.lines == []


@pytest.mark.parametrize(
    ("mode", "own", "path"),
    [
        (CgroupMode.V2, {"": "/system.slice/kubelet.service"}, "/"),
        (CgroupMode.V1, {"cpu": "/kubelet", "memory": "/other"}, "/kubelet"),
        (CgroupMode.HYBRID, {"cpu": "/"}, "/"),
    ],
)
def test_own_cadvisor_cgroup_is_that_of_upstream(mode: CgroupMode, own: dict[str, str], path: str) -> None:
    assert own_cadvisor_cgroup(Cgroups(mode, Path("/sys/fs/cgroup"), {}, own)) == path
