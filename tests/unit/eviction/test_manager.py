"""The eviction manager with a scripted node."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.agent.eviction import eviction_settings
from pykubelet.api.pod import Pod
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.eviction import manager as module
from pykubelet.eviction.custom_ranking import CustomRanking
from pykubelet.eviction.manager import EvictionManager, SplitDiskError
from pykubelet.eviction.observations import NodeMeasurements
from pykubelet.eviction.signals import Disks
from pykubelet.podconfig.static_pods import is_critical_pod
from tests.support.eviction import ScriptedNode, disk, names, pod, threshold, usage

HARD = threshold("memory.available", "1Gi")
NODEFS = threshold("nodefs.available", "10Gi", reclaim="5Gi")
IMAGEFS = threshold("imagefs.available", "15Gi")


def node_with_pods(**facts: Any) -> ScriptedNode:
    """A node with a hog above its request, a Guaranteed pod within, and a critical hog."""
    return ScriptedNode(
        pods=[
            pod("critical", priority=2_000_000_000),
            pod("within", requests={"memory": "1Gi"}, terminationGracePeriodSeconds=30),
            pod("hog", requests={"memory": "100Mi"}, terminationGracePeriodSeconds=30),
        ],
        usages={
            "critical": usage("3Gi", processes=900, rootfs="60Gi"),
            "within": usage("500Mi", processes=5, rootfs="1Gi"),
            "hog": usage("700Mi", processes=50, rootfs="20Gi"),
        },
        **facts,
    )


async def test_synchronize_enough_memory_does_nothing() -> None:
    node = node_with_pods(memory="2Gi")
    assert await node.manager(HARD).synchronize() == ()
    assert (node.killed, node.node_events, node.measured, node.conditions.current) == ([], [], [], ())


async def test_synchronize_hard_memory_evicts_one_pod_with_status_and_events() -> None:
    node = node_with_pods(memory="900Mi")
    assert names(await node.manager(HARD).synchronize()) == ["hog"]
    message = (
        "The node was low on resource: memory. Threshold quantity: 1Gi, available: 900Mi. "
        "Container main was using 700Mi, request is 100Mi, has larger consumption of memory. "
    )
    assert node.killed == [("hog", 1)]
    assert node.node_events == [("EvictionThresholdMet", "Attempting to reclaim memory")]
    ((name, reason, text, annotations),) = node.pod_events
    assert (name, reason, text, annotations["starved_resource"]) == ("hog", "Evicted", message, "memory")
    status = node.statuses["hog"]
    assert (status.phase, status.reason, status.message) == ("Failed", "Evicted", message)
    assert [condition.type for condition in status.conditions] == ["DisruptionTarget"]
    assert node.conditions.current == ("MemoryPressure",)
    assert (node.count("memory.available"), node.reclaimed) == (1, [])


@pytest.mark.parametrize(("longest", "grace"), [(0, 0), (10, 10), (60, 30)])
async def test_synchronize_soft_threshold_grace_is_bounded(longest: int, grace: int) -> None:
    node = node_with_pods(memory="900Mi")
    manager = node.manager(threshold("memory.available", "1Gi", grace=0.001), max_pod_grace_period=longest)
    await manager.synchronize()
    assert node.killed == []
    async with asyncio.timeout(10):
        while not node.killed:
            await asyncio.sleep(0.005)
            await manager.synchronize()
    assert node.killed == [("hog", grace)]


async def test_synchronize_only_critical_pods_evicts_none() -> None:
    node = node_with_pods(memory="900Mi")
    node.pods = node.pods[:1]
    assert await node.manager(HARD).synchronize() == ()
    assert (node.killed, node.pod_events, node.conditions.current) == ([], [], ("MemoryPressure",))


async def test_synchronize_pid_pressure_evicts_most_processes() -> None:
    node = node_with_pods(tasks=950)
    assert names(await node.manager(threshold("pid.available", "100")).synchronize()) == ["hog"]
    assert node.conditions.current == ("PIDPressure",)
    assert node.statuses["hog"].message.startswith("The node was low on resource: pids. ")


@given(
    st.lists(st.tuples(st.integers(1, 900), st.sampled_from([0, 5, 2_000_000_000])), max_size=6),
    st.integers(0, 1500),
    st.integers(0, 500),
)
def test_run_any_pods_evicts_no_more_than_needed(
    pods: list[tuple[int, int]], free: int, reclaim: int
) -> None:
    """Verify that each eviction was needed, and that only critical pods remain while the node is short."""
    node = ScriptedNode(memory=f"{free}Mi")
    for index, (used, priority) in enumerate(pods):
        node.pods.append(pod(f"p{index}", priority=priority))
        node.usages[f"p{index}"] = usage(f"{used}Mi")
    sizes = {f"p{index}": used for index, (used, _) in enumerate(pods)}
    available = free
    needed = [available < 1024]

    def killed(victim: Pod) -> None:
        nonlocal available
        available += sizes[victim.uid]
        node.memory = f"{available}Mi"
        needed.append(available < 1024 + reclaim)

    node.on_kill = killed

    async def rounds() -> None:
        own = threshold("memory.available", "1Gi", reclaim=f"{reclaim}Mi" if reclaim else "")
        manager = node.manager(own)
        while await manager.synchronize():
            pass

    asyncio.run(rounds())
    assert all(needed[: len(node.killed)])
    left = [found for found in node.pods if not is_critical_pod(found)]
    assert not left or not needed[-1]
    assert all(not is_critical_pod(found) for found in node.pods if found.uid in dict(node.killed))


# Disk


async def test_synchronize_disk_reclaim_suffices_evicts_none() -> None:
    node = node_with_pods(nodefs="5Gi")

    def free(what: str) -> None:
        node.nodefs = "16Gi" if what == "images" else "8Gi"

    node.on_reclaim = free
    assert await node.manager(NODEFS).synchronize() == ()
    assert (node.reclaimed, node.killed) == (["containers", "images"], [])
    assert node.node_events == [("EvictionThresholdMet", "Attempting to reclaim ephemeral-storage")]
    assert node.conditions.current == ("DiskPressure",)


async def test_synchronize_disk_minimum_reclaim_missing_evicts() -> None:
    node = node_with_pods(nodefs="5Gi")
    node.on_reclaim = lambda what: setattr(node, "nodefs", "14Gi")
    assert names(await node.manager(NODEFS).synchronize()) == ["hog"]
    assert node.reclaimed == ["containers", "images"]
    assert "available: 14Gi. " in node.statuses["hog"].message


async def test_synchronize_layer_deleted_late_evicts_no_other() -> None:
    """Verify that the files of the last victim are waited for: runtimes delete them in the background."""
    node = node_with_pods(nodefs="5Gi")
    loop = asyncio.get_running_loop()

    def killed(victim: Pod) -> None:
        loop.call_later(0.6, setattr, node, "nodefs", "25Gi")

    node.on_kill = killed
    manager = node.manager(NODEFS)
    assert names(await manager.synchronize()) == ["hog"]
    assert await manager.synchronize() == ()
    assert node.killed == [("hog", 1)]


@pytest.mark.parametrize("released", ["5Gi", "9Gi"], ids=["not-deleted", "not-enough"])
async def test_synchronize_victim_released_too_little_evicts_next(
    released: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RELEASE_TIMEOUT_SECONDS", 0.5 if released == "5Gi" else 60.0)
    node = node_with_pods(nodefs="5Gi")
    node.usages["hog"] = usage(rootfs="4Gi")
    node.on_kill = lambda victim: setattr(node, "nodefs", released)
    manager = node.manager(NODEFS)
    assert names(await manager.synchronize()) == ["hog"]
    async with asyncio.timeout(10):
        assert names(await manager.synchronize()) == ["within"]


async def test_synchronize_disk_filled_since_last_measurement_evicts_its_writer() -> None:
    scratch = {"name": "scratch", "emptyDir": {}}
    node = ScriptedNode(
        nodefs="5Gi",
        pods=[pod("writer", volumes=[scratch]), pod("other", volumes=[scratch])],
        usages={"writer": usage("1Mi"), "other": usage("1Mi", volumes={"scratch": ("1Gi", 1)})},
        usages_now={"writer": usage("1Mi", volumes={"scratch": ("40Gi", 1)})},
    )
    assert names(await node.manager(NODEFS).synchronize()) == ["writer"]


async def test_synchronize_memory_short_volumes_not_measured() -> None:
    node = node_with_pods(memory="900Mi", usages_now={"within": usage("4Gi")})
    assert names(await node.manager(HARD).synchronize()) == ["hog"]


async def test_synchronize_nodefs_with_dedicated_imagefs_reclaims_containers_first() -> None:
    """Verify that dead containers are removed where upstream evicts at once (kubernetes #129616)."""
    node = node_with_pods(nodefs="5Gi", imagefs="80Gi")
    node.on_reclaim = lambda what: setattr(node, "nodefs", "20Gi")
    assert await node.manager(NODEFS, IMAGEFS).synchronize() == ()
    assert (node.reclaimed, node.killed) == (["containers"], [])


async def test_synchronize_second_disk_short_reclaims_it_before_eviction() -> None:
    node = node_with_pods(nodefs="5Gi", imagefs="5Gi")

    def free(what: str) -> None:
        node.nodefs = "20Gi"
        if what == "images":
            node.imagefs = "50Gi"

    node.on_reclaim = free
    assert await node.manager(NODEFS, IMAGEFS).synchronize() == ()
    assert (node.reclaimed, node.killed) == (["containers", "images"], [])


@pytest.mark.parametrize("gate", [True, False])
async def test_synchronize_split_disks_only_with_gate(gate: bool) -> None:
    gates = FeatureGates().with_overrides({"KubeletSeparateDiskGC": gate})
    node = node_with_pods(memory="900Mi")
    manager = node.manager(HARD)
    manager.set_settings(
        replace(
            manager._settings, separate_disks=eviction_settings(KubeletConfiguration(), gates).separate_disks
        )
    )
    manager._disks = Disks(dedicated_imagefs=True, split=True)
    measure = manager._measurements.node

    async def without_disks() -> NodeMeasurements:
        return replace(await measure(), imagefs=None)

    manager._measurements.node = without_disks  # type: ignore[method-assign]
    if gate:
        await manager.synchronize()
        assert [name for name, _ in node.killed] == ["hog"]
        return
    with pytest.raises(SplitDiskError, match="KubeletSeparateDiskGC is turned off"):
        await manager.synchronize()
    assert node.killed == []
    await manager.report()


async def test_synchronize_split_disks_without_gate_sets_conditions_and_enforces_limits() -> None:
    """Verify that what does not depend on the disks still works, as upstream."""
    limited = pod("limited", limits={"ephemeral-storage": "1Gi"})
    node = node_with_pods(memory="900Mi")
    node.pods.append(limited)
    node.usages["limited"] = usage(ephemeral="2Gi")
    manager = node.manager(HARD, local_storage=True, separate_disks=False)
    measure = manager._measurements.node

    async def split() -> NodeMeasurements:
        return replace(await measure(), containerfs=disk("50Gi", minor=32))

    manager._measurements.node = split  # type: ignore[method-assign]
    assert names(await manager.synchronize()) == ["limited"]
    assert node.conditions.current == ("MemoryPressure",)
    with pytest.raises(SplitDiskError):
        await manager.synchronize()
    assert node.killed == [("limited", 1)]


async def test_synchronize_reclaim_fails_evicts() -> None:
    node = node_with_pods(nodefs="5Gi")

    def fail(what: str) -> None:
        raise ConnectionError("the runtime is down")

    node.on_reclaim = fail
    assert names(await node.manager(NODEFS).synchronize()) == ["hog"]
    assert node.reclaimed == ["containers", "images"]


@pytest.mark.looptime
async def test_synchronize_reclaim_hangs_is_bounded() -> None:
    node = node_with_pods(nodefs="5Gi")
    manager = node.manager(NODEFS)

    async def hang() -> None:
        await asyncio.Event().wait()

    manager._reclaim = module.NodeReclaim(hang, hang)
    assert names(await manager.synchronize()) == ["hog"]


async def test_synchronize_runtime_down_disks_unknown_only_memory_acts() -> None:
    node = node_with_pods(nodefs="1Gi", runtime_is_up=False)
    manager = node.manager(NODEFS, HARD)
    assert await manager.synchronize() == ()
    assert (node.conditions.current, node.reclaimed) == ((), [])
    node.memory = "900Mi"
    assert names(await manager.synchronize()) == ["hog"]
    # The disks are known once the runtime was up, also when it is down again.
    node.memory, node.runtime_is_up = "3Gi", True
    assert names(await manager.synchronize()) == ["within"]


async def test_synchronize_unmeasured_signal_evicts_none() -> None:
    node = node_with_pods(memory=None)
    assert await node.manager(HARD).synchronize() == ()
    assert (node.killed, node.conditions.current) == ([], ())


# Local storage


async def test_synchronize_pods_above_their_limits_are_all_evicted() -> None:
    limits = {"ephemeral-storage": "1Gi"}
    node = ScriptedNode(
        pods=[pod("ok", limits=limits), pod("one", limits=limits), pod("two", limits=limits), pod("free")],
        usages={
            "ok": usage(ephemeral="1Gi"),
            "one": usage(ephemeral="2Gi"),
            "two": usage(ephemeral="2Gi"),
            "free": usage(ephemeral="90Gi"),
        },
        memory="900Mi",
    )
    # The limits come first: the node may not be short any more afterwards.
    assert names(await node.manager(HARD, local_storage=True).synchronize()) == ["one", "two"]
    assert (node.killed, node.node_events) == ([("one", 1), ("two", 1)], [])
    assert (node.statuses["one"].conditions, node.count("ephemeralpodfs.limit")) == ([], 2)
    assert node.measured == [False]


async def test_synchronize_critical_pod_above_limit_stays() -> None:
    critical = pod("critical", priority=2_000_000_000, limits={"ephemeral-storage": "1Gi"})
    node = ScriptedNode(pods=[critical], usages={"critical": usage(ephemeral="2Gi")})
    assert await node.manager(local_storage=True).synchronize() == ()
    assert (node.killed, node.pod_events) == ([], [])


async def test_synchronize_no_pod_with_limits_measures_no_pod() -> None:
    node = node_with_pods()
    await node.manager(HARD, local_storage=True).synchronize()
    assert node.measured == []


# The loop


@asynccontextmanager
async def running(manager: EvictionManager) -> AsyncIterator[None]:
    task = asyncio.create_task(manager.run())
    try:
        yield
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.looptime
async def test_run_pressure_resolved_by_first_pod_evicts_no_other() -> None:
    node = node_with_pods(memory="900Mi")
    node.on_kill = lambda victim: setattr(node, "memory", "3Gi")
    async with running(node.manager(HARD)):
        await asyncio.sleep(100)
    assert node.killed == [("hog", 1)]


@pytest.mark.looptime
async def test_run_pressure_remains_evicts_in_order_without_critical() -> None:
    node = node_with_pods(memory="900Mi")
    async with running(node.manager(HARD)):
        await asyncio.sleep(100)
    assert node.killed == [("hog", 1), ("within", 1)]


@pytest.mark.looptime
async def test_run_condition_ends_after_transition_period() -> None:
    node = node_with_pods(memory="900Mi")
    node.on_kill = lambda victim: setattr(node, "memory", "3Gi")
    async with running(node.manager(HARD)):
        await asyncio.sleep(290)
        assert node.conditions.has("MemoryPressure")
        await asyncio.sleep(30)
        assert not node.conditions.current


@pytest.mark.looptime
async def test_run_pod_that_cannot_be_killed_does_not_block_others() -> None:
    node = node_with_pods(memory="900Mi", unkillable={"hog"})
    async with running(node.manager(HARD)):
        await asyncio.sleep(39)
        # Ten seconds for the kill and thirty for the cleanup.
        assert node.killed == [("hog", 1)]
        await asyncio.sleep(100)
    assert node.killed == [("hog", 1), ("within", 1)]
    assert node.statuses["hog"].reason == "Evicted"


SOFT = threshold("memory.available", "2Gi", grace=1)


def slow_node(**facts: Any) -> ScriptedNode:
    """A node whose hog uses all of a grace period of ten minutes."""
    node = node_with_pods(**facts, slow={"hog"})
    node.pods[2] = pod("hog", requests={"memory": "100Mi"}, terminationGracePeriodSeconds=600)
    return node


@pytest.mark.looptime
async def test_run_hard_threshold_during_soft_eviction_shortens_grace() -> None:
    node = slow_node(memory="1500Mi")
    async with running(node.manager(HARD, SOFT, max_pod_grace_period=600)):
        await asyncio.sleep(15)
        assert node.killed == [("hog", 600)]
        await asyncio.sleep(20)
        assert (node.killed, names(node.pods)) == ([("hog", 600)], ["critical", "within", "hog"])
        node.memory = "900Mi"
        node.on_kill = lambda victim: setattr(node, "memory", "3Gi")
        await asyncio.sleep(11.5)
        assert (node.killed, names(node.pods)) == ([("hog", 600), ("hog", 1)], ["critical", "within"])
        await asyncio.sleep(700)
    assert node.killed == [("hog", 600), ("hog", 1)]
    assert (len(node.pod_events), node.count("memory.available")) == (1, 1)
    assert node.statuses["hog"].message.startswith("The node was low on resource: memory. ")


@pytest.mark.looptime
async def test_run_soft_eviction_shortened_in_vain_continues_with_next_pod() -> None:
    node = slow_node(memory="1500Mi", unkillable={"hog"})
    node.kill_seconds = 900
    async with running(node.manager(HARD, SOFT, max_pod_grace_period=600)):
        await asyncio.sleep(15)
        node.memory, node.kill_seconds = "900Mi", 10
        await asyncio.sleep(60)
        assert node.killed == [("hog", 600), ("hog", 1), ("within", 1)]


@pytest.mark.looptime
async def test_run_soft_eviction_conditions_and_notifications_are_handled() -> None:
    node, made = slow_node(memory="1500Mi"), list[Notifier]()

    def make(notify: Any) -> Any:
        made.append(Notifier(notify))
        return made[-1]

    soft_disk = threshold("nodefs.available", "10Gi", grace=3000)
    manager = node.manager(HARD, SOFT, soft_disk, max_pod_grace_period=600, make_notifier=make)
    async with running(manager):
        await asyncio.sleep(15)
        node.nodefs = "5Gi"
        await asyncio.sleep(10.5)
        assert node.conditions.current == ("MemoryPressure", "DiskPressure")
        assert node.killed == [("hog", 600)]
        node.memory = "900Mi"
        node.on_kill = lambda victim: setattr(node, "memory", "3Gi")
        made[0].notify()
        await asyncio.sleep(1.5)
        assert node.killed == [("hog", 600), ("hog", 1)]


@pytest.mark.looptime
async def test_run_notification_before_soft_eviction_waits_is_handled() -> None:
    """Verify that a notification between the measurement of a round and its eviction is not lost."""
    node, made = slow_node(memory="1500Mi"), list[Notifier]()

    def make(notify: Any) -> Any:
        made.append(Notifier(notify))
        return made[-1]

    manager = node.manager(HARD, SOFT, max_pod_grace_period=600, make_notifier=make)
    measure = manager._measurements.pods

    async def slow_measure(*args: Any, **options: Any) -> Any:
        node.memory = "900Mi"
        node.on_kill = lambda victim: setattr(node, "memory", "3Gi")
        made[0].notify()
        return await measure(*args, **options)

    manager._measurements.pods = slow_measure  # type: ignore[method-assign]
    async with running(manager):
        await asyncio.sleep(12)
        assert node.killed == [("hog", 600), ("hog", 1)]


@pytest.mark.looptime
async def test_run_hard_memory_during_reclaim_evicts_and_reclaims_later() -> None:
    node = node_with_pods(nodefs="5Gi", reclaim_seconds=250.0)
    node.on_reclaim = lambda what: setattr(node, "nodefs", "20Gi")
    async with running(node.manager(HARD, NODEFS)):
        await asyncio.sleep(20)
        assert (node.reclaimed, node.killed) == (["containers"], [])
        node.memory = "900Mi"
        node.on_kill = lambda victim: setattr(node, "memory", "3Gi")
        await asyncio.sleep(12)
        assert node.killed == [("hog", 1)]
        await asyncio.sleep(600)
    assert node.reclaimed == ["containers", "containers", "images"]
    assert node.killed == [("hog", 1)]


@pytest.mark.looptime
async def test_run_unexpected_error_next_round_follows() -> None:
    node = node_with_pods(memory="900Mi")
    manager = node.manager(HARD)
    calls = 0
    measure = manager._measurements.node

    async def broken_once() -> NodeMeasurements:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("a bug")
        return await measure()

    manager._measurements.node = broken_once  # type: ignore[method-assign]
    async with running(manager):
        await asyncio.sleep(15)
    assert node.killed == [("hog", 1), ("within", 1)]


class Notifier:
    """A notification of the kernel that the test causes."""

    def __init__(self, notify: Any) -> None:
        self.notify = notify
        self.updates = 0
        self.closed = False

    def update(self, thresholds: Any, node: Any) -> None:
        self.updates += 1

    def close(self) -> None:
        self.closed = True


@pytest.mark.looptime
async def test_run_notification_starts_round_early() -> None:
    node, made = node_with_pods(), list[Notifier]()

    def make(notify: Any) -> Any:
        made.append(Notifier(notify))
        return made[-1]

    async with running(node.manager(HARD, make_notifier=make)):
        await asyncio.sleep(4)
        node.memory = "900Mi"
        node.on_kill = lambda victim: setattr(node, "memory", "3Gi")
        made[0].notify()
        await asyncio.sleep(0.5)
        assert node.killed == [("hog", 1)]
        # A storm of notifications is limited to a round per second.
        before = made[0].updates
        for _ in range(50):
            made[0].notify()
            await asyncio.sleep(0.1)
        assert made[0].updates - before <= 6
    assert made[0].closed


async def test_synchronize_custom_ranking_chooses_victim() -> None:
    node = node_with_pods(memory="900Mi")
    ranking = CustomRanking(lambda signal, candidates: ["critical", "within"], "mine")
    assert names(await node.manager(HARD, ranking=ranking).synchronize()) == ["within"]


async def test_report_slow_custom_ranking_delays_no_round_and_is_reported() -> None:
    """Verify that a report with many signals responds in time while rounds choose by the custom order."""
    release, callers = threading.Event(), list[str]()

    def slow_for_reports(signal: str, candidates: object) -> list[str]:
        callers.append(threading.current_thread().name)
        if callers[-1] == callers[0]:
            release.wait(30)
        return ["within"]

    node = node_with_pods(memory="900Mi")
    ranking = CustomRanking(slow_for_reports, "mine", 2.0)
    manager = node.manager(HARD, NODEFS, IMAGEFS, ranking=ranking)
    clock = asyncio.get_running_loop().time
    started = clock()
    report = asyncio.create_task(manager.report())
    while not callers:
        await asyncio.sleep(0.01)
    assert names(await manager.synchronize()) == ["within"]
    assert ranking._preview_lock.locked(), "the report still waits"
    signals = (await report).signals
    assert clock() - started < 10
    assert len(signals) >= 3
    assert all('"mine" is slow' in found.ranking_problem for found in signals)
    assert [found.first_victim.name for found in signals if found.first_victim is not None]
    release.set()


async def test_report_signals_distances_and_first_victims() -> None:
    node = node_with_pods(nodefs="12Gi")
    report = await node.manager(HARD, NODEFS, threshold("imagefs.inodesFree", "5%")).report()
    by_signal = {found.signal: found for found in report.signals}
    memory = by_signal["memory.available"]
    assert (memory.thresholds[0].distance, memory.thresholds[0].is_met) == (1 << 30, False)
    assert memory.first_victim is not None
    assert (memory.first_victim.name, memory.first_victim.reason) == (
        "hog",
        "uses 700Mi of memory, more than its request of 100Mi, priority 0",
    )
    nodefs = by_signal["nodefs.available"].thresholds[0]
    assert (nodefs.distance, nodefs.min_reclaim) == (2 << 30, 5 << 30)
    assert by_signal["containerfs.available"].thresholds == [nodefs]
    assert (node.killed, node.node_events) == ([], [])


@pytest.mark.looptime
async def test_report_stuck_pod_not_first_victim() -> None:
    node = node_with_pods(memory="900Mi", unkillable={"hog", "within"})
    manager = node.manager(HARD)
    async with running(manager):
        await asyncio.sleep(45)
        assert node.killed == [("hog", 1), ("within", 1)]
        (memory,) = (await manager.report()).signals
        assert memory.first_victim is not None
        assert memory.first_victim.name == "within"


async def test_report_disk_measures_volumes() -> None:
    node = node_with_pods(nodefs="12Gi")
    node.usages_now["within"] = usage("500Mi", rootfs="90Gi")
    node.pods[1] = pod("within", terminationGracePeriodSeconds=30)
    manager = node.manager(HARD, NODEFS)

    async def victim(*, measure_volumes: bool) -> str:
        report = await manager.report(measure_volumes=measure_volumes)
        found = next(one for one in report.signals if one.signal == "nodefs.available").first_victim
        assert found is not None
        return found.name

    assert await victim(measure_volumes=False) == "hog"
    assert await victim(measure_volumes=True) == "within"


async def test_report_memory_alone_does_not_measure_volumes() -> None:
    node = node_with_pods()
    node.usages_now["within"] = usage("3Gi")
    (memory,) = (await node.manager(HARD).report()).signals
    assert memory.first_victim is not None
    assert memory.first_victim.name == "hog"


@pytest.mark.looptime
async def test_set_settings_no_thresholds_left_condition_ends_after_transition_period() -> None:
    node = node_with_pods(memory="900Mi")
    manager = node.manager(HARD)
    await manager.synchronize()
    assert node.conditions.current == ("MemoryPressure",)
    manager.set_settings(replace(manager._settings, thresholds=()))
    await manager.synchronize()
    assert node.conditions.current == ("MemoryPressure",)
    await asyncio.sleep(301)
    assert await manager.synchronize() == ()
    assert not node.conditions.current
