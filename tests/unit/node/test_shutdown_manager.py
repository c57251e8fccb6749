"""Node shutdowns on a real bus with a logind of the test's own, and pods in memory."""

import asyncio
import json
import math
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.linux.logind import DROP_IN_NAME, connect_logind
from pykubelet.node import shutdown_drain, shutdown_manager, shutdown_state
from pykubelet.node.shutdown_drain import PodDrain
from pykubelet.node.shutdown_groups import ShutdownPeriod, terminated_status
from pykubelet.node.shutdown_manager import NodeShutdownManager
from pykubelet.node.shutdown_state import (
    STATE_FILE,
    STATUSES_FILE,
    FinalStatuses,
    NodeShutdownState,
    ShutdownTimes,
)
from pykubelet.util.tasks import TaskScope
from tests.support.logind import LogindPeer, bus_daemon, logind_on_bus
from tests.support.pods import NOW, make_pod
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(
    shutil.which("dbus-daemon") is None, reason="needs dbus-daemon (Debian package dbus-daemon)"
)
PERIODS = (ShutdownPeriod(0, 20), ShutdownPeriod(1000, 10))
STUCK = math.inf


class MemoryPods:
    """Pods that stop after as many seconds as a test sets, or never."""

    def __init__(self, final: FinalStatuses) -> None:
        self._final = final
        self._active: dict[str, Pod] = {}
        self.stop_seconds: dict[str, float] = {}
        self.log: list[str] = []
        self.recorded_before: list[bool] = []
        """Whether each terminated pod was on disk before its termination."""
        self.path: Path | None = None
        self.api_is_up = True
        self._changed = asyncio.Event()

    def add(self, name: str, priority: int = 0, stop: float = 0.0, grace: int = 30) -> None:
        pod = make_pod(name, name, status=PodStatus(phase="Running"))
        pod.spec.priority, pod.spec.termination_grace_period_seconds = priority, grace
        self._active[name] = pod
        self.stop_seconds[name] = stop
        self._changed.set()

    def are_known(self) -> bool:
        return True

    def active(self) -> Sequence[Pod]:
        return list(self._active.values())

    def record(self, pod: Pod) -> None:
        self._final.add(pod.uid, terminated_status(pod, pod.status, NOW))

    def terminate(self, pod: Pod, grace: int) -> None:
        assert self.path is not None
        self.recorded_before.append(pod.uid in json.loads(self.path.read_text())["pods"])
        self.log.append(f"terminate {pod.uid} {grace}")
        seconds = self.stop_seconds[pod.uid]
        if seconds != STUCK:
            asyncio.get_running_loop().call_later(seconds, self._stop, pod.uid)

    def _stop(self, uid: str) -> None:
        self._active.pop(uid, None)
        self.log.append(f"stopped {uid}")
        self._changed.set()

    def is_stopped(self, uid: str) -> bool:
        return uid not in self._active

    def is_released(self, uid: str) -> bool:
        return uid not in self._active

    def is_reported(self, uid: str) -> bool:
        return self.api_is_up and uid not in self._active

    def exceeded(self, pod: Pod) -> None:
        self.log.append(f"exceeded {pod.uid}")

    async def changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()


@dataclass
class Rig:
    """A manager with everything around it."""

    pods: MemoryPods
    state: NodeShutdownState
    manager: NodeShutdownManager
    final: FinalStatuses
    root: Path
    events: list[str]
    registry: CollectorRegistry
    cancelled: list[bool] = field(default_factory=list)

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"kubelet_graceful_shutdown_{name}_time_seconds")

    def times(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.root / STATE_FILE).read_text())
        return found


@asynccontextmanager
async def managed(
    root: Path, bus: Path, periods: Sequence[ShutdownPeriod] = PERIODS, *, start: bool = True
) -> AsyncIterator[Rig]:
    final, state, registry = FinalStatuses(root), NodeShutdownState(), CollectorRegistry()
    pods, events, cancelled = MemoryPods(final), [], []
    pods.path = root / STATUSES_FILE
    async with TaskScope() as scope:
        manager = NodeShutdownManager(
            periods,
            PodDrain(pods, final),
            state,
            lambda kind, reason, message: events.append(f"{kind} {reason} {message}"),
            scope,
            times=ShutdownTimes(root, registry),
            on_cancelled=lambda: cancelled.append(True),
            connect=lambda: connect_logind(bus),
            drop_in_directory=root / "logind.conf.d",
        )
        if start:
            scope.start(manager.run(), name="manager")
        yield Rig(pods, state, manager, final, root, events, registry, cancelled)


async def test_manager_shutdown_terminates_groups_then_releases_lock(tmp_path: Path) -> None:
    async with logind_on_bus(tmp_path, delay=60) as (bus, logind), managed(tmp_path, bus) as rig:
        rig.pods.add("database", priority=1000, grace=7)
        rig.pods.add("web", stop=0.2)
        rig.pods.add("batch", priority=-5, grace=3)
        changes: list[bool] = []
        rig.state.add_listener(lambda: changes.append(rig.state.active))
        await logind.until(lambda: logind.held == 1)
        assert logind.inhibitors[0][1:3] == ("kubelet", "Kubelet needs time to handle node shutdown")
        assert logind.reloads == []
        logind.prepare_for_shutdown(True)
        await logind.until(lambda: logind.held == 0)
        assert changes == [True]
        assert rig.state.problems() == ["node is shutting down"]
        assert rig.pods.log[:2] == ["terminate web 20", "terminate batch 3"]
        assert rig.pods.log.index("stopped web") < rig.pods.log.index("terminate database 7")
        assert rig.pods.log[-1] == "stopped database"
        assert all(rig.pods.recorded_before)
        assert rig.events == ["Normal Shutdown Shutdown manager detected shutdown event"]
        assert not (tmp_path / STATUSES_FILE).exists()
        times = rig.times()
        assert times["startTime"] <= times["endTime"] < "2100"
        assert rig.metric("start") == int(datetime.fromisoformat(times["startTime"]).timestamp())
        assert rig.metric("end") == int(datetime.fromisoformat(times["endTime"]).timestamp())


async def test_manager_short_delay_is_raised_by_drop_in(tmp_path: Path) -> None:
    async with logind_on_bus(tmp_path, delay=5) as (bus, logind), managed(tmp_path, bus):
        await logind.until(lambda: logind.held == 1)
        assert logind.reloads == [("systemd-logind.service", "all", 1)]
        text = (tmp_path / "logind.conf.d" / DROP_IN_NAME).read_text()
        assert text == "# Kubelet logind override\n[Login]\nInhibitDelayMaxSec=35\n"
        assert logind.delay == 35


async def test_manager_delay_stays_short_periods_are_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown_manager, "RELOAD_SECONDS", (0.01, 0.01))
    async with logind_on_bus(tmp_path, delay=3) as (bus, logind):
        logind.is_stubborn = True
        async with managed(tmp_path, bus) as rig:
            rig.pods.add("web")
            rig.pods.add("database", priority=1000)
            await logind.until(lambda: logind.held == 1)
            logind.prepare_for_shutdown(True)
            await logind.until(lambda: logind.held == 0)
            assert [entry for entry in rig.pods.log if entry.startswith("terminate")] == [
                "terminate web 2",
                "terminate database 1",
            ]


async def test_manager_drop_in_not_writable_inhibits_anyway(tmp_path: Path) -> None:
    (tmp_path / "logind.conf.d").write_text("not a directory")
    async with logind_on_bus(tmp_path, delay=3) as (bus, logind), managed(tmp_path, bus):
        await logind.until(lambda: logind.held == 1)
        assert logind.reloads == []


async def test_manager_cancelled_shutdown_stops_drain_and_inhibits_again(tmp_path: Path) -> None:
    async with logind_on_bus(tmp_path, delay=60) as (bus, logind), managed(tmp_path, bus) as rig:
        rig.pods.add("web", stop=STUCK)
        rig.pods.add("database", priority=1000)
        await logind.until(lambda: logind.held == 1)
        logind.prepare_for_shutdown(True)
        await until(lambda: rig.pods.log)
        logind.prepare_for_shutdown(False)
        await logind.until(lambda: len(logind.inhibitors) == 2 and logind.held == 1)
        assert not rig.state.active
        assert rig.cancelled == [True]
        assert rig.pods.log == ["terminate web 20"]
        assert rig.times()["endTime"] > rig.times()["startTime"]
        assert rig.events[1] == "Normal Shutdown Shutdown manager detected shutdown cancellation"
        # The next shutdown is handled like the first.
        rig.pods._stop("web")
        logind.prepare_for_shutdown(True)
        await logind.until(lambda: logind.held == 0)
        assert rig.pods.log[-1] == "stopped database"


async def test_drain_cancelled_while_recording_pods_stay_and_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that the next kubelet process does not terminate pods of which no container was stopped."""
    writing, may_write = asyncio.Event(), asyncio.Event()

    async def slow(work: Callable[[], Any]) -> Any:
        writing.set()
        try:
            await may_write.wait()
        finally:
            # As `finish_in_thread`: the work completes also if its caller is cancelled.
            result = work()
        return result

    final = FinalStatuses(tmp_path)
    pods = MemoryPods(final)
    pods.add("web")
    monkeypatch.setattr(shutdown_state, "finish_in_thread", slow)
    drain = asyncio.ensure_future(PodDrain(pods, final).run(PERIODS))
    await writing.wait()
    drain.cancel()
    may_write.set()
    await asyncio.wait([drain])
    assert drain.cancelled()
    assert (pods.log, len(final)) == ([], 0)
    assert not (tmp_path / STATUSES_FILE).exists()


@pytest.mark.looptime
async def test_drain_pods_not_known_ends_within_periods_and_status_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def immediately(work: Callable[[], Any]) -> Any:
        return work()

    monkeypatch.setattr(shutdown_state, "finish_in_thread", immediately)
    final = FinalStatuses(tmp_path)
    pods = MemoryPods(final)
    pods.path = tmp_path / STATUSES_FILE
    pods.api_is_up = False
    for name, priority in (("web", 0), ("database", 1000)):
        pods.add(name, priority, stop=STUCK)
    monkeypatch.setattr(pods, "are_known", lambda: False)
    clock = asyncio.get_running_loop().time
    started = clock()
    await PodDrain(pods, final).run(PERIODS)
    # `stop_seconds`, by which the kubelet extends TimeoutStopSec, is the sum of both.
    assert clock() - started <= 30 + shutdown_drain.STATUS_SECONDS + 0.5


async def test_manager_logind_restarts_inhibits_again(tmp_path: Path) -> None:
    with bus_daemon(tmp_path) as bus:
        async with managed(tmp_path, bus) as rig:
            async with LogindPeer(bus, tmp_path, delay=60) as first:
                await first.until(lambda: first.held == 1)
            async with LogindPeer(bus, tmp_path, delay=60) as second:
                await second.until(lambda: second.held == 1)
                rig.pods.add("web")
                second.prepare_for_shutdown(True)
                await second.until(lambda: second.held == 0)
                assert rig.pods.log == ["terminate web 20", "stopped web"]
            # A new logind does not know of the shutdown: it counts as cancelled.
            async with LogindPeer(bus, tmp_path, delay=60) as third:
                await third.until(lambda: third.held == 1)
                assert not rig.state.active


async def test_manager_logind_appears_later_inhibits(tmp_path: Path) -> None:
    async with managed(tmp_path, tmp_path / "bus"):
        await asyncio.sleep(0)
        async with logind_on_bus(tmp_path, delay=60) as (_, logind):
            await logind.until(lambda: logind.held == 1)


async def test_manager_bus_ends_lock_stays_held(tmp_path: Path) -> None:
    with bus_daemon(tmp_path) as bus:
        async with LogindPeer(bus, tmp_path, delay=60) as logind, managed(tmp_path, bus) as rig:
            await logind.until(lambda: logind.held == 1)
            await until(lambda: rig.manager.is_inhibiting)
            # The daemon ends with the outer block; logind's pipe is not part of it.
            logind._sock.shutdown(2)
            assert rig.manager.is_inhibiting
            assert logind.held == 1


async def test_manager_started_during_shutdown_drains_without_lock(tmp_path: Path) -> None:
    async with logind_on_bus(tmp_path, delay=60, preparing=True) as (bus, logind):
        async with managed(tmp_path, bus, start=False) as rig:
            rig.pods.add("web")
            async with TaskScope() as scope:
                scope.start(rig.manager.run(), name="manager")
                await until(lambda: "stopped web" in rig.pods.log)
            assert rig.state.active
            assert logind.inhibitors == []


async def test_manager_pod_that_cannot_be_killed_delays_only_its_group(tmp_path: Path) -> None:
    periods = (ShutdownPeriod(0, 1), ShutdownPeriod(1000, 1))
    async with logind_on_bus(tmp_path, delay=60) as (bus, logind), managed(tmp_path, bus, periods) as rig:
        rig.pods.add("stuck", stop=STUCK)
        rig.pods.add("database", priority=1000)
        await logind.until(lambda: logind.held == 1)
        shutdown_drain_seconds = shutdown_drain.STATUS_SECONDS
        began = asyncio.get_running_loop().time()
        logind.prepare_for_shutdown(True)
        await logind.until(lambda: logind.held == 0)
        assert asyncio.get_running_loop().time() - began < 2 + shutdown_drain_seconds + 20
        assert rig.pods.log == [
            "terminate stuck 1",
            "exceeded stuck",
            "terminate database 1",
            "stopped database",
        ]
        # Its status is on disk, for the kubelet after the boot.
        assert set(FinalStatuses(tmp_path)) == {"stuck"}


async def test_manager_api_server_down_statuses_stay_on_disk_until_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown_drain, "STATUS_SECONDS", 0.3)
    async with logind_on_bus(tmp_path, delay=60) as (bus, logind):
        async with managed(tmp_path, bus) as rig:
            rig.pods.api_is_up = False
            rig.pods.add("web")
            await logind.until(lambda: logind.held == 1)
            logind.prepare_for_shutdown(True)
            await logind.until(lambda: logind.held == 0)
    after = FinalStatuses(tmp_path)
    assert after["web"].reason == "Terminated"
    pods = MemoryPods(after)
    pods.api_is_up = False
    async with TaskScope() as scope:
        scope.start(PodDrain(pods, after).deliver(), name="deliver")
        await asyncio.sleep(0)
        assert "web" in after
        pods.api_is_up = True
        pods._changed.set()
        await until(lambda: not (tmp_path / STATUSES_FILE).exists())
        assert not after


async def test_manager_pod_that_starts_during_shutdown_is_terminated(tmp_path: Path) -> None:
    async with logind_on_bus(tmp_path, delay=60) as (bus, logind), managed(tmp_path, bus) as rig:
        rig.pods.add("web", stop=0.3)
        await logind.until(lambda: logind.held == 1)
        logind.prepare_for_shutdown(True)
        await until(lambda: rig.pods.log)
        rig.pods.add("late", grace=5)
        await logind.until(lambda: logind.held == 0)
        assert "terminate late 5" in rig.pods.log
        assert not rig.pods.active()


async def test_manager_drain_for_stop_needs_no_logind(tmp_path: Path) -> None:
    async with managed(tmp_path, tmp_path / "nothing") as rig:
        rig.pods.add("web")
        rig.pods.add("database", priority=1000)
        assert rig.manager.stop_seconds == 35
        await rig.manager.drain_for_stop()
        assert rig.state.active
        assert [entry for entry in rig.pods.log if entry.startswith("terminate")] == [
            "terminate web 20",
            "terminate database 10",
        ]
        assert rig.times()["endTime"] >= rig.times()["startTime"]


async def test_manager_drain_for_stop_is_not_cancelled_by_logind(tmp_path: Path) -> None:
    with bus_daemon(tmp_path) as bus:
        async with managed(tmp_path, bus) as rig:
            rig.pods.add("web", stop=0.5)
            stopping = asyncio.ensure_future(rig.manager.drain_for_stop())
            await until(lambda: rig.pods.log)
            async with LogindPeer(bus, tmp_path, delay=60) as logind:
                await logind.until(lambda: logind.held == 1)
                await stopping
            assert rig.pods.log == ["terminate web 20", "stopped web"]


async def test_manager_drain_fails_lock_is_released(tmp_path: Path) -> None:
    async with logind_on_bus(tmp_path, delay=60) as (bus, logind), managed(tmp_path, bus) as rig:
        rig.pods.add("web")
        rig.pods.path = None  # makes `terminate` fail
        await logind.until(lambda: logind.held == 1)
        logind.prepare_for_shutdown(True)
        await logind.until(lambda: logind.held == 0)
        assert rig.pods.log == []
