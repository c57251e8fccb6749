"""Pods that cannot be judged at once: for whom they wait, and who waits behind them."""

import asyncio

import msgspec
import pytest

from pykubelet.admission.handler import AdmitRejection, AdmitResult, DeferredResult, PodAdmitAttributes
from pykubelet.api.node import Node
from pykubelet.apiserver.errors import NotFound
from pykubelet.podconfig.mux import PodChange
from tests.support.admission import asking, node, pod
from tests.support.pods import NOW
from tests.unit.podworkers.desk import here, settle

SYSTEM = 2_000_000_000


@pytest.mark.looptime
async def test_pod_admission_critical_pod_waits_for_preempted_pods() -> None:
    async with here() as node:
        victim = asking("victim", cpu="2")
        assert node.come(victim)
        await settle()
        critical = asking("critical", cpu="1", priority=SYSTEM)
        assert not node.come(critical)
        await settle()
        assert node.phase("victim") == ("Failed", "Preempting")
        text = "Preempted in order to admit critical pod"
        assert node.events("victim") == [("Warning", "Preempting", text)]
        # Whoever comes now does not take the place.
        assert not node.come(asking("late", cpu="1500m"))
        assert not node.come(critical, "UPDATE")
        await asyncio.sleep(5)
        assert node.life.started == ["victim"]
        node.life.may_end.set()
        await asyncio.sleep(1)
        assert node.life.started == ["victim", "critical"]
        assert node.phase("critical") is None
        assert node.phase("late") == ("Failed", "OutOfcpu")
        assert node.counted("kubelet_preemptions", preemption_signal="cpu") == 1


@pytest.mark.looptime
async def test_pod_admission_critical_pod_does_not_wait_for_volume_cleanup() -> None:
    async with here() as desk:
        desk.life.is_tidy.clear()  # a volume, say, that cannot be unmounted
        desk.life.may_end.set()
        assert desk.come(asking("victim", cpu="2"))
        await settle()
        desk.come(asking("critical", cpu="1", priority=SYSTEM))
        await asyncio.sleep(1)
        assert desk.life.started == ["victim", "critical"]
        assert [reason for _, reason, _ in desk.events("victim")] == ["Preempting"]
        assert desk.counted("kubelet_preemptions", preemption_signal="cpu") == 1


@pytest.mark.looptime
async def test_pod_admission_running_pod_not_yet_synced_is_preempted() -> None:
    async with here() as desk:
        victim = asking("victim", cpu="2")
        desk.run_since_before(victim)
        assert not desk.come(asking("critical", cpu="1", priority=SYSTEM))
        await settle()
        assert desk.phase("victim") == ("Failed", "Preempting")
        # Now its source's news comes; it is on its way out, and stays so.
        assert not desk.come(victim)
        assert desk.life.started == []
        del desk.in_runtime["victim"]
        desk.life.may_end.set()
        await asyncio.sleep(1)
        assert (desk.life.ended, desk.life.started) == (["victim"], ["critical"])
        assert not desk.come(victim, "UPDATE")
        assert desk.counted("kubelet_preemptions", preemption_signal="cpu") == 1


@pytest.mark.looptime
async def test_pod_admission_preempted_pod_never_ends_wait_times_out() -> None:
    async with here() as node:
        node.come(
            pod(
                "victim",
                containers=[{"name": "main", "resources": {"requests": {"cpu": "2"}}}],
                terminationGracePeriodSeconds=20,
            )
        )
        await settle()
        node.come(asking("critical", cpu="1", priority=SYSTEM))
        await asyncio.sleep(29)
        assert node.life.started == ["victim"]
        await asyncio.sleep(2)
        assert node.life.started == ["victim", "critical"]
        assert [reason for _, reason, _ in node.events("victim")] == ["Preempting", "ExceededGracePeriod"]
        assert node.counted("kubelet_preemptions", preemption_signal="cpu") == 0
        node.life.may_end.set()


@pytest.mark.looptime
@pytest.mark.parametrize("how", ["removed", "deleted"])
async def test_pod_admission_pod_deleted_while_waiting_not_started(how: str) -> None:
    async with here() as node:
        node.come(asking("victim", cpu="2"))
        await settle()
        critical = asking("critical", cpu="1", priority=SYSTEM)
        node.come(critical)
        await settle()
        if how == "removed":
            node.store.apply(PodChange("REMOVE", critical, "api"))
        else:
            meta = msgspec.structs.replace(critical.metadata, deletion_timestamp=NOW)
            node.store.apply(PodChange("DELETE", msgspec.structs.replace(critical, metadata=meta), "api"))
        node.life.may_end.set()
        await asyncio.sleep(1)
        assert node.life.started == ["victim"]
        assert node.come(asking("next", cpu="2"))


class Slow:
    """Gives devices, which takes a second, to those who ask for dongles; refuses the pod `greedy`."""

    for_running = True

    def __init__(self, *, apart: bool = False) -> None:
        self.apart = apart
        self.given: list[str] = []
        self.released: list[str] = []

    def admit(self, attempt: PodAdmitAttributes) -> AdmitResult | DeferredResult:
        one = attempt.pod
        if not any("dongle" in name for name in one.spec.containers[0].resources.requests):
            return None
        return DeferredResult(lambda: self._give(one.uid), apart=self.apart)

    async def _give(self, uid: str) -> AdmitResult:
        await asyncio.sleep(1)
        self.given.append(uid)
        return AdmitRejection("UnexpectedAdmissionError", "no dongle left") if uid == "greedy" else None


@pytest.mark.looptime
async def test_pod_admission_waits_for_devices_and_later_pods_queue() -> None:
    slow = Slow()
    async with here(allocation=slow, released=slow.released.append, own=node(pods="9")) as desk:
        assert desk.come(pod("before"))
        assert not desk.come(asking("first", dongle="1"))
        assert not desk.come(asking("greedy", dongle="9"))
        assert not desk.come(pod("behind"))
        # What runs does not wait for anybody.
        old = pod("old")
        desk.run_since_before(old)
        assert desk.come(old)
        await settle()
        assert desk.life.started == ["before", "old"]
        await asyncio.sleep(1.5)
        assert desk.life.started == ["before", "old", "first"]
        await asyncio.sleep(1)
        assert desk.life.started == ["before", "old", "first", "behind"]
        assert slow.given == ["first", "greedy"]
        assert desk.phase("greedy") == ("Failed", "UnexpectedAdmissionError")
        assert slow.released == ["greedy"]
        # And then everything is as before.
        assert desk.come(pod("after"))


@pytest.mark.looptime
async def test_pod_admission_pod_waiting_apart_others_admitted_resources_reserved() -> None:
    slow = Slow(apart=True)
    small = node(pods="9", cpu="3", dongle="9")
    async with here(allocation=slow, released=slow.released.append, own=small) as desk:
        first = asking("first", cpu="2", dongle="1")
        assert not desk.come(first)
        assert not desk.come(asking("greedy", dongle="9"))
        assert desk.come(pod("beside"))
        # The room of who waits is taken, and a newer version of it is no second pod.
        assert not desk.come(first, "UPDATE")
        assert not desk.come(asking("big", cpu="2"))
        assert desk.phase("big") == ("Failed", "OutOfcpu")
        await asyncio.sleep(1.5)
        assert desk.life.started == ["beside", "first"]
        assert slow.given == ["first", "greedy"]
        assert desk.phase("greedy") == ("Failed", "UnexpectedAdmissionError")
        assert slow.released == ["big", "greedy"]


class Booting:
    """Gives dongles once their plugin has registered; until then pods wait for it, at most five minutes."""

    for_running = True

    def __init__(self) -> None:
        self.registered = asyncio.Event()
        self.late = False

    def admit(self, attempt: PodAdmitAttributes) -> AdmitResult | DeferredResult:
        if not any("dongle" in name for name in attempt.pod.spec.containers[0].resources.requests):
            return None
        if self.registered.is_set():
            return None
        if self.late:
            return AdmitRejection("UnexpectedAdmissionError", "no dongle present")
        return DeferredResult(self._wait, apart=True, again=True, why="waiting for the plugin")

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(300):
                await self.registered.wait()
        except TimeoutError:
            self.late = True


@pytest.mark.looptime
async def test_admitting_plugin_not_registered_pod_waits_and_is_asked_again() -> None:
    booting = Booting()
    async with here(allocation=booting, own=node(pods="3", dongle="9")) as desk:
        assert desk.come(pod("brief"))
        assert not desk.come(asking("first", dongle="1"))
        assert desk.events("first") == [("Warning", "AdmissionWaiting", "waiting for the plugin")]
        # The plugin may be a pod itself.
        assert desk.come(pod("plugin"))
        # The place of who waits is kept.
        assert not desk.come(pod("late"))
        assert desk.phase("late") == ("Failed", "OutOfpods")
        await asyncio.sleep(200)
        assert desk.life.started == ["brief", "plugin"]
        # What went during the wait does not count against the pod any more.
        brief = pod("brief")
        desk.life.may_end.set()
        desk.store.apply(PodChange("REMOVE", brief, "api"))
        desk.workers.end(brief)
        await settle()
        assert desk.come(pod("next"))
        booting.registered.set()
        await asyncio.sleep(1)
        assert desk.life.started == ["brief", "plugin", "next", "first"]
        assert desk.phase("first") is None


@pytest.mark.looptime
async def test_admitting_plugin_never_registers_pod_rejected_after_wait() -> None:
    booting = Booting()
    async with here(allocation=booting, own=node(pods="3", dongle="9")) as desk:
        assert not desk.come(asking("first", dongle="1"))
        await asyncio.sleep(299)
        assert desk.phase("first") is None
        await asyncio.sleep(2)
        assert desk.phase("first") == ("Failed", "UnexpectedAdmissionError")
        assert desk.life.started == []


@pytest.mark.looptime
async def test_admitting_deleted_while_waiting_for_plugin_frees_its_place() -> None:
    booting = Booting()
    async with here(allocation=booting, own=node(pods="1", dongle="9")) as desk:
        first = asking("first", dongle="1")
        assert not desk.come(first)
        desk.store.apply(PodChange("REMOVE", first, "api"))
        assert desk.come(pod("next"))
        booting.registered.set()
        await asyncio.sleep(1)
        assert desk.life.started == ["next"]


@pytest.mark.looptime
async def test_pod_admission_pod_waited_apart_can_still_preempt() -> None:
    slow = Slow(apart=True)
    async with here(allocation=slow, own=node(pods="9", cpu="2", dongle="9")) as desk:
        assert desk.come(asking("victim", cpu="2"))
        await settle()
        assert not desk.come(asking("critical", cpu="2", dongle="1", priority=SYSTEM))
        desk.life.may_end.set()
        await asyncio.sleep(5)
        assert desk.phase("victim") == ("Failed", "Preempting")
        assert desk.life.started == ["victim", "critical"]


@pytest.mark.looptime
@pytest.mark.parametrize("apart", [False, True])
async def test_pod_admission_pod_deleted_during_allocation_released(apart: bool) -> None:
    slow = Slow(apart=apart)
    async with here(allocation=slow, released=slow.released.append) as desk:
        gone = asking("gone", dongle="1")
        assert not desk.come(gone)
        await settle()
        desk.store.apply(PodChange("REMOVE", gone, "api"))
        await asyncio.sleep(2)
        assert (slow.given, slow.released, desk.life.started) == (["gone"], ["gone"], [])


async def test_pod_admission_running_pod_rejected_resources_held_until_end() -> None:
    class Never(Slow):
        def admit(self, attempt: PodAdmitAttributes) -> AdmitResult:
            return AdmitRejection("Never", "not this one")

    never = Never()
    async with here(allocation=never, released=never.released.append) as desk:
        one = pod()
        desk.run_since_before(one)
        assert not desk.come(one)
        assert never.released == []
        desk.life.may_end.set()
        await settle()


@pytest.mark.looptime
async def test_pod_admission_node_affinity_failure_refetches_node() -> None:
    labels: dict[str, str] = {}
    async with here(newest=lambda: node(labels)) as desk:
        wanting = pod("wanting", nodeSelector={"zone": "b"})
        assert not desk.come(wanting)
        labels["zone"] = "b"
        assert desk.phase("wanting") is None
        await asyncio.sleep(2)
        assert desk.life.started == ["wanting"]
        labels["zone"] = "c"
        assert not desk.come(pod("other", nodeSelector={"zone": "b"}))
        await asyncio.sleep(2)
        assert desk.phase("other") == ("Failed", "NodeAffinity")
        assert desk.fetched == 2
        # Nobody is asked about other refusals.
        assert not desk.come(asking(cpu="9"))
        assert desk.fetched == 2


@pytest.mark.looptime
async def test_pod_admission_node_not_found_does_not_block_pods() -> None:
    def lost() -> Node:
        raise NotFound(404, "NotFound", "no such node")

    async with here(newest=lost) as desk:
        assert not desk.come(pod("wanting", nodeSelector={"zone": "b"}))
        assert not desk.come(pod("plain"))
        await asyncio.sleep(2)
        assert desk.phase("wanting") == ("Failed", "NodeAffinity")
        assert desk.life.started == ["plain"]
