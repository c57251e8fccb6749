import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.podconfig.static_pods import SOURCE_ANNOTATION, is_static_pod
from pykubelet.podsync.contract import KillPodOptions, Outcome, Remnants, SyncError
from pykubelet.podworkers.workers import PodWorkers, PodWorkerState
from pykubelet.util.tasks import TaskScope

pytestmark = pytest.mark.looptime


def pod(uid: str, name: str = "web", source: str = "file") -> Pod:
    origin = {SOURCE_ANNOTATION: source}
    return Pod(metadata=ObjectMeta(name=name, namespace="default", uid=uid, annotations=origin))


class Life:
    """A pod's life that only keeps a diary; what a step does can be scripted."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self.alive: dict[str, str] = {}
        self.finished: set[str] = set()
        self.slow: dict[str, float] = {}
        self.failing: dict[str, Exception] = {}
        self.again: float | None = None
        self.options: dict[str, KillPodOptions] = {}
        """What each pod was terminated with last, by uid."""
        self.leaves_remnants = False
        self.resyncs: list[bool] = []

    async def _do(self, what: str) -> None:
        self.diary.append(what)
        await asyncio.sleep(self.slow.get(what, 0))
        if what in self.failing:
            # Without the traceback of the last time, which would grow with each retry.
            raise self.failing[what].with_traceback(None)

    async def sync(self, pod: Pod, *, resync: bool = False) -> Outcome:
        self.resyncs.append(resync)
        others = [uid for uid, name in self.alive.items() if name == pod.full_name and uid != pod.uid]
        assert not others or not is_static_pod(pod), "two pods of one name"
        self.alive[pod.uid] = pod.full_name
        await self._do(f"sync {pod.uid}")
        return pod.uid in self.finished, self.again

    async def terminate(self, uid: str, pod: Pod | None, options: KillPodOptions) -> None:
        self.options[uid] = options
        await self._do(f"terminate {uid}")
        self.alive.pop(uid, None)

    async def clean_up(self, uid: str, pod: Pod | None) -> Remnants | None:
        await self._do(f"clean_up {uid}")
        return Remnants(uid) if self.leaves_remnants else None

    async def remove(self, remnants: Remnants) -> None:
        await self._do(f"remove {remnants.uid}")


@pytest.fixture
def life() -> Life:
    return Life()


@pytest.fixture
async def workers(life: Life) -> AsyncIterator[PodWorkers]:
    async with TaskScope() as scope:
        workers = PodWorkers(scope, 60)
        workers.start(life)
        yield workers


async def test_pod_worker_only_resync_period_elapsed_syncs_as_resync(life: Life, workers: PodWorkers) -> None:
    workers.sync(pod("1"))
    await asyncio.sleep(95)
    workers.wake("1")
    await asyncio.sleep(1)
    assert life.resyncs == [False, True, False]
    life.again = 10.0
    workers.wake("1")
    await asyncio.sleep(11)
    assert life.resyncs[3:] == [False, False]


async def test_pod_workers_terminate_synced_pod_cleans_up(life: Life, workers: PodWorkers) -> None:
    workers.sync(pod("1"))
    await asyncio.sleep(1)
    assert life.diary == ["sync 1"]
    workers.terminate("1")
    await asyncio.sleep(1)
    assert life.diary == ["sync 1", "terminate 1", "clean_up 1"]
    assert len(workers) == 0


async def test_pod_workers_pod_finished_terminates_and_cleans_up(life: Life, workers: PodWorkers) -> None:
    life.finished.add("1")
    workers.sync(pod("1"))
    await asyncio.sleep(1)
    assert life.diary == ["sync 1", "terminate 1", "clean_up 1"]


async def test_pod_workers_wake_ups_during_sync_coalesce_into_one_sync(
    life: Life, workers: PodWorkers
) -> None:
    life.slow["sync 1"] = 5
    workers.sync(pod("1"))
    await asyncio.sleep(1)
    for _ in range(10):
        workers.wake("1")
    await asyncio.sleep(30)
    assert life.diary == ["sync 1", "sync 1"]


async def test_pod_workers_idle_pod_synced_each_period_and_when_due(life: Life, workers: PodWorkers) -> None:
    workers.sync(pod("1"))
    await asyncio.sleep(59)
    assert life.diary == ["sync 1"]
    await asyncio.sleep(32)
    assert life.diary == ["sync 1"] * 2
    life.again = 10
    workers.wake("1")
    await asyncio.sleep(21)
    assert life.diary == ["sync 1"] * 5


async def test_pod_workers_pods_start_together_resyncs_spread_over_half_a_period(
    life: Life, workers: PodWorkers
) -> None:
    for number in range(100):
        workers.sync(pod(str(number), name=str(number)))
    await asyncio.sleep(59)
    life.diary.clear()
    synced = []
    for _ in range(7):
        await asyncio.sleep(5)
        synced.append(len(life.diary))
    assert synced[-1] == 100
    steps = [after - before for before, after in itertools.pairwise([0, *synced])]
    assert max(steps) < 50


async def test_pod_workers_terminate_interrupts_sync(life: Life, workers: PodWorkers) -> None:
    life.slow["sync 1"] = 3600
    workers.sync(pod("1"))
    await asyncio.sleep(1)
    workers.terminate("1")
    await asyncio.sleep(1)
    assert life.diary == ["sync 1", "terminate 1", "clean_up 1"]


async def test_pod_workers_sync_fails_retried_with_exponential_back_off(
    life: Life, workers: PodWorkers
) -> None:
    life.failing["sync 1"] = SyncError("runtime away")
    workers.sync(pod("1"))
    await asyncio.sleep(1 + 2 + 4 + 8 + 10 + 0.5)
    assert life.diary == ["sync 1"] * 6
    worker = workers.get("1")
    assert worker is not None
    assert worker.state is PodWorkerState.SYNCING


async def test_pod_workers_sync_fails_for_hours_retried_at_longest_delay(
    life: Life, workers: PodWorkers
) -> None:
    """Verify that a pod is still retried after so many failures that no float holds 2 to their power."""
    life.failing["sync 1"] = SyncError("no such secret")
    workers.sync(pod("1"))
    await asyncio.sleep(5000 * 10)
    assert 4900 < len(life.diary) <= 5003
    worker = workers.get("1")
    assert worker is not None
    assert worker.state is PodWorkerState.SYNCING


async def test_pod_workers_sync_error_retry_after_sets_retry_delay(life: Life, workers: PodWorkers) -> None:
    life.failing["sync 1"] = SyncError("a volume", retry_after=0.5)
    workers.sync(pod("1"))
    await asyncio.sleep(1.2)
    assert life.diary == ["sync 1"] * 3
    life.failing["sync 1"] = SyncError("a volume", retry_after=100)
    await asyncio.sleep(99)
    assert life.diary == ["sync 1"] * 4
    workers.wake("1")
    await asyncio.sleep(0.1)
    assert life.diary == ["sync 1"] * 5


async def test_pod_workers_unexpected_exception_other_pod_continues(life: Life, workers: PodWorkers) -> None:
    life.failing["sync 1"] = ZeroDivisionError()
    workers.sync(pod("1", "one"))
    workers.sync(pod("2", "two"))
    await asyncio.sleep(3.5)
    assert life.diary.count("sync 1") == 3
    assert life.diary.count("sync 2") == 1


async def test_pod_workers_terminate_fails_is_retried_until_success(life: Life, workers: PodWorkers) -> None:
    workers.sync(pod("1"))
    life.failing["terminate 1"] = SyncError("runtime away")
    workers.terminate("1")
    await asyncio.sleep(5)
    del life.failing["terminate 1"]
    await asyncio.sleep(10)
    assert life.diary[-1] == "clean_up 1"
    assert len(workers) == 0


async def test_pod_workers_static_pod_edited_waits_for_predecessor(life: Life, workers: PodWorkers) -> None:
    life.slow["terminate 1"] = 30
    workers.sync(pod("1"))
    await asyncio.sleep(1)
    workers.terminate("1")
    workers.sync(pod("2"))
    workers.sync(pod("3"))
    assert workers.uids() == {"1", "3"}
    await asyncio.sleep(20)
    assert life.diary[-1] == "terminate 1"
    await asyncio.sleep(20)
    assert life.diary == ["sync 1", "terminate 1", "clean_up 1", "sync 3"]


async def test_pod_workers_api_pod_same_name_does_not_wait(life: Life, workers: PodWorkers) -> None:
    life.slow["terminate 1"] = 30
    workers.sync(pod("1", source="api"))
    await asyncio.sleep(1)
    workers.terminate("1")
    workers.sync(pod("2", source="api"))
    await asyncio.sleep(1)
    assert life.diary == ["sync 1", "terminate 1", "sync 2"]
    await asyncio.sleep(30)
    assert life.diary == ["sync 1", "terminate 1", "sync 2", "clean_up 1"]
    assert workers.uids() == {"2"}


async def test_pod_workers_waiting_pod_terminated_is_never_synced(life: Life, workers: PodWorkers) -> None:
    life.slow["terminate 1"] = 30
    workers.sync(pod("1"))
    await asyncio.sleep(1)
    workers.terminate("1")
    workers.sync(pod("2"))
    workers.terminate("2")
    await asyncio.sleep(60)
    assert life.diary == ["sync 1", "terminate 1", "clean_up 1"]


async def test_pod_workers_same_uid_readded_while_terminating_starts_again(
    life: Life, workers: PodWorkers
) -> None:
    life.slow["terminate 1"] = 30
    workers.sync(pod("1"))
    await asyncio.sleep(1)
    workers.terminate("1")
    workers.sync(pod("1"))
    await asyncio.sleep(60)
    assert life.diary == ["sync 1", "terminate 1", "clean_up 1", "sync 1"]


async def test_terminate_shorter_grace_period_interrupts_termination(life: Life, workers: PodWorkers) -> None:
    life.slow["terminate 1"] = 300
    workers.sync(pod("1"))
    await asyncio.sleep(1)
    workers.terminate("1", 300)
    await asyncio.sleep(1)
    life.slow.clear()
    workers.terminate("1", 0)
    await asyncio.sleep(1)
    assert len(workers) == 0


async def test_terminate_orphan_without_spec_terminates_once(life: Life, workers: PodWorkers) -> None:
    workers.terminate_orphan("9")
    workers.terminate_orphan("9")
    await asyncio.sleep(1)
    assert life.diary == ["terminate 9", "clean_up 9"]


@pytest.mark.parametrize("seed", range(20))
async def test_pod_workers_any_call_sequence_converges_to_desired_pods(
    life: Life, workers: PodWorkers, seed: int
) -> None:
    """Whatever is asked in whatever order, in the end exactly the wanted pods are alive."""
    import random

    chance = random.Random(seed)
    wanted: dict[str, str] = {}
    for number in range(60):
        name = chance.choice("abc")
        if chance.random() < 0.6:
            uid = wanted.get(name) if chance.random() < 0.3 else f"{name}{number}"
            uid = uid or f"{name}{number}"
            if name in wanted and wanted[name] != uid:
                workers.terminate(wanted[name])
            wanted[name] = uid
            workers.sync(pod(uid, name))
        elif name in wanted:
            workers.terminate(wanted.pop(name))
        for what in ("sync", "terminate", "clean_up"):
            life.slow[f"{what} {wanted.get(name, '')}"] = chance.choice([0, 0, 1, 5])
        if chance.random() < 0.2 and name in wanted:
            life.failing[f"{chance.choice(['sync', 'terminate'])} {wanted[name]}"] = SyncError("chance")
        await asyncio.sleep(chance.choice([0, 0, 0.5, 3]))
    life.failing.clear()
    await asyncio.sleep(200)
    assert sorted(life.alive) == sorted(wanted.values())
    assert workers.uids() == set(wanted.values())


async def test_end_unknown_pod_terminates_without_sync(life: Life, workers: PodWorkers) -> None:
    workers.end(pod("a"), 5)
    await asyncio.sleep(1)
    assert life.diary == ["terminate a", "clean_up a"]
    assert workers.get("a") is None


async def test_end_waiting_pod_next_pod_waits_for_predecessor(life: Life, workers: PodWorkers) -> None:
    life.slow["terminate a"] = 30
    workers.sync(pod("a"))
    await asyncio.sleep(1)
    workers.terminate("a")
    workers.sync(pod("b"))
    workers.end(pod("b"), 0)
    workers.sync(pod("c"))
    await asyncio.sleep(10)
    assert life.diary == ["sync a", "terminate a", "terminate b", "clean_up b"]
    await asyncio.sleep(30)
    assert life.diary[4:] == ["clean_up a", "sync c"]


async def test_set_pod_replaces_pod_without_sync(life: Life, workers: PodWorkers) -> None:
    workers.sync(pod("a"))
    await asyncio.sleep(1)
    newer = pod("a")
    workers.set_pod(newer)
    await asyncio.sleep(1)
    assert life.diary == ["sync a"]
    worker = workers.get("a")
    assert worker is not None
    assert worker.pod is newer
    assert workers.names() == {"default/web"}


# Grace periods and status functions


@pytest.mark.parametrize(
    ("deletion", "spec", "requested", "expected"),
    [
        (None, 30, None, 30),
        (None, None, None, 1),
        (0, 30, None, 1),
        (0, 30, 0, 1),
        (20, 30, None, 20),
        (20, 30, 5, 5),
        (20, 30, 40, 20),
        (None, 30, 40, 40),
        (None, 0, None, 1),
    ],
)
async def test_terminate_grace_period_is_at_least_one_second(
    life: Life,
    workers: PodWorkers,
    deletion: int | None,
    spec: int | None,
    requested: int | None,
    expected: int,
) -> None:
    one = pod("1", source="api")
    one.metadata.deletion_grace_period_seconds = deletion
    one.spec.termination_grace_period_seconds = spec
    workers.sync(one)
    workers.end(one, requested)
    await asyncio.sleep(1)
    assert life.options["1"].grace == expected
    assert workers.get("1") is None


async def test_terminate_longer_grace_period_interrupts_nothing(life: Life, workers: PodWorkers) -> None:
    life.slow["terminate 1"] = 100
    one = pod("1", source="api")
    one.spec.termination_grace_period_seconds = 30
    workers.sync(one)
    await asyncio.sleep(1)
    workers.terminate("1")
    await asyncio.sleep(1)
    workers.terminate("1", 60)
    await asyncio.sleep(50)
    assert life.diary == ["sync 1", "terminate 1"]
    workers.terminate("1", 5)
    await asyncio.sleep(1)
    assert life.diary == ["sync 1", "terminate 1", "terminate 1"]
    assert life.options["1"].grace == 5


async def test_terminate_passes_last_status_function(life: Life, workers: PodWorkers) -> None:
    def preempt(status: PodStatus) -> PodStatus:
        return status

    def evict(status: PodStatus) -> PodStatus:
        return status

    life.failing["terminate 1"] = SyncError("busy")
    workers.sync(pod("1"))
    workers.terminate("1", pod_status=preempt)
    await asyncio.sleep(0.5)
    assert life.options["1"].pod_status is preempt
    workers.terminate("1", pod_status=evict)
    workers.terminate("1", 5)
    await asyncio.sleep(0.1)
    assert life.options["1"].pod_status is evict


# Removal of what finished pods leave


async def test_remove_is_repeated_until_it_succeeds(life: Life, workers: PodWorkers) -> None:
    life.leaves_remnants = True
    life.failing["remove 1"] = SyncError("busy")
    workers.sync(pod("1"))
    workers.terminate("1")
    await asyncio.sleep(60)
    assert life.diary.count("clean_up 1") == 1
    assert life.diary.count("remove 1") > 5
    assert workers.uids() == {"1"}, "others must not remove it, too"
    assert (workers.pods(), workers.names(), workers.pod("1")) == ([], set(), None)
    life.failing.clear()
    await asyncio.sleep(10)
    assert workers.uids() == set()


async def test_remove_does_not_hold_up_successor(life: Life, workers: PodWorkers) -> None:
    life.leaves_remnants = True
    life.slow["terminate 1"] = 30
    life.slow["remove 1"] = 3600
    workers.sync(pod("1"))
    await asyncio.sleep(1)
    workers.terminate("1")
    workers.sync(pod("2"))
    await asyncio.sleep(31)
    assert life.diary == ["sync 1", "terminate 1", "clean_up 1", "sync 2", "remove 1"]
    workers.sync(pod("3", "other"))
    await asyncio.sleep(1)
    assert life.diary[-1] == "sync 3"


async def test_remove_started_before_successor_does_not_hold_it_up(life: Life, workers: PodWorkers) -> None:
    life.leaves_remnants = True
    life.failing["remove 1"] = SyncError("busy")
    workers.sync(pod("1"))
    workers.terminate("1")
    await asyncio.sleep(30)
    workers.sync(pod("2"))
    await asyncio.sleep(0.1)
    assert life.diary[-1] == "sync 2"


@pytest.mark.parametrize("fails", [False, True])
async def test_remove_of_same_uid_ends_before_next_pod_starts(
    life: Life, workers: PodWorkers, fails: bool
) -> None:
    life.leaves_remnants = True
    life.slow["remove 1"] = 5
    if fails:
        life.failing["remove 1"] = SyncError("busy")
    workers.sync(pod("1"))
    workers.terminate("1")
    await asyncio.sleep(3)
    workers.sync(pod("1"))
    await asyncio.sleep(1)
    assert life.diary == ["terminate 1", "clean_up 1", "remove 1"]
    await asyncio.sleep(10)
    assert life.diary[3:] == ["sync 1"]


async def test_remove_in_back_off_is_repeated_for_next_pod_of_same_uid(
    life: Life, workers: PodWorkers
) -> None:
    life.leaves_remnants = True
    life.failing["remove 1"] = SyncError("busy")
    workers.sync(pod("1"))
    workers.terminate("1")
    await asyncio.sleep(39)
    attempts = life.diary.count("remove 1")
    workers.sync(pod("1"))
    await asyncio.sleep(0.1)
    assert life.diary.count("remove 1") == attempts + 1
    assert life.diary[-1] == "sync 1"
