"""Where pods come in: who counts as there, what a refusal leaves behind, and who waits for whom."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from pykubelet.admission.link import Answer, Attempt, Later, Link, Refusal
from pykubelet.api.node import Node
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.config.gates import FeatureGates
from pykubelet.kube.errors import NotFound
from pykubelet.pods.journal import Journal
from pykubelet.pods.mux import Operation, PodChange
from pykubelet.pods.store import PodStore
from pykubelet.runtime.observed import ObservedPod, ObservedSandbox
from pykubelet.sync.admitting import AdmissionParts, Admitting, present_node
from pykubelet.sync.status_refused import preempted_status, was_refused
from pykubelet.sync.status_store import StatusStore
from pykubelet.sync.worker import Outcome
from pykubelet.sync.workers import PodWorkers
from pykubelet.tasks import TaskScope
from tests.admission.making import asking, node, pod
from tests.sync.making import NOW, condition

SYSTEM = 2_000_000_000


@dataclass
class Life:
    """A life in which pods run until they are told to end, which takes as long as it takes."""

    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def sync(self, pod: Pod) -> Outcome:
        if pod.uid not in self.started:
            self.started.append(pod.uid)
        return False, None

    async def terminate(self, uid: str, pod: Pod | None, grace: int | None) -> None:
        await self.may_end.wait()
        self.ended.append(uid)

    async def clean_up(self, uid: str, pod: Pod | None) -> None:
        pass


class Here:
    """A node's desk, with real workers and stores; `known` and `newest` are the API server's node."""

    def __init__(
        self,
        scope: TaskScope,
        *,
        own: Node | None = None,
        newest: Callable[[], Node] | None = None,
        **links: Any,
    ) -> None:
        self.life = Life()
        self.store, self.statuses, self.journal = PodStore(), StatusStore(), Journal()
        self.workers = PodWorkers(self.life, scope, 60.0)
        self.registry = CollectorRegistry()
        self.in_runtime: dict[str, ObservedPod] = {}
        self.coming: dict[str, Pod] = {}
        self.fetched = 0

        async def fetch() -> Node:
            self.fetched += 1
            await asyncio.sleep(1)
            assert newest is not None
            return newest()

        self.desk = Admitting(
            AdmissionParts(
                own=own or node(), fetch=fetch if newest is not None else None, gates=FeatureGates(), **links
            ),
            scope,
            self.registry,
            store=self.store,
            workers=self.workers,
            statuses=self.statuses,
            journal=self.journal,
            in_runtime=lambda: self.in_runtime,
            wanted=lambda: self.coming,
            start=self.workers.sync,
        )

    def come(self, one: Pod, op: Operation = "ADD") -> bool:
        """Hand a pod on as the engine does."""
        self.store.apply(PodChange(op, one, "api"))
        may = self.desk.may_start(one)
        if may:
            self.workers.sync(one)
        return may

    def run_since_before(self, one: Pod) -> None:
        """Have a pod in the runtime that an earlier agent started."""
        box = ObservedSandbox(id=one.uid, ready=True, created_at=1, attempt=0)
        self.in_runtime[one.uid] = ObservedPod(uid=one.uid, sandboxes=(box,))
        self.coming[one.uid] = one

    def phase(self, uid: str) -> tuple[str, str] | None:
        status = self.statuses.get(uid)
        return (status.phase, status.reason) if status is not None else None

    def events(self, uid: str) -> list[tuple[str, str, str]]:
        return [(event.kind, event.reason, event.message) for event in self.journal.events(uid)]

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0


@asynccontextmanager
async def here(**facts: Any) -> AsyncIterator[Here]:
    async with TaskScope() as scope:
        yield Here(scope, **facts)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_refused_pod_is_failed_and_never_starts() -> None:
    async with here() as node:
        refused = asking(cpu="3")
        assert not node.come(refused)
        await settle()
        message = "Node didn't have enough resource: cpu, requested: 3000, used: 0, capacity: 2000"
        status = node.statuses.get(refused.uid)
        assert status is not None
        assert status.start_time is not None
        assert status == PodStatus(
            phase="Failed",
            reason="OutOfcpu",
            message=f"Pod was rejected: {message}",
            qos_class="Burstable",
            start_time=status.start_time,
        )
        assert was_refused(status)
        assert node.events(refused.uid) == [("Warning", "OutOfcpu", message)]
        assert [note.text for note in node.journal.timeline(refused.uid)] == ["refused: OutOfcpu"]
        assert node.counted("kubelet_admission_rejections_total", reason="OutOfcpu") == 1
        assert node.workers.get(refused.uid) is None
        # Others' wishes for it change nothing.
        labelled = msgspec.structs.replace(
            refused, metadata=msgspec.structs.replace(refused.metadata, labels={"a": "b"})
        )
        assert not node.come(labelled, "UPDATE")
        assert node.life.started == []
        assert node.counted("kubelet_admission_rejections_total", reason="OutOfcpu") == 1


async def test_admitted_pods_are_asked_once_and_hold_what_they_were_given() -> None:
    async with here() as node:
        first = asking("first", cpu="1500m")
        assert node.come(first)
        assert node.come(first, "UPDATE")
        assert not node.come(asking("second", cpu="1"))
        assert node.come(asking("third", cpu="500m"))
        # What is on its way out still holds it; what has ended does not.
        node.workers.terminate("first")
        assert not node.come(asking("fourth", cpu="1"))
        node.life.may_end.set()
        worker = node.workers.get("first")
        assert worker is not None
        await worker.gone.wait()
        await settle()
        assert node.come(asking("fifth", cpu="1"))


async def test_what_an_earlier_agent_refused_stays_refused() -> None:
    async with here() as node:
        status = PodStatus(phase="Failed", reason="OutOfcpu", message="Pod was rejected: too much")
        refused = msgspec.structs.replace(asking(cpu="1m"), status=status)
        assert not node.come(refused)
        assert node.statuses.get(refused.uid) == status
        assert node.events(refused.uid) == []
        # Any other end has to be cleaned up after, which is the worker's work.
        failed = msgspec.structs.replace(asking("failed", cpu="9"), status=PodStatus(phase="Failed"))
        assert node.come(failed)


async def test_what_runs_since_before_is_not_asked_and_counts_before_what_comes() -> None:
    async with here() as node:
        old = asking("old", cpu="1500m")
        wrong = pod("wrong", nodeSelector={"zone": "elsewhere"})
        for one in (old, wrong):
            node.run_since_before(one)
        new = asking("new", cpu="1")
        node.coming["new"] = new
        # Although it was handed on first.
        assert not node.come(new)
        assert node.phase("new") == ("Failed", "OutOfcpu")
        assert node.come(old)
        assert node.come(wrong)


async def test_a_pod_that_runs_is_stopped_when_somebody_refuses_it_all_the_same() -> None:
    class Never:
        for_running = True

        def admit(self, attempt: Attempt) -> Answer:
            assert attempt.running
            return Refusal("Never", "not this one")

    async with here(allocation=Never()) as node:
        one = pod()
        node.run_since_before(one)
        assert not node.come(one)
        assert node.phase(one.uid) == ("Failed", "Never")
        node.life.may_end.set()
        await settle()
        assert node.life.ended == [one.uid]
        assert node.life.started == []


async def test_links_of_the_rooms_above_have_their_place() -> None:
    class Place:
        for_running = False

        def __init__(self, reason: str) -> None:
            self.reason = reason

        def admit(self, attempt: Attempt) -> Answer:
            wanted = attempt.pod.metadata.labels.get("refuse")
            return Refusal(self.reason, "so it is") if wanted == self.reason else None

    places: dict[str, Link] = {
        "pressure": Place("Evicted"),
        "allocation": Place("TopologyAffinityError"),
        "shutdown": Place("NodeShutdown"),
    }
    async with here(**places) as node:
        for reason in ("Evicted", "TopologyAffinityError", "NodeShutdown"):
            assert not node.come(pod(reason.lower(), meta={"labels": {"refuse": reason}}))
            assert node.phase(reason.lower()) == ("Failed", reason)
        assert node.come(pod())


@pytest.mark.looptime
async def test_a_critical_pod_waits_until_others_have_made_room() -> None:
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
async def test_a_pod_that_does_not_end_is_not_waited_for_for_ever() -> None:
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
async def test_a_pod_that_goes_while_it_waits_is_not_started(how: str) -> None:
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

    def admit(self, attempt: Attempt) -> Answer | Later:
        one = attempt.pod
        if not any("dongle" in name for name in one.spec.containers[0].resources.requests):
            return None
        return Later(lambda: self._give(one.uid), apart=self.apart)

    async def _give(self, uid: str) -> Answer:
        await asyncio.sleep(1)
        self.given.append(uid)
        return Refusal("UnexpectedAdmissionError", "no dongle left") if uid == "greedy" else None


@pytest.mark.looptime
async def test_pods_wait_for_devices_and_others_behind_them() -> None:
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
async def test_pods_that_wait_apart_hold_up_nobody_and_keep_their_room() -> None:
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


@pytest.mark.looptime
async def test_a_pod_that_waited_apart_may_still_need_others_to_go() -> None:
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
async def test_what_was_given_to_a_pod_that_goes_meanwhile_is_taken_back(apart: bool) -> None:
    slow = Slow(apart=apart)
    async with here(allocation=slow, released=slow.released.append) as desk:
        gone = asking("gone", dongle="1")
        assert not desk.come(gone)
        await settle()
        desk.store.apply(PodChange("REMOVE", gone, "api"))
        await asyncio.sleep(2)
        assert (slow.given, slow.released, desk.life.started) == (["gone"], ["gone"], [])


async def test_a_pod_that_is_refused_while_it_runs_keeps_what_it_has_until_its_end() -> None:
    class Never(Slow):
        def admit(self, attempt: Attempt) -> Answer:
            return Refusal("Never", "not this one")

    never = Never()
    async with here(allocation=never, released=never.released.append) as desk:
        one = pod()
        desk.run_since_before(one)
        assert not desk.come(one)
        assert never.released == []
        desk.life.may_end.set()
        await settle()


@pytest.mark.looptime
async def test_the_node_is_asked_for_anew_before_its_labels_refuse_a_pod() -> None:
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
async def test_an_api_server_that_does_not_know_the_node_does_not_hold_pods_up() -> None:
    def lost() -> Node:
        raise NotFound(404, "NotFound", "no such node")

    async with here(newest=lost) as desk:
        assert not desk.come(pod("wanting", nodeSelector={"zone": "b"}))
        assert not desk.come(pod("plain"))
        await asyncio.sleep(2)
        assert desk.phase("wanting") == ("Failed", "NodeAffinity")
        assert desk.life.started == ["plain"]


def test_the_node_that_pods_are_judged_by() -> None:
    own, known = node({"own": "1"}), node({"theirs": "1"}, cpu="9", dongle="2")
    assert present_node(own, None) is own
    judged = present_node(own, known)
    assert judged.metadata.labels == known.metadata.labels
    amounts = {name: str(amount) for name, amount in judged.status.allocatable.items()}
    assert (amounts["cpu"], amounts["example.com/dongle"]) == ("2", "2")


def test_the_status_of_a_pod_that_made_room() -> None:
    before = PodStatus(
        phase="Running", conditions=[condition("Ready"), condition("DisruptionTarget", "False")]
    )
    after = preempted_status(pod(meta={"generation": 3}), before, NOW)
    assert (after.phase, after.reason) == ("Failed", "Preempting")
    assert [(one.type, one.status, one.reason) for one in after.conditions[1:]] == [
        ("DisruptionTarget", "True", "TerminationByKubelet")
    ]
    assert after.conditions[1].observed_generation == 3
