"""The controller of Jobs: what is written before it runs, and what a killed kubelet continues."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.podconfig.local_objects import LOCAL_KINDS
from pykubelet.podconfig.stopped import stopped_path
from pykubelet.podconfig.workloads import controller
from pykubelet.podconfig.workloads.controller import MAX_JOBS, WorkloadController
from pykubelet.podconfig.workloads.job import run_hash
from pykubelet.podconfig.workloads.kinds import JobSpec
from pykubelet.podconfig.workloads.records import write_records
from pykubelet.util.tasks import TaskScope
from tests.unit.podconfig.making import Heard, static
from tests.unit.podconfig.workloads.making import Document, cron_job, job, workload

pytestmark = pytest.mark.looptime
assert "persistentvolumeclaims" in LOCAL_KINDS


class Node:
    """A controller with the pods that it has offered, and their statuses."""

    def __init__(self, root: Path, now: float = 1_700_000_040.0) -> None:
        self.root = root
        self.start = now
        self.heard = Heard()
        self.statuses: dict[str, PodStatus] = {}
        self.file = root / "jobs.yaml"
        self.new()

    def new(self) -> None:
        """Begin a new kubelet process."""
        self.statuses = {}
        self.controller = WorkloadController(self.root, "n1", self.heard, self.statuses.get, clock=self.clock)

    def clock(self) -> float:
        return self.start + asyncio.get_running_loop().time()

    def write(self, *documents: Document, static_pods: tuple[Pod, ...] = ()) -> list[str]:
        problems = self.controller.offer((str(self.file), workload(written)) for written in documents)
        self.controller.emit("file", list(static_pods), problems)
        return [problem.message for problem in problems]

    def end(self, name: str, phase: str = "Succeeded") -> None:
        pod = self.pod(name)
        status = PodStatus(phase=phase)
        self.statuses[pod.uid] = status
        self.controller.handle_status(pod, status, None)

    def pod(self, name: str) -> Pod:
        return next(pod for pod in self.heard.sets[-1][0] if pod.metadata.name == f"{name}-n1")

    @property
    def names(self) -> list[str]:
        return [name.removesuffix("-n1") for name in self.heard.names]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with TaskScope() as scope:
            scope.start(self.controller.run(), name="controller")
            yield

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(1000):
            while self.names != list(names) or not self.heard.sets:
                await asyncio.sleep(0.05)

    @property
    def records(self) -> list[str]:
        return sorted(path.name for path in (self.root / "workloads").glob("*"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_emit_without_jobs_passes_pods_on_and_writes_nothing(node: Node) -> None:
    async with node.running():
        node.write(static_pods=(static("web"),))
        async with asyncio.timeout(10):
            while not node.heard.sets:
                await asyncio.sleep(0.01)
        node.write(static_pods=(static("web"), static("db")))
        assert len(node.heard.names) == 2, "immediately, once the records have been read"
    assert not (node.root / "workloads").exists()


async def test_run_job_is_recorded_before_its_pod_is_offered(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[str]] = []
    original = write_records

    def record(directory: Path, changed: dict[object, object]) -> None:
        written.append(node.names if node.heard.sets else [])
        original(directory, changed)  # type: ignore[arg-type]

    monkeypatch.setattr(controller, "write_records", record)
    async with node.running():
        node.write(job(), static_pods=(static("web"),))
        await node.until("web-node-1", "once-0")
    assert written == [[]]
    assert node.records == ["job_default_once.json"]


async def test_run_completed_job_after_restart_is_offered_with_final_status(node: Node) -> None:
    async with node.running():
        node.write(job())
        await node.until("once-0")
        first = node.pod("once-0")
        node.end("once-0")
        await asyncio.sleep(1)
        assert node.pod("once-0") is first, "the running kubelet does not see a change"
    node.new()
    async with node.running():
        node.write(job())
        await asyncio.sleep(100)
        again = node.pod("once-0")
        assert (again.uid, again.status.phase) == (first.uid, "Succeeded")
        assert node.names == ["once-0"]


async def test_has_completed_is_true_for_all_pods_of_a_completed_job_also_after_a_restart(
    node: Node,
) -> None:
    async with node.running():
        node.write(job())
        await node.until("once-0")
        node.end("once-0", "Failed")
        await node.until("once-0", "once-1")
        assert not any(node.controller.has_completed(node.pod(name)) for name in node.names)
        node.end("once-1")
        await asyncio.sleep(1)
        assert all(node.controller.has_completed(node.pod(name)) for name in ("once-0", "once-1"))
        assert not node.controller.has_completed(static("web"))
    node.new()
    async with node.running():
        node.write(job())
        await asyncio.sleep(1)
        assert node.controller.has_completed(node.pod("once-0"))


async def test_run_active_job_after_restart_continues_the_same_pod(node: Node) -> None:
    async with node.running():
        node.write(job())
        await node.until("once-0")
        uid = node.pod("once-0").uid
    node.new()
    async with node.running():
        node.write(job())
        await asyncio.sleep(1)
        assert (node.pod("once-0").uid, node.pod("once-0").status.phase) == (uid, "Pending")


async def test_run_changed_template_is_a_new_run_and_changed_limit_is_not(node: Node) -> None:
    async with node.running():
        node.write(job())
        await node.until("once-0")
        uid = node.pod("once-0").uid
        node.end("once-0")
        await asyncio.sleep(1)
        node.write(job(backoffLimit=3, ttlSecondsAfterFinished=100))
        await asyncio.sleep(1)
        assert node.pod("once-0").uid == uid
        node.write(job(completions=2))
        await asyncio.sleep(1)
        assert node.pod("once-0").uid != uid


async def test_run_removed_manifest_forgets_the_job_unless_it_is_stopped_or_broken(node: Node) -> None:
    async with node.running():
        node.write(job())
        await node.until("once-0")
        uid = node.pod("once-0").uid
        stopped_path(node.file).touch()
        node.write()
        await node.until()
        assert node.records, "stopped"
        node.write(job())
        await node.until("once-0")
        assert node.pod("once-0").uid == uid
        stopped_path(node.file).unlink()
        node.write()
        await node.until()
        assert node.records == []
        node.write(job())
        await node.until("once-0")
        assert node.pod("once-0").uid != uid


async def test_run_missing_manifest_directory_keeps_records(node: Node) -> None:
    node.file = node.root / "manifests" / "jobs.yaml"
    node.file.parent.mkdir()
    async with node.running():
        node.write(job())
        await node.until("once-0")
    node.file.parent.rmdir()
    node.new()
    async with node.running():
        node.write()
        await node.until()
        assert node.records, "its disk may not be mounted yet"
        node.file.parent.mkdir()
        node.write()
        async with asyncio.timeout(100):
            while node.records:
                await asyncio.sleep(1)


async def test_run_unwritable_record_starts_only_other_pods_until_it_is_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail: list[OSError] = [OSError(28, "No space left on device")]
    original = write_records

    def write(directory: Path, changed: dict[object, object]) -> None:
        if fail:
            raise fail[0]
        original(directory, changed)  # type: ignore[arg-type]

    monkeypatch.setattr(controller, "write_records", write)
    async with node.running():
        node.write(job(), static_pods=(static("web"),))
        await node.until("web-node-1")
        await asyncio.sleep(60)
        assert node.names == ["web-node-1"], "a pod of the Job is started only with its record"
        fail.clear()
        await node.until("web-node-1", "once-0")
        fail.append(OSError(28, "No space left on device"))
        node.end("once-0")
        node.write(job(), static_pods=(static("db"),))
        await node.until("db-node-1", "once-0")
    node.new()
    async with node.running():
        node.write(job(restart="OnFailure"))
        await node.until()  # the pods of the former template are not known any more


@pytest.mark.parametrize(
    "content", ["", "{", "null", '{"kind": "Job"}', '{"kind":"Job","namespace":"x","name":"y"}']
)
async def test_run_unreadable_record_holds_only_its_job(node: Node, content: str) -> None:
    directory = node.root / "workloads"
    directory.mkdir()
    (directory / "job_default_once.json").write_text(content)
    async with node.running():
        node.write(job(), job("other"))
        await node.until("other-0")
        (problem,) = [problem for problem in node.heard.problems if "is held" in problem]
        assert "remove that file to run it again" in problem
        assert (directory / "job_default_once.json").read_text() == content
        (directory / "job_default_once.json").unlink()
        await node.until("once-0", "other-0")  # without a restart of the kubelet
        assert node.heard.problems == []


async def test_run_cron_job_starts_at_its_time_and_continues_after_restart(node: Node) -> None:
    async with node.running():
        node.write(cron_job(schedule="*/5 * * * *", timeZone="UTC"))
        await asyncio.sleep(1)
        assert node.names == []
        await asyncio.sleep(301)
        (name,) = node.names
        node.end(name)
        await asyncio.sleep(1)
    node.new()
    async with node.running():
        node.write(cron_job(schedule="*/5 * * * *", timeZone="UTC"))
        await asyncio.sleep(1)
        assert node.names == [name]
        assert node.pod(name).status.phase == "Succeeded"
        await asyncio.sleep(300)
        assert len(node.names) == 2


async def test_run_failed_job_is_retried_after_its_delay(node: Node) -> None:
    async with node.running():
        node.write(job())
        await node.until("once-0")
        node.end("once-0", "Failed")
        await asyncio.sleep(9)
        assert node.names == ["once-0"]
        await node.until("once-0", "once-1")


async def test_offer_too_many_and_duplicate_jobs_are_problems(node: Node) -> None:
    problems = node.write(job("a"), job("a"), *(job(f"j{index}") for index in range(MAX_JOBS + 5)))
    assert problems[0] == "job default/a is already here: rename one, or remove it"
    assert len(problems) == 1 + 6
    assert f"at most {MAX_JOBS}" in problems[-1]


@pytest.mark.parametrize("seed", range(6))
async def test_run_killed_at_any_point_runs_each_pod_once(node: Node, seed: int) -> None:
    """Cancel the controller after ever longer times: no serial number belongs to two pods."""
    seen: dict[str, str] = {}
    for attempt in range(12):
        node.new()
        try:
            async with node.running():
                node.write(job(completions=3, parallelism=2, backoffLimit=50))
                await asyncio.sleep(0.003 * ((seed * 7 + attempt) % 11))
                if node.heard.sets:
                    for pod in node.heard.sets[-1][0]:
                        name, uid = pod.metadata.name, pod.uid
                        assert seen.setdefault(name, uid) == uid
                        if pod.status.phase == "Pending" and attempt % 3 == 2:
                            node.end(name.removesuffix("-n1"))
                    await asyncio.sleep(0.002 * seed)
        finally:
            for path in (node.root / "workloads").glob("*.json"):
                json.loads(path.read_text())


async def test_run_unchanged_template_is_hashed_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[JobSpec] = []

    def counted(spec: JobSpec) -> str:
        hashed.append(spec)
        return run_hash(spec)

    monkeypatch.setattr(controller, "run_hash", counted)
    async with node.running():
        node.write(job())
        await node.until("once-0")
        await asyncio.sleep(1000)
        assert len(hashed) == 1
        node.write(job(restart="OnFailure"))
        await asyncio.sleep(1000)
        assert len(hashed) == 2
