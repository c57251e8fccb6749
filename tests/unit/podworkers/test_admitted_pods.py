"""The sum of the resources of admitted pods, against the sum over all pods."""

import asyncio
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from pykubelet.admission.handler import Usage
from pykubelet.admission.predicates import usage_of
from pykubelet.api.pod import Pod, ResourceRequirements
from pykubelet.api.quantity import Quantity
from pykubelet.cm.resize import PodResources
from pykubelet.podconfig.mux import PodChange
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podconfig.static_pods import SOURCE_ANNOTATION, is_static_pod
from pykubelet.podworkers.pod_admission import AdmittedPods, LazyPods
from pykubelet.podworkers.workers import PodWorkerState
from pykubelet.resize.allocation_manager import AllocationManager
from tests.support.admission import asking, node, requests_of
from tests.unit.podworkers.desk import Here, here, settle

UIDS = ("a", "b", "c", "a2")
"""The pod a2 has the name of the pod a."""

operations = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "add",
                "static",
                "apart",
                "remove",
                "terminate",
                "end",
                "clean",
                "block",
                "before",
                "vanish",
                "allocate",
                "actuate",
                "progress",
                "done",
                "gone",
                "tidy",
                "wait",
            ]
        ),
        st.sampled_from(UIDS),
        st.sampled_from(["1", "2", "300m"]),
    ),
    max_size=25,
)


def steps(*texts: str) -> list[tuple[str, str, str]]:
    """Return operations from `what uid cpu` each; a and 1 where they are left out."""
    return [(what, *rest, *("a", "1")[len(rest) :]) for what, *rest in map(str.split, texts)]  # type: ignore[misc]


ENDED = ("block", "static", "wait", "terminate", "end", "wait")
"""A static pod whose containers have ended while its volumes cannot be unmounted."""


class Scenario:
    """A node's admission, on which operations are done."""

    def __init__(self, desk: Here, resizing: AllocationManager) -> None:
        self.desk = desk
        self.resizing = resizing
        self.waiting: set[str] = set()

    async def do(self, what: str, uid: str, cpu: str) -> None:
        desk, books, pod = self.desk, self.resizing.state, named(uid, cpu)
        resources = PodResources({"main": ResourceRequirements(requests={"cpu": Quantity.parse(cpu)})})
        match what:
            case "add":
                desk.come(pod, "ADD" if desk.store.get(uid) is None else "UPDATE")
            case "static":
                pod.metadata.annotations[SOURCE_ANNOTATION] = "file"
                desk.come(pod, "ADD" if desk.store.get(uid) is None else "UPDATE")
            case "apart":
                desk.desk._apart[uid] = pod
                desk.desk.mark(uid)
            case "remove" if (known := desk.store.get(uid)) is not None:
                desk.store.apply(PodChange("REMOVE", known, "api"))
                desk.workers.end(known)
            case "terminate":
                desk.workers.terminate(uid)
            case "end":
                desk.life.may_end.set()
            case "clean":
                desk.life.is_tidy.set()
            case "block":
                desk.life.may_end.clear()
                desk.life.is_tidy.clear()
            case "before":
                desk.run_since_before(pod)
            case "vanish":
                desk.in_runtime = {other: seen for other, seen in desk.in_runtime.items() if other != uid}
            case "allocate":
                books.allocated.put(uid, resources)
            case "actuate":
                books.actuated.put(uid, resources)
            case "progress":
                self.resizing.conditions.set_in_progress(pod)
            case "done":
                self.resizing.conditions.clear_in_progress(uid)
            case "gone":
                self.resizing.on_pod_removed(uid)
            case "tidy":
                self.resizing.tidy({uid})
            case "wait":
                await settle()

    def check(self) -> None:
        desk = self.desk.desk
        for uid in (*UIDS, "new"):
            pod = named(uid, "1")
            kept, summed = desk._used_by_others(pod), usage_of(desk._other_pods(pod), requests_of)
            assert kept.pods == summed.pods
            assert nonzero(kept) == nonzero(summed)
        self.check_indexes()

    def check_indexes(self) -> None:
        """Compare what is looked up by name or state with a scan of all pods and workers."""
        workers, store = self.desk.workers, self.desk.store
        by_name: dict[str, set[str]] = {}
        for worker in workers.all():
            by_name.setdefault(worker.name, set()).add(worker.uid)
        assert {name: set(found) for name, found in workers._named.items()} == by_name
        ending = self.desk.churn._terminating
        assert set(ending) == {one.uid for one in workers.all() if one.state is not PodWorkerState.SYNCING}
        assert list(ending.values()) == sorted(ending.values())
        static = {pod.uid for pod in store.pods() if is_static_pod(pod)}
        assert {pod.uid for pod in store.static_pods()} == static


def named(uid: str, cpu: str) -> Pod:
    pod = asking(uid[0], cpu=cpu)
    pod.metadata.uid = uid
    return pod


def nonzero(usage: Usage) -> dict[str, int]:
    return {name: amount for name, amount in usage.amounts.items() if amount}


@given(operations)
@example(steps("add", "wait", "add a 2"))
@example(steps("before", "vanish"))
@example(steps("before", "add", "wait", "remove", "end", "wait"))
@example(steps(*ENDED, "static a 2", "static a2 2", "terminate a2"))
@example(steps(*ENDED, "static a2 2", "clean", "wait"))
@example(steps("add", "static a2 1", "remove", "add"))
@example(steps("add", "allocate a 300m", "gone"))
@example(steps("add", "allocate a 300m", "tidy b"))
@example(steps("add", "allocate", "actuate a 2", "progress", "actuate a 300m", "actuate a 2", "done"))
def test_usage_after_any_operations_equals_sum_over_all_pods(done: list[tuple[str, str, str]]) -> None:
    """Verify that no component changes the share of a pod without marking it."""

    async def run() -> None:
        resizing = AllocationManager(PodHistory())
        async with here(own=node(cpu="100", pods="100"), resizing=resizing) as desk:
            scenario = Scenario(desk, resizing)
            scenario.check()
            for what, uid, cpu in done:
                await scenario.do(what, uid, cpu)
                scenario.check()
            desk.life.may_end.set()
            desk.life.is_tidy.set()
            await settle()
            scenario.check()

    asyncio.run(run())


def test_usage_without_reads_only_marked_pods() -> None:
    """Verify that the cost of a pod does not depend on the number of admitted pods."""
    pods = {str(number): [asking(str(number), cpu="1", memory="1Mi")] for number in range(100)}
    read: list[str] = []

    def pods_of(uid: str) -> list[Pod]:
        read.append(uid)
        return pods[uid]

    admitted = AdmittedPods(pods_of, requests_of)
    admitted.mark_all(pods)
    assert admitted.usage_without("7") == Usage(99, {"cpu": 99_000, "memory": 99 << 20})
    assert len(read) == 100
    pods["3"] = []
    admitted.mark("3")
    assert admitted.usage_without("") == Usage(99, {"cpu": 99_000, "memory": 99 << 20})
    assert read[100:] == ["3"]


def test_lazy_pods_are_listed_once_when_read() -> None:
    calls: list[None] = []

    def find() -> list[Pod]:
        calls.append(None)
        return [asking("a"), asking("b")]

    lazy: Any = LazyPods(find)
    assert calls == []
    assert (len(lazy), lazy[1].uid, [pod.uid for pod in lazy]) == (2, "b", ["a", "b"])
    assert len(calls) == 1
