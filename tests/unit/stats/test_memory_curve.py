"""Memory curves: a ring of samples and kills that neither grows nor shows what is too old."""

import asyncio
import sys
from array import array

import pytest

from pykubelet.stats.collector import Collector
from pykubelet.stats.memory_curve import SLOTS, MemoryCurve
from pykubelet.stats.samples import Target
from pykubelet.util.tasks import TaskScope
from tests.unit.stats.test_collector import Cgroups

KIB = 1024


def test_memory_curve_samples_largest_of_slot_in_order() -> None:
    curve = MemoryCurve()
    curve.add(100, 8 * KIB)
    curve.add(100, 9 * KIB)
    curve.add(100, 7 * KIB)
    curve.add(101, 3 * KIB)
    curve.add_kill(101)
    curve.add_kill(101)
    assert curve.read(101) == ([9 * KIB, 3 * KIB], [0, 2])


def test_memory_curve_single_gap_repeats_longer_gap_is_empty() -> None:
    curve = MemoryCurve()
    curve.add(100, 8 * KIB)
    curve.add(102, 9 * KIB)
    curve.add(105, 7 * KIB)
    assert curve.read(106)[0] == [size * KIB for size in (8, 8, 9, 0, 0, 7, 0)]


def test_memory_curve_full_ring_drops_oldest() -> None:
    curve = MemoryCurve()
    curve.add_kill(1000)
    for slot in range(1000, 1000 + 3 * SLOTS):
        curve.add(slot, slot * KIB)
    sizes, kills = curve.read(1000 + 3 * SLOTS - 1)
    assert sizes == [slot * KIB for slot in range(1000 + 2 * SLOTS, 1000 + 3 * SLOTS)]
    assert not any(kills)


@pytest.mark.parametrize("slot", [10, 1000 + SLOTS, 10_000_000])
def test_memory_curve_clock_set_back_or_long_pause_starts_again(slot: int) -> None:
    curve = MemoryCurve()
    curve.add(1000, KIB)
    curve.add_kill(1000)
    assert curve.read(slot) == ([], [])
    curve.add(slot, KIB)
    assert curve.read(slot) == ([KIB], [0])


def test_memory_curve_extreme_sizes_are_bounded() -> None:
    curve = MemoryCurve()
    curve.add(1, 0)
    curve.add(2, 1 << 62)
    for _ in range(1000):
        curve.add_kill(2)
    sizes, kills = curve.read(2)
    assert sizes == [KIB, ((1 << 32) - 1) << 10]
    assert kills == [0, 255]


def test_memory_curve_memory_is_a_few_hundred_bytes() -> None:
    curve = MemoryCurve()
    for slot in range(1000):
        curve.add(slot, 1 << 40)
        curve.add_kill(slot)
    parts = [curve, curve._kib, curve._kills]
    assert isinstance(curve._kib, array)
    assert sum(map(sys.getsizeof, parts)) < 600


def container(name: str, path: str) -> Target:
    return Target(path=path, kind="container", container=name, pod_uid="u", pod="web", namespace="ns")


@pytest.mark.looptime
async def test_collector_memory_curve_survives_container_restart_and_ends_with_pod(tasks: TaskScope) -> None:
    cgroups = Cgroups(**{"p/1": 1, "p/2": 1})
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    pod = Target(path="/p", kind="pod", pod_uid="u")
    collector.set_targets("u", [pod, container("main", "/p/1")])
    task = asyncio.ensure_future(collector.run())
    await asyncio.sleep(95)
    collector.count_oom_in_container("u", "main")
    collector.count_oom_in_container("u", "")
    collector.set_targets("u", [pod])
    await asyncio.sleep(30)
    collector.set_targets("u", [pod, container("main", "/p/2")])
    await asyncio.sleep(30)
    (curve,) = collector.memory_curves("u").containers
    assert (curve.name, curve.limit, sum(curve.kills)) == ("main", None, 1)
    assert curve.kills.index(1) == 9
    assert len(curve.sizes) == 16
    assert all(curve.sizes[:9])
    assert not curve.sizes[11]
    assert curve.sizes[13]
    collector.set_targets("u", [])
    assert collector.memory_curves("u").containers == []
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.looptime
async def test_collector_kill_in_young_container_is_in_its_curve(tasks: TaskScope) -> None:
    cgroups = Cgroups(**{"p/1": 1})
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.count_oom_in_container("u", "main")
    assert list(collector.owners()) == ["u"], "its pod is removed as any other"
    collector.set_targets("u", [container("main", "/p/1")])
    await collector.sample_due()
    (curve,) = collector.memory_curves("u").containers
    assert (len(curve.sizes), curve.kills) == (1, [1])
    collector.count_oom_in_container("brief", "main")
    collector.set_targets("brief", ())
    assert list(collector.owners()) == ["u"]
    assert collector.memory_curves("brief").containers == []
    collector.close()


@pytest.mark.looptime
async def test_collector_find_target_nearest_of_pod(tasks: TaskScope) -> None:
    cgroups = Cgroups()
    collector = Collector(cgroups, tasks, 10.0, cgroups.clock)
    collector.set_targets("", [Target(path="/", kind="root"), Target(path="/kubepods", kind="node")])
    main = container("main", "/kubepods/pu/c1")
    pod = Target(path="/kubepods/pu", kind="pod", pod_uid="u")
    collector.set_targets("u", [pod, main])
    assert collector.find_target("/kubepods/pu/c1") == main
    assert collector.find_target("/kubepods/pu/c1/init.scope/x") == main
    assert collector.find_target("/kubepods/pu/c2") == pod
    assert collector.find_target("/kubepods/other/c1") is None
    assert collector.find_target("/kubepods") is None
    assert collector.find_target("/elsewhere") is None
    assert collector.find_target("") is None
