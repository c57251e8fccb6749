"""The collector: which cgroups are sampled when, rates, and cgroups that come and go."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from pykubelet.stats import collector as module
from pykubelet.stats.collector import NODE, Collector, nano_cores
from pykubelet.stats.sampler import sample_interval
from pykubelet.stats.samples import CgroupError, CgroupGone, Details, Limits, Target, Usage
from pykubelet.util.tasks import TaskScope

pytestmark = pytest.mark.looptime


class Cgroups:
    """Cgroups by path: processor time in nanoseconds per second, or None for one that was removed."""

    def __init__(self, **speeds: int) -> None:
        self.speeds: dict[str, int | None] = {f"/{name}": speed for name, speed in speeds.items()}
        self.reads: Counter[str] = Counter()
        self.details: Counter[str] = Counter()
        self.refreshes: Counter[str] = Counter()
        self.limits: Counter[str] = Counter()
        self.procs_file: Path | None = None
        self.open: set[Cgroup] = set()
        self.failing: set[str] = set()
        self._loop = asyncio.get_running_loop()

    def __call__(self, path: str) -> Cgroup:
        if self.speeds.get(path) is None:
            raise CgroupGone(path)
        return Cgroup(self, path)

    def clock(self) -> float:
        return 1000.0 + self._loop.time()


class Cgroup:
    def __init__(self, cgroups: Cgroups, path: str) -> None:
        self._cgroups, self._path = cgroups, path
        cgroups.open.add(self)

    @property
    def procs_file(self) -> Path | None:
        return self._cgroups.procs_file

    def read_usage(self, *, fresh: bool = False) -> Usage:
        self._cgroups.reads[self._path] += 1
        return self._usage()

    def read(self) -> tuple[Usage, Details]:
        self._cgroups.details[self._path] += 1
        return self._usage(), Details(processes=1)

    def refresh(self, details: Details) -> Details:
        self._cgroups.refreshes[self._path] += 1
        return details

    def read_limits(self) -> Limits:
        self._cgroups.limits[self._path] += 1
        return Limits(created=1.0)

    def close(self) -> None:
        self._cgroups.open.remove(self)

    def _usage(self) -> Usage:
        speed = self._cgroups.speeds[self._path]
        if speed is None:
            raise CgroupGone(self._path)
        if self._path in self._cgroups.failing:
            raise CgroupError("cannot read")
        now = self._cgroups.clock()
        return Usage(time=now, cpu=round(speed * now), memory=1, working_set=1)


def target(name: str) -> Target:
    return Target(path=f"/{name}", kind="container", container=name)


async def _run(collector: Collector, seconds: float) -> None:
    task = asyncio.ensure_future(collector.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait([task])


async def test_collector_targets_are_sampled_once_per_interval(tasks: TaskScope) -> None:
    cgroups = Cgroups(a=1, b=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, [target("a"), target("b")])
    await _run(collector, 1000.5)
    assert all(100 <= count <= 102 for count in cgroups.reads.values()), cgroups.reads
    assert not cgroups.open, "their files are closed at the end"


async def test_collector_many_targets_are_spread_over_interval(tasks: TaskScope) -> None:
    names = [f"n{number}" for number in range(200)]
    cgroups = Cgroups(**dict.fromkeys(names, 1))
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, map(target, names))
    task = asyncio.ensure_future(collector.run())
    await asyncio.sleep(30.5)
    per_second = []
    for _ in range(10):
        before = cgroups.reads.total()
        await asyncio.sleep(1)
        per_second.append(cgroups.reads.total() - before)
    task.cancel()
    await asyncio.wait([task])
    assert sum(per_second) == 200
    assert max(per_second) < 60, per_second


async def test_collector_new_target_has_rate_before_interval_has_passed(tasks: TaskScope) -> None:
    cgroups = Cgroups(a=250_000_000)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    task = asyncio.ensure_future(collector.run())
    await asyncio.sleep(3.5)
    collector.set_targets("uid", [target("a")])
    await asyncio.sleep(1)
    record = collector.record("/a")
    assert record is not None
    assert record.usage is not None
    assert record.nano_cores is None
    await asyncio.sleep(10)
    assert record.nano_cores == pytest.approx(250_000_000, rel=1e-3)
    task.cancel()
    await asyncio.wait([task])


async def test_collector_cgroup_appears_and_vanishes_has_record_only_between(tasks: TaskScope) -> None:
    cgroups = Cgroups()
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets("uid", [target("a")])
    task = asyncio.ensure_future(collector.run())
    await asyncio.sleep(5)
    assert not collector.records()
    cgroups.speeds["/a"] = 1
    await asyncio.sleep(10)
    assert [record.target.container for record in collector.records()] == ["a"]
    cgroups.speeds["/a"] = None
    await asyncio.sleep(11)
    assert not collector.records()
    assert not cgroups.open
    task.cancel()
    await asyncio.wait([task])


async def test_collector_read_fails_omits_record_until_it_succeeds(tasks: TaskScope) -> None:
    cgroups = Cgroups(a=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets("uid", [target("a")])
    task = asyncio.ensure_future(collector.run())
    await asyncio.sleep(1)
    cgroups.failing.add("/a")
    await asyncio.sleep(11)
    assert not collector.records()
    cgroups.failing.clear()
    await asyncio.sleep(11)
    assert collector.record("/a") is not None
    task.cancel()
    await asyncio.wait([task])


async def test_set_targets_path_stays_keeps_samples_and_takes_new_facts(tasks: TaskScope) -> None:
    cgroups = Cgroups(a=1, b=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets("uid", [target("a"), target("b")])
    await collector.sample_due()
    before = collector.record("/a")
    assert before is not None
    collector.set_targets("uid", [Target(path="/a", kind="container", container="a", image="new")])
    after = collector.record("/a")
    assert after is before
    assert after.target.image == "new"
    assert [record.target.path for record in collector.records()] == ["/a"]
    assert len(cgroups.open) == 1
    collector.set_targets("uid", [])
    assert not cgroups.open
    assert not list(collector.owners())


async def test_refresh_details_concurrent_and_repeated_reads_each_cgroup_once_per_interval(
    tasks: TaskScope,
) -> None:
    names = [f"n{number}" for number in range(40)]
    cgroups = Cgroups(**dict.fromkeys(names, 1))
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, map(target, names))
    await collector.sample_due()
    await asyncio.gather(*(collector.refresh_details() for _ in range(10)))
    await collector.refresh_details()
    assert set(cgroups.details.values()) == {1}
    record = collector.record("/n1")
    assert record is not None
    assert record.details == Details(processes=1)
    await asyncio.sleep(10.1)
    await collector.refresh_details()
    assert set(cgroups.details.values()) == {2}


async def test_refresh_details_idle_cgroup_only_refreshed_until_it_runs(tasks: TaskScope) -> None:
    cgroups = Cgroups(idle=0, busy=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, map(target, ("idle", "busy")))
    await collector.sample_due()
    await collector.refresh_details()
    await asyncio.sleep(10.1)
    await collector.sample_due()
    sampled, reads = cgroups.clock(), cgroups.reads["/idle"]
    await asyncio.sleep(1)
    await collector.refresh_details()
    assert (cgroups.details["/idle"], cgroups.refreshes["/idle"]) == (1, 1)
    assert (cgroups.details["/busy"], cgroups.refreshes["/busy"]) == (2, 0)
    record = collector.record("/idle")
    assert record is not None
    assert (record.details_time, record.details) == (sampled, Details(processes=1))
    assert cgroups.reads["/idle"] == reads
    cgroups.speeds["/idle"] = 5
    await asyncio.sleep(10.1)
    await collector.sample_due()
    await collector.refresh_details()
    assert (cgroups.details["/idle"], cgroups.refreshes["/idle"]) == (2, 1)


async def test_refresh_details_without_newer_sample_usage_is_read_first(tasks: TaskScope) -> None:
    """Verify that an idle cgroup is not read completely just because it is sampled less often."""
    cgroups = Cgroups(idle=0, busy=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, map(target, ("idle", "busy")))
    await collector.sample_due()
    await collector.refresh_details()
    await asyncio.sleep(10.1)
    await collector.refresh_details()
    assert (cgroups.details["/idle"], cgroups.refreshes["/idle"]) == (1, 1)
    assert (cgroups.details["/busy"], cgroups.refreshes["/busy"]) == (2, 0)
    record = collector.record("/idle")
    assert record is not None
    assert record.usage is not None
    assert record.details_time == record.usage.time == cgroups.clock()


@pytest.mark.parametrize(
    ("interval", "idle", "expected"),
    [(10.0, 0, 10.0), (10.0, 1, 15.0), (10.0, 9, 15.0), (1.0, 2, 4.0), (1.0, 1000, 15.0), (20.0, 3, 20.0)],
)
def test_sample_interval_idle_grows_to_maximum(interval: float, idle: int, expected: float) -> None:
    assert sample_interval(interval, idle) == expected


async def test_sample_due_idle_cgroup_sampled_less_often_until_it_runs(tasks: TaskScope) -> None:
    cgroups = Cgroups(idle=0, busy=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, map(target, ("idle", "busy")))

    async def samples(seconds: int) -> Counter[str]:
        before = cgroups.reads.copy()
        for _ in range(seconds):
            await asyncio.sleep(1)
            await collector.sample_due()
        return cgroups.reads - before

    await samples(60)
    assert await samples(600) == {"/idle": 40, "/busy": 60}
    cgroups.speeds["/idle"] = 1
    await samples(20)
    assert await samples(600) == {"/idle": 60, "/busy": 60}


def pod_of_two() -> list[Target]:
    return [
        Target(path="/pod", kind="pod", pod_uid="uid"),
        *(Target(path=f"/pod/{name}", kind="container", pod_uid="uid", container=name) for name in "ab"),
    ]


async def _sample(cgroups: Cgroups, collector: Collector, seconds: int) -> Counter[str]:
    """Let time pass; return the reads of each cgroup in it."""
    before = cgroups.reads.copy()
    for _ in range(seconds):
        await asyncio.sleep(1)
        await collector.sample_due()
    return cgroups.reads - before


async def test_sample_due_idle_pod_containers_have_samples_without_being_read(tasks: TaskScope) -> None:
    cgroups = Cgroups(**{"pod": 0, "pod/a": 0, "pod/b": 0})
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets("uid", pod_of_two())
    await _sample(cgroups, collector, 60)
    reads = await _sample(cgroups, collector, 540)
    assert reads["/pod"] == 36
    # Only with their limits.
    assert all(reads[f"/pod/{name}"] <= 3 for name in "ab"), reads
    for record in collector.records():
        assert record.usage is not None
        assert cgroups.clock() - record.usage.time <= 15
        assert record.nano_cores == 0


async def test_sample_due_pod_runs_containers_read_with_it(tasks: TaskScope) -> None:
    cgroups = Cgroups(**{"pod": 0, "pod/a": 0, "pod/b": 0})
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets("uid", pod_of_two())
    await _sample(cgroups, collector, 60)
    cgroups.speeds |= {"/pod": 500, "/pod/a": 500}
    await _sample(cgroups, collector, 30)
    assert await _sample(cgroups, collector, 600) == {"/pod": 60, "/pod/a": 60, "/pod/b": 60}
    rates = {record.target.path: record.nano_cores for record in collector.records()}
    assert rates == {"/pod": 500, "/pod/a": 500, "/pod/b": 0}
    times = {record.usage.time for record in collector.records() if record.usage is not None}
    assert len(times) == 1


@pytest.mark.parametrize("missing", ["/pod", "/pod/a"])
async def test_sample_due_cgroup_of_pod_vanishes_others_still_sampled(tasks: TaskScope, missing: str) -> None:
    cgroups = Cgroups(**{"pod": 1, "pod/a": 1, "pod/b": 1})
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets("uid", pod_of_two())
    await _sample(cgroups, collector, 60)
    cgroups.speeds[missing] = None
    await _sample(cgroups, collector, 30)
    assert {record.target.path for record in collector.records()} == {"/pod", "/pod/a", "/pod/b"} - {missing}
    assert (await _sample(cgroups, collector, 100))["/pod/b"] == 10
    cgroups.speeds[missing] = 1
    await _sample(cgroups, collector, 60)
    reads = await _sample(cgroups, collector, 100)
    assert set(reads.values()) == {10}, reads
    collector.close()
    assert not cgroups.open


async def test_sample_due_details_read_in_between_idle_containers_are_read(tasks: TaskScope) -> None:
    """Verify that a sample of the pod that is newer than a container's does not confirm the container's."""
    cgroups = Cgroups(**{"pod": 0, "pod/a": 0, "pod/b": 0})
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets("uid", pod_of_two())
    await _sample(cgroups, collector, 60)
    collector.sample_now(["/pod"])
    reads = await _sample(cgroups, collector, 15)
    assert reads["/pod/a"] == 1


async def test_sample_due_targets_of_owner_set_again_limits_read(tasks: TaskScope) -> None:
    cgroups = Cgroups(a=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, [target("a")])
    await collector.sample_due()
    for _ in range(3):
        await asyncio.sleep(10)
        await collector.sample_due()
    assert cgroups.limits["/a"] == 1
    collector.set_targets(NODE, [target("a")])
    await asyncio.sleep(10)
    await collector.sample_due()
    assert cgroups.limits["/a"] == 2


async def test_refresh_summary_reads_no_details_and_waits_for_details_in_progress(tasks: TaskScope) -> None:
    cgroups = Cgroups(a=1, b=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, map(target, ("a", "b")))
    await collector.sample_due()
    await collector.refresh_summary()
    assert not cgroups.details
    record = collector.record("/a")
    assert record is not None
    assert record.summary_time == cgroups.clock()
    await asyncio.sleep(10.1)
    await asyncio.gather(*(call() for call in (collector.refresh_summary, collector.refresh_details) * 3))
    assert cgroups.details == {"/a": 1, "/b": 1}
    assert record.details == Details(processes=1)
    await asyncio.sleep(5)
    await collector.refresh_summary()
    assert record.summary_time == cgroups.clock() - 5


async def test_refresh_summary_processes_counted_again_after_they_ran(
    tasks: TaskScope, tmp_path: Path
) -> None:
    cgroups = Cgroups(a=0)
    cgroups.procs_file = tmp_path / "cgroup.procs"
    cgroups.procs_file.write_text(f"{os.getpid()}\n")
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, [target("a")])

    async def count() -> int | None:
        await asyncio.sleep(15)
        await collector.sample_due()
        await collector.refresh_summary()
        record = collector.record("/a")
        assert record is not None
        return record.processes

    assert await count() == 1
    cgroups.procs_file.write_text(f"{os.getpid()}\n{os.getppid()}\n")
    assert await count() == 1
    cgroups.speeds["/a"] = 1
    assert await count() == 2


async def test_refresh_details_caller_cancelled_serves_other_callers(tasks: TaskScope) -> None:
    cgroups = Cgroups(a=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, [target("a")])
    await collector.sample_due()
    first = asyncio.ensure_future(collector.refresh_details())
    second = asyncio.ensure_future(collector.refresh_details())
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert cgroups.details["/a"] == 1


async def test_refresh_details_cgroup_vanishes_drops_record(tasks: TaskScope) -> None:
    cgroups = Cgroups(a=1, b=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, [target("a"), target("b")])
    await collector.sample_due()
    cgroups.speeds["/a"] = None
    await collector.refresh_details()
    assert [record.target.path for record in collector.records()] == ["/b"]


async def test_count_oom_of_known_and_unknown_cgroup_counts_known(tasks: TaskScope) -> None:
    cgroups = Cgroups(a=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, [target("a")])
    await collector.sample_due()
    collector.count_oom("/a")
    collector.count_oom("/unknown")
    record = collector.record("/a")
    assert record is not None
    assert record.oom_events == 1


async def test_collector_details_right_after_sample_keep_rate(tasks: TaskScope) -> None:
    cgroups = Cgroups(a=250_000_000)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets("uid", [target("a")])
    await collector.sample_due()
    await asyncio.sleep(10)
    await collector.sample_due()
    record = collector.record("/a")
    assert record is not None
    assert record.usage is not None
    before = record.usage.time
    await asyncio.sleep(0.1)
    cgroups.speeds["/a"] = 260_000_000  # runs all the time just now
    await collector.refresh_details()
    assert record.usage.time == pytest.approx(before + 0.1)
    assert record.nano_cores == pytest.approx(250_000_000, rel=1e-3)
    await asyncio.sleep(10)
    await collector.sample_due()
    assert record.nano_cores is not None
    assert record.nano_cores > 260_000_000  # the jump is in the next one
    collector.close()


@pytest.mark.parametrize(
    ("before", "after", "rate"),
    [
        ((10.0, 1000), (12.0, 3000), 1000),
        ((10.0, 1000), (12.0, 1000), 0),
        ((10.0, 1000), (12.0, 500), None),  # the counter of another container
        ((10.0, 1000), (10.0, 2000), None),
        ((12.0, 1000), (10.0, 2000), None),  # the clock was set back
    ],
)
def test_nano_cores_two_samples_returns_rate_or_none(
    before: tuple[float, int], after: tuple[float, int], rate: int | None
) -> None:
    samples = [Usage(time=when, cpu=cpu, memory=0, working_set=0) for when, cpu in (before, after)]
    assert nano_cores(*samples) == rate
    assert nano_cores(None, samples[0]) is None


async def test_sample_due_reads_are_slow_yields_to_event_loop(
    monkeypatch: pytest.MonkeyPatch, tasks: TaskScope
) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", -1.0)
    names = [f"n{number}" for number in range(10)]
    cgroups = Cgroups(**dict.fromkeys(names, 1))
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, map(target, names))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    await collector.sample_due()
    counting.cancel()
    assert turns >= 10


class BlockedCgroup(Cgroup):
    """A reader whose details are read when the test allows it."""

    started, released = threading.Event(), threading.Event()

    def read(self) -> tuple[Usage, Details]:
        self.started.set()
        assert self.released.wait(30)
        return super().read()


async def test_refresh_details_scope_left_waits_for_thread_and_closes_files() -> None:
    cgroups = Cgroups(a=1)
    BlockedCgroup.started.clear()
    BlockedCgroup.released.clear()
    async with TaskScope() as scope:
        collector = Collector(lambda path: BlockedCgroup(cgroups, path), scope, 10.0, cgroups.clock)
        collector.set_targets(NODE, [target("a")])
        scope.start(collector.run(), name="statistics")
        await collector.sample_due()
        caller = asyncio.ensure_future(collector.refresh_details())
        assert await asyncio.to_thread(BlockedCgroup.started.wait, 30)
        collector.set_targets(NODE, ())
        assert cgroups.open, "a thread reads it"
        asyncio.get_running_loop().call_soon(BlockedCgroup.released.set)
    await caller
    assert not cgroups.open


async def test_refresh_details_read_fails_error_reaches_callers_and_next_read_succeeds(
    tasks: TaskScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroups = Cgroups(a=1)
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets(NODE, [target("a")])
    await collector.sample_due()
    with monkeypatch.context() as patched:
        patched.setattr(module, "_read_batch", lambda *_: 1 / 0)
        outcomes = await asyncio.gather(
            *(collector.refresh_details() for _ in range(3)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError] * 3
    await collector.refresh_details()
    assert cgroups.details["/a"] == 1
    collector.close()
    assert not cgroups.open
