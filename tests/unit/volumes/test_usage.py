"""When volumes are measured, and what is said about them."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pykubelet.api.pod import Pod
from pykubelet.volumes import usage as usage_module
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.usage import (
    Interrupted,
    VolumeStatCalculator,
    VolumeStats,
    WalkThrottle,
    file_system,
    has_plugin_volumes,
    measure,
    own_volumes,
)
from tests.support.volumes import Shelf, needs_root, pod_with
from tests.unit.volumes.test_usage_count import count, du

PERIOD = 60.0
DISK = {"name": "disk", "emptyDir": {}}
SOME = VolumeStats(capacity=6, available=5, used=4, inodes=3, inodes_free=2, inodes_used=1, moment=0)


def pod(uid: str = "u-1", *volumes: dict[str, Any]) -> Pod:
    return pod_with(*(volumes or (DISK,)), metadata={"uid": uid})


@asynccontextmanager
async def running(usage: VolumeStatCalculator) -> AsyncIterator[None]:
    task = asyncio.ensure_future(usage.run())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


@needs_root
async def test_measure_each_volume_type_equals_du(root: Path, volumes: PodVolumes, shelf: Shelf) -> None:
    shelf.config_maps["c"] = {"a": "x" * 10_000, "b": "y"}
    shelf.secrets["s"] = {"password": b"z" * 5000}
    sources = [{"configMap": {"name": "c"}}, {"secret": {"name": "s"}}]
    labels = {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}
    wanted = pod_with(
        DISK,
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}},
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "hidden", "secret": {"secretName": "s"}},
        {"name": "both", "projected": {"sources": sources}},
        {"name": "about", "downwardAPI": {"items": [labels]}},
        {"name": "host", "hostPath": {"path": "/tmp"}},
    )
    mounted = await volumes.mount(wanted)
    try:
        (Path(mounted["disk"].path) / "file").write_bytes(os.urandom(100_000))
        (Path(mounted["memory"].path) / "file").write_bytes(os.urandom(1 << 20))
        found = measure(root, wanted, WalkThrottle(threading.Event()), lambda: 7.0)
        assert found is not None
        assert found.keys() == {"disk", "memory", "config", "hidden", "both", "about"}
        for name, usage in found.items():
            path = Path(mounted[name].path)
            assert (usage.used, usage.inodes_used) == (du(path).used, du(path).inodes), name
            assert usage.moment == 7.0
            around = file_system(path)
            assert (usage.capacity, usage.inodes) == (around.capacity, around.inodes)
        assert found["memory"].capacity == 4 << 20
        assert found["memory"].available == (4 << 20) - found["memory"].used
        assert found["disk"].capacity == file_system(root).capacity
        # Nothing that was measured is in the way of the pod's end.
    finally:
        await volumes.unmount(wanted.uid)
    assert measure(root, wanted, WalkThrottle(threading.Event())) == {}


async def test_measure_volume_fails_is_omitted(
    root: Path, volumes: PodVolumes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = pod("u-1", DISK, {"name": "other", "emptyDir": {}})
    mounted = await volumes.mount(wanted)
    for name in ("disk", "other"):
        (Path(mounted[name].path) / "file").touch()

    def failing(path: Path, pace: WalkThrottle) -> Any:
        if path.name == "disk":
            raise OSError(5, "Input/output error")
        return count(path)

    monkeypatch.setattr(usage_module, "directory_usage", failing)
    found = measure(root, wanted, WalkThrottle(threading.Event()))
    assert found is not None
    assert found.keys() == {"other"}


def test_own_volumes_excludes_plugin_volumes(root: Path) -> None:
    mixed = pod("u-1", DISK, {"name": "share", "nfs": {"server": "s", "path": "/"}})
    assert list(own_volumes(root, mixed)) == ["disk"]
    assert has_plugin_volumes(mixed)
    assert not has_plugin_volumes(pod("u-1", DISK, {"name": "host", "hostPath": {"path": "/"}}))
    assert own_volumes(root, pod("../u")) == {}


class Measured:
    """Stands in for the measuring, and notes when it was done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moments: dict[str, list[float]] = {}
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(usage_module, "measure", self)
        # The loop's time would pass while a thread works.
        monkeypatch.setattr(usage_module, "in_own_thread", self._at_once)
        self.hung: set[str] = set()
        """Pods whose volumes never answer."""
        self.back = asyncio.Event()

    async def _at_once(self, work: Callable[[], Any], *, name: str, cancel_timeout: float) -> Any:
        found = work()
        if found is None:
            await self.back.wait()
            self.hung.clear()
            found = work()
        return found

    def __call__(
        self, root: Path, pod: Pod, pace: WalkThrottle, clock: object, observe: object
    ) -> dict[str, VolumeStats] | None:
        if pod.uid in self.hung:
            return None
        moments = self.moments.setdefault(pod.uid, [])
        moments.append(self._loop.time())
        return {"disk": replace(SOME, used=len(moments))}


@pytest.mark.looptime
async def test_volume_stat_calculator_measures_each_pod_every_one_to_two_periods(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch)
    chances = iter([0.5, 0.25, *[0.0, 1.0] * 100])
    usage = VolumeStatCalculator(root, lambda: [pod("a"), pod("b")], PERIOD, rng=lambda: next(chances))
    async with running(usage):
        assert usage.for_pod("a") == {}
        await asyncio.sleep(PERIOD * 20)
        assert measured.moments["b"][0] == pytest.approx(15, abs=0.1)
        assert measured.moments["a"][0] == pytest.approx(30, abs=0.1)
        for moments in measured.moments.values():
            pauses = [after - before for before, after in pairwise(moments)]
            assert len(pauses) > 8
            assert all(PERIOD * 0.99 <= pause <= PERIOD * 2.01 for pause in pauses)
        assert usage.for_pod("a")["disk"].used == len(measured.moments["a"])


@pytest.mark.looptime
async def test_volume_stat_calculator_pod_removed_or_without_volumes_not_measured(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch)
    bare, on_host = pod_with(metadata={"uid": "bare"}), pod("host", {"name": "h", "hostPath": {"path": "/"}})
    pods = [bare, on_host]
    looks = 0

    def known() -> list[Pod]:
        nonlocal looks
        looks += 1
        return pods

    usage = VolumeStatCalculator(root, known, PERIOD)
    async with running(usage):
        await asyncio.sleep(PERIOD * 10)
        assert measured.moments == {}
        assert looks <= 12
        pods = [bare, pod("a")]
        await asyncio.sleep(PERIOD * 2.1)
        assert list(usage.for_pod("a")) == ["disk"]
        pods = [bare]
        await asyncio.sleep(PERIOD * 1.1)
        assert usage.for_pod("a") == {}
        often = len(measured.moments["a"])
        await asyncio.sleep(PERIOD * 5)
        assert len(measured.moments["a"]) == often


@pytest.mark.looptime
async def test_volume_stat_calculator_period_zero_is_disabled(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch)
    await VolumeStatCalculator(root, lambda: [pod("a")], 0).run()
    assert measured.moments == {}


@pytest.mark.looptime
async def test_volume_stat_calculator_refresh_measures_requested_pods_now(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Measured(monkeypatch)
    loop = asyncio.get_running_loop()
    usage = VolumeStatCalculator(root, lambda: [pod("a"), pod("b")], PERIOD, rng=lambda: 0.9)
    async with running(usage):
        await asyncio.sleep(1)
        started = loop.time()
        await usage.refresh({"a", "gone"}, 5)
        await usage.refresh({"a"}, 5)
        assert loop.time() - started < 0.1
        assert (usage.for_pod("a")["disk"].used, usage.for_pod("b")) == (2, {})
        await asyncio.sleep(PERIOD)
        assert usage.for_pod("b")["disk"].used == 1
        # It is due again one to two periods after the requested measurement.
        assert usage.for_pod("a")["disk"].used == 2


@pytest.mark.looptime
async def test_volume_stat_calculator_refresh_volume_hangs_wait_is_bounded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, loop = Measured(monkeypatch), asyncio.get_running_loop()
    measured.hung = {"hung"}
    usage = VolumeStatCalculator(root, lambda: [pod("good"), pod("hung"), pod("late")], PERIOD)
    async with running(usage):
        started = loop.time()
        await usage.refresh({"good", "hung", "late"}, 5)
        assert loop.time() - started == pytest.approx(5, abs=0.1)
        assert usage.for_pod("good").keys() == {"disk"}
        assert usage.for_pod("hung") == {}
        # The walk counts as hanging, and the others follow.
        await asyncio.sleep(usage_module.STUCK_SECONDS)
        assert usage.for_pod("late").keys() == {"disk"}
        started = loop.time()
        await usage.refresh({"good", "hung", "late"}, 5)
        assert loop.time() - started < 0.1


@pytest.mark.looptime
async def test_volume_stat_calculator_without_threads_continues_when_they_start_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch)

    async def fail(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError("cannot start a thread")

    usage = VolumeStatCalculator(root, lambda: [pod("a")], PERIOD)
    async with running(usage):
        with monkeypatch.context() as patch:
            patch.setattr(usage_module, "in_own_thread", fail)
            await usage.refresh({"a"}, 5)
            assert measured.moments == {}
        await usage.refresh({"a"}, 5)
        assert usage.for_pod("a").keys() == {"disk"}


async def test_volume_stat_calculator_refresh_disabled_returns(root: Path) -> None:
    await VolumeStatCalculator(root, lambda: [pod("a")], 0).refresh({"a"}, 5)


@pytest.mark.looptime
async def test_volume_stat_calculator_plugin_hangs_other_pods_measured(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch)
    asked: list[str] = []
    back = asyncio.Event()

    async def others(pod: Pod) -> Mapping[str, VolumeStats]:
        asked.append(pod.uid)
        if pod.uid == "hung":
            await back.wait()
        return {"share": SOME}

    share = {"name": "share", "nfs": {"server": "s", "path": "/"}}
    pods = [pod("hung", DISK, share), pod("good", DISK, share), pod("plain")]
    usage = VolumeStatCalculator(root, lambda: pods, PERIOD, plugin_stats=others)
    async with running(usage):
        await asyncio.sleep(PERIOD * 10)
        assert all(len(measured.moments[uid]) >= 4 for uid in ("hung", "good", "plain"))
        assert usage.for_pod("good").keys() == {"disk", "share"}
        assert usage.for_pod("hung").keys() == {"disk"}
        assert (asked.count("hung"), asked.count("plain")) == (1, 0)
        assert asked.count("good") >= 4
        back.set()
        await asyncio.sleep(1)
        assert usage.for_pod("hung").keys() == {"disk", "share"}
        await asyncio.sleep(PERIOD * 3)
        assert asked.count("hung") > 1


@pytest.mark.looptime
async def test_volume_stat_calculator_volume_hangs_other_pods_measured(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has mounted a share inside of its volume, and the server is away."""
    measured = Measured(monkeypatch)
    measured.hung = {"hung"}
    usage = VolumeStatCalculator(root, lambda: [pod("hung"), pod("good")], PERIOD)
    async with running(usage):
        await asyncio.sleep(PERIOD * 10)
        assert len(measured.moments["good"]) >= 4
        assert usage.for_pod("hung") == {}
        measured.back.set()
        await asyncio.sleep(1)
        assert usage.for_pod("hung").keys() == {"disk"}
        await asyncio.sleep(PERIOD * 3)
        assert len(measured.moments["hung"]) > 1


@pytest.mark.looptime
async def test_volume_stat_calculator_slow_walks_run_one_at_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those of many large volumes would all be made at once."""
    inside = most = 0

    async def slowly(
        work: Callable[[], WalkThrottle], *, name: str, cancel_timeout: float
    ) -> dict[str, VolumeStats]:
        nonlocal inside, most
        pace = work()
        inside += 1
        most = max(most, inside)
        for _ in range(10):
            pace.step()
            await asyncio.sleep(usage_module.STUCK_SECONDS * 0.9)
        inside -= 1
        return {"disk": SOME}

    monkeypatch.setattr(usage_module, "measure", lambda root, pod, pace, clock, observe: pace)
    monkeypatch.setattr(usage_module, "in_own_thread", slowly)
    usage = VolumeStatCalculator(root, lambda: [pod("a"), pod("b")], PERIOD)
    async with running(usage):
        await asyncio.sleep(PERIOD * 10)
        assert usage.for_pod("a")
        assert usage.for_pod("b")
    assert most == 1


async def test_volume_stat_calculator_cancelled_interrupts_walk(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(root: Path, pod: Pod, pace: WalkThrottle, clock: object, observe: object) -> None:
        begun.set()
        try:
            while True:
                pace.step()
        except Interrupted:
            ended.set()

    monkeypatch.setattr(usage_module, "measure", endless)
    usage = VolumeStatCalculator(root, lambda: [pod("a")], 0.01)
    async with running(usage):
        assert await asyncio.to_thread(begun.wait, 30)
    assert await asyncio.to_thread(ended.wait, 30)


async def test_volume_stat_calculator_volumes_evaluated_once_per_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that a pod that is due costs little however many pods there are."""
    unmeasured, evaluated = usage_module.UNMEASURED_TYPES, list[object]()

    class Counted:
        def issuperset(self, kinds: tuple[str, ...]) -> bool:
            evaluated.append(kinds)
            return unmeasured.issuperset(kinds)

    monkeypatch.setattr(usage_module, "UNMEASURED_TYPES", Counted())
    pods = [pod(str(number)) for number in range(10)] + [
        pod("not", {"name": "m", "hostPath": {"path": "/m"}})
    ]
    usage = VolumeStatCalculator(tmp_path, lambda: pods, PERIOD)
    for _ in range(5):
        assert usage._pods_to_measure(0.0).keys() == {str(number) for number in range(10)}
    assert len(evaluated) == 11
    pods[-1] = pod("not", DISK)
    assert "not" in usage._pods_to_measure(0.0)
    del pods[1:]
    assert usage._pods_to_measure(0.0).keys() == {"0"}
    assert len(evaluated) == 12
    assert usage._measurable.keys() == {"0"}


def test_measure_reports_duration_and_source_of_each_volume(root: Path) -> None:
    wanted = pod("a")
    for path in own_volumes(root, wanted).values():
        path.mkdir(parents=True)
    observed: list[tuple[str, float]] = []
    found = measure(
        root,
        wanted,
        WalkThrottle(threading.Event()),
        observe_duration=lambda source, seconds: observed.append((source, seconds)),
    )
    assert found
    assert [source for source, _ in observed] == ["du"] * len(found)
    assert all(seconds >= 0 for _, seconds in observed)
