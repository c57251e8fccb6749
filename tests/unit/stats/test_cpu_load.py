"""CPU load of cgroups: averages, cgroups that cannot be read, hosts without it, and the metrics."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest

from pykubelet.linux.cgroupfs import CgroupMode, Cgroups
from pykubelet.linux.taskstats import TaskStates
from pykubelet.stats.cadvisor.metrics import cadvisor_chunks
from pykubelet.stats.cpu_load import CpuLoadReader, cpu_load_reader
from pykubelet.stats.samples import CpuLoad
from tests.support.prometheus_text import parse
from tests.support.stats_records import MACHINE, NOW, device_name, record

ROOT = Path("/sys/fs/cgroup/cpu")


class Tasks:
    """Tasks by directory; an error where there is one."""

    def __init__(self) -> None:
        self.states: dict[str, TaskStates | OSError] = {}
        self.is_closed = False

    def read(self, directory: str) -> TaskStates:
        state = self.states[directory]
        if isinstance(state, OSError):
            raise state
        return state

    def close(self) -> None:
        self.is_closed = True


def test_on_sample_average_follows_number_of_tasks() -> None:
    tasks, found = Tasks(), record("container", "/kubepods/a")
    reader = CpuLoadReader(ROOT, tasks.read, 10.0)
    tasks.states["/sys/fs/cgroup/cpu/kubepods/a"] = TaskStates(running=4, uninterruptible=1, sleeping=7)
    reader.on_sample(found)
    # The first sample is the average: it is stable earlier.
    assert found.load == CpuLoad(TaskStates(running=4, uninterruptible=1, sleeping=7), 4.0, 1.0)
    tasks.states["/sys/fs/cgroup/cpu/kubepods/a"] = TaskStates(running=0, uninterruptible=3)
    reader.on_sample(found)
    share = math.exp(-1)
    assert found.load.tasks == TaskStates(uninterruptible=3)
    assert found.load.running == pytest.approx(4 * share)
    assert found.load.uninterruptible == pytest.approx(share + 3 * (1 - share))


@pytest.mark.parametrize("error", [FileNotFoundError(), OSError(errno.EINVAL, "Invalid argument")])
def test_on_sample_unreadable_cgroup_keeps_load(error: OSError) -> None:
    tasks, found = Tasks(), record("root", "/")
    tasks.states["/sys/fs/cgroup/cpu/"] = error
    found.load = CpuLoad(TaskStates(), 2.0, 0.0)
    CpuLoadReader(ROOT, tasks.read, 10.0).on_sample(found)
    assert found.load == CpuLoad(TaskStates(), 2.0, 0.0)


def test_cpu_load_reader_cgroup_v2_warns(caplog: pytest.LogCaptureFixture) -> None:
    cgroups = Cgroups(CgroupMode.V2, Path("/sys/fs/cgroup"), {"cpu": Path("/sys/fs/cgroup")}, {})
    assert cpu_load_reader(cgroups, 10.0) is None
    assert "CPU load is not measured" in caplog.text


def test_cadvisor_chunks_load_reported_in_thousandths() -> None:
    loaded, plain = record("pod", "/kubepods/a"), record("pod", "/kubepods/b")
    loaded.load = CpuLoad(TaskStates(1, 2, 3, 4, 5), 1.2345, 0.5)
    text = b"".join(
        cadvisor_chunks([loaded, plain], filesystems=[], device_name=device_name, machine=MACHINE, now=NOW)
    ).decode()
    values = {
        (series.name, series.get("id"), series.get("state")): value
        for series, value in parse(text).items()
        if series.name.startswith(("container_cpu_load", "container_tasks"))
    }
    states = ("sleeping", "running", "stopped", "uninterruptible", "iowaiting")
    assert values == {
        ("container_cpu_load_average_10s", "/kubepods/a", ""): 1234,
        ("container_cpu_load_d_average_10s", "/kubepods/a", ""): 500,
        **{("container_tasks_state", "/kubepods/a", state): n for n, state in enumerate(states, 1)},
        ("container_cpu_load_average_10s", "/kubepods/b", ""): 0,
        ("container_cpu_load_d_average_10s", "/kubepods/b", ""): 0,
        **{("container_tasks_state", "/kubepods/b", state): 0 for state in states},
    }
