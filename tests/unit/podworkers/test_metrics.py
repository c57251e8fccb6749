"""What is counted of workers, starts and statuses, with clocks of our own."""

import asyncio
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import ContainerState, ContainerStateTerminated, PodStatus
from pykubelet.api.volume import Volume
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podconfig.static_pods import SEEN_ANNOTATION, seen_time
from pykubelet.podsync.contract import KillPodOptions, Outcome, Remnants, SyncError
from pykubelet.podworkers.metrics import StartedMetrics, WorkerMetrics
from pykubelet.podworkers.startup_latency import PodStartupLatencyTracker, covered, first_seen
from pykubelet.podworkers.workers import PodWorkers
from pykubelet.status.manager import StatusMetrics
from pykubelet.util.tasks import TaskScope
from tests.support.pods import container, make_pod, running, waiting

START = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Clock:
    """A wall clock that is set by hand, in seconds after the start."""

    now = 0.0

    def __call__(self) -> float:
        return START.timestamp() + self.now


class Starts:
    """Pods whose starts are measured."""

    def __init__(self) -> None:
        self.clock, self.registry = Clock(), CollectorRegistry()
        self.starts = PodStartupLatencyTracker(StartedMetrics(self.registry), self.clock)
        self.journal = PodHistory(self.clock)
        self.journal.add_listener(self.starts.happened)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kubelet_{name}", labels)

    def event(self, pod: Pod, at: float, reason: str, where: str = "spec.containers{main}") -> None:
        self.clock.now = at
        self.journal.event(pod, "Normal", reason, f"{reason} at {at}", where)

    def shown(self, pod: Pod, at: float, status: PodStatus) -> None:
        self.clock.now = at
        self.starts.shown(msgspec.structs.replace(pod, status=status))


def new_pod(uid: str = "u1", **fields: object) -> Pod:
    pod = make_pod(uid, creation_timestamp=START, annotations={SEEN_ANNOTATION: seen_at(0.5)})
    for name, value in fields.items():
        setattr(pod.spec, name, value)
    return pod


def seen_at(seconds: float) -> str:
    return seen_time(int((START.timestamp() + seconds) * 1e9))


def status(phase: str = "Running", *, init: float = 0, runs: bool = True) -> PodStatus:
    began = START + timedelta(seconds=1)
    end = ContainerStateTerminated(
        exit_code=0, reason="Completed", started_at=began, finished_at=began + timedelta(seconds=init)
    )
    return PodStatus(
        phase=phase,
        start_time=began,
        container_statuses=[container("main", running() if runs else waiting())],
        init_container_statuses=[container("first", ContainerState(terminated=end))] if init else [],
    )


def test_startup_latency_sli_excludes_image_pulls_and_init_containers() -> None:
    it, pod = Starts(), new_pod()
    it.shown(pod, 0.5, PodStatus(phase="Pending"))
    it.event(pod, 1, "Pulling")
    it.event(pod, 2, "Pulling", "spec.containers{other}")
    it.event(pod, 4, "Pulled")
    it.event(pod, 5, "Failed", "spec.containers{other}")
    it.event(pod, 5, "Pulled", "spec.containers{present}")
    it.shown(pod, 6, status("Pending", runs=False))
    assert it.value("pod_start_total_duration_seconds_count") == 0
    it.shown(pod, 10, status(init=2))
    it.shown(pod, 20, status(init=2))
    assert it.value("pod_start_total_duration_seconds_count") == 1
    assert it.value("pod_start_total_duration_seconds_sum") == pytest.approx(10)
    assert it.value("pod_start_sli_duration_seconds_sum") == pytest.approx(10 - 4 - 2)
    assert it.value("first_network_pod_start_sli_duration_seconds") == pytest.approx(4)


def test_startup_latency_known_stateful_and_failed_pods_not_counted() -> None:
    it = Starts()
    known, stateful, over = new_pod("known"), new_pod("stateful"), new_pod("over")
    stateful.spec.volumes = [msgspec.convert({"name": "v", "hostPath": {"path": "/"}}, Volume)]
    it.shown(known, 1, status())  # ran before this agent did
    it.shown(known, 2, status())
    for pod in (stateful, over):
        it.shown(pod, 3, PodStatus(phase="Pending"))
    it.shown(stateful, 4, status())
    it.shown(over, 4, status("Failed"))
    it.shown(over, 5, status())
    assert it.value("pod_start_total_duration_seconds_count") == 1
    assert it.value("pod_start_sli_duration_seconds_count") == 0
    it.starts.forget("over")
    own, host = new_pod("own"), new_pod("host", host_network=True)
    for pod in (host, own):
        it.shown(pod, 6, PodStatus(phase="Pending"))
    it.shown(host, 7, status())
    assert it.value("first_network_pod_start_sli_duration_seconds") == 0
    it.shown(own, 9, status())
    assert it.value("first_network_pod_start_sli_duration_seconds") == pytest.approx(9)


def test_startup_latency_running_counts_seconds_since_first_seen() -> None:
    it, pod = Starts(), new_pod()
    pending = status("Pending", runs=False)
    it.starts.status_changed(pod, pending, None)
    it.clock.now = 3
    it.starts.status_changed(pod, status(), pending)
    it.starts.status_changed(pod, status(), status())
    assert it.value("pod_start_duration_seconds_count") == 1
    assert it.value("pod_start_duration_seconds_sum") == pytest.approx(2.5)
    it.starts.status_changed(new_pod("ran before"), status(), None)
    assert it.value("pod_start_duration_seconds_count") == 1


def test_terminated_containers_total_counts_each_exit_once() -> None:
    it, pod, labels = Starts(), new_pod(), {"exit_code": "0", "reason": "Completed"}
    before, after = status(), status(init=1)
    for _ in range(2):
        it.starts.status_changed(pod, after, before)
        before = after
    assert it.value("terminated_containers_total", container_type="init_container", **labels) == 1
    known = msgspec.structs.replace(pod, status=after)
    it.starts.status_changed(known, after, None)  # an earlier agent told of it
    assert it.value("terminated_containers_total", container_type="init_container", **labels) == 1


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [([], 0), ([(1, 3)], 2), ([(1, 3), (2, 5)], 4), ([(1, 9), (2, 3)], 8), ([(5, 6), (1, 2)], 2)],
)
def test_covered_overlapping_spans_count_once(spans: list[tuple[float, float]], seconds: float) -> None:
    assert covered(spans) == seconds


def test_first_seen_returns_time_of_annotation() -> None:
    assert first_seen(new_pod()) == pytest.approx(START.timestamp() + 0.5)
    assert first_seen(make_pod()) is None
    assert first_seen(make_pod(annotations={SEEN_ANNOTATION: "api"})) is None


class Life:
    """A pod's life whose steps take a while."""

    def __init__(self) -> None:
        self.fails = 1

    async def sync(self, pod: Pod, *, resync: bool = False) -> Outcome:
        await asyncio.sleep(2)
        if self.fails:
            self.fails -= 1
            raise SyncError("not yet")
        return False, None

    async def terminate(self, uid: str, pod: Pod | None, options: KillPodOptions) -> None:
        await asyncio.sleep(3)

    async def clean_up(self, uid: str, pod: Pod | None) -> Remnants | None:
        await asyncio.sleep(0.5)
        return Remnants(uid)

    async def remove(self, remnants: Remnants) -> None:
        await asyncio.sleep(0.1)


@pytest.mark.looptime
async def test_pod_workers_metrics_count_steps_by_operation_type() -> None:
    registry, clock = CollectorRegistry(), Clock()
    clock.now = 0.75

    def steps(operation: str) -> tuple[float | None, float | None]:
        labels = {"operation_type": operation}
        name = "kubelet_pod_worker_duration_seconds"
        count, total = (registry.get_sample_value(f"{name}_{what}", labels) for what in ("count", "sum"))
        return count, total and round(total, 3)

    async with TaskScope() as scope:
        workers = PodWorkers(scope, 60, metrics=WorkerMetrics(registry), clock=clock)
        workers.start(Life())
        workers.sync(new_pod())
        await asyncio.sleep(10)  # the first step, which fails, and another after a second
        assert (steps("create"), steps("sync"), steps("update")) == ((1, 2), (1, 2), (None, None))
        workers.sync(new_pod())
        await asyncio.sleep(10)
        assert steps("update") == (1, 2)
        workers.terminate("u1")
        workers.sync(new_pod())  # the same again
        await asyncio.sleep(10)
        assert (steps("kill"), steps("terminated"), steps("create")) == ((1, 3), (1, 0.5), (2, 4))
        workers.terminate_orphan("unknown")
    read = registry.get_sample_value
    assert read("kubelet_pod_worker_start_duration_seconds_count") == 2
    assert read("kubelet_pod_worker_start_duration_seconds_sum") == pytest.approx(0.5)
    assert read("kubelet_containers_per_pod_count_sum") == 2
    assert read("kubelet_restarted_pods_total", {"static": ""}) == 1
    assert read("kubelet_restarted_pods_total", {"static": "true"}) == 0


def test_metrics_without_registry_accept_observations() -> None:
    StatusMetrics().sent(1)
    WorkerMetrics().restarted(static=True)
