"""Which pods count, from the first word of a source to the end of the last container."""

import asyncio

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.podconfig.mux import PodChange, PodMux, PodStore
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import KillPodOptions, Outcome, Remnants
from pykubelet.podworkers.pod_records import ActivePods, PodRecords
from pykubelet.podworkers.workers import PodWorkers
from pykubelet.status.compute import StatusStore
from pykubelet.util.tasks import TaskScope
from tests.support.pods import make_pod


class Life:
    """A life whose end, and whose cleaning up, take as long as they are told to."""

    def __init__(self) -> None:
        self.may_end, self.may_go = asyncio.Event(), asyncio.Event()
        self.ended = asyncio.Event()

    async def sync(self, pod: Pod, *, resync: bool = False) -> Outcome:
        return False, None

    async def terminate(self, uid: str, pod: Pod | None, options: KillPodOptions) -> None:
        await self.may_end.wait()

    async def clean_up(self, uid: str, pod: Pod | None) -> Remnants | None:
        self.ended.set()
        await self.may_go.wait()
        return None

    async def remove(self, remnants: Remnants) -> None:
        raise AssertionError("no pod leaves remnants here")


async def test_active_pods_counts_pod_until_last_container_exits() -> None:
    store, statuses, life = PodStore(), StatusStore(), Life()
    seen: dict[str, ObservedPod] = {}
    async with TaskScope() as scope:
        workers = PodWorkers(scope, 60.0)
        workers.start(life)
        mux = PodMux(lambda: 0)
        mux.expect("api")
        active = ActivePods(PodRecords(mux, store, statuses, PodHistory()), workers, lambda: seen)
        assert active.uids() is None
        mux.set("api", [])
        assert active.uids() == set()

        # It runs since an earlier agent, and its source has just spoken of it.
        one = make_pod("u1", "one")
        here = ObservedContainer(id="c1", name="main", phase="running")
        gone = ObservedContainer(id="c0", name="other", phase="exited")
        seen["u1"] = ObservedPod(uid="u1", containers=(here, gone))
        assert active.uids() == {"u1"}
        assert active.pods() == []
        mux.set("api", [one])
        assert [pod.uid for pod in active.pods()] == ["u1"]
        assert active.running_before("u1") == {"main"}
        assert active.running_before("u2") == frozenset()
        store.apply(PodChange("ADD", one, "api"))
        workers.sync(one)
        assert active.running_before("u1") == frozenset()
        assert active.named("default", "one") is one

        # One that is refused, or ended long ago, does not count.
        refused, old = make_pod("u2", "two"), make_pod("u3", "three", status=PodStatus(phase="Succeeded"))
        for pod in (refused, old):
            store.apply(PodChange("ADD", pod, "api"))
        assert active.uids() == {"u1", "u2"}
        statuses.set(refused, PodStatus(phase="Failed"))
        assert active.uids() == {"u1"}
        assert active.named("default", "two") is refused
        assert active.named("default", "nobody") is None

        # One that ends counts until nothing of it runs, whoever wants it.
        workers.end(one)
        mux.set("api", [])
        store.apply(PodChange("REMOVE", one, "api"))
        statuses.set(one, PodStatus(phase="Failed"))
        seen.clear()
        assert active.uids() == {"u1"}
        life.may_end.set()
        await life.ended.wait()
        assert active.uids() == set()
        life.may_go.set()
