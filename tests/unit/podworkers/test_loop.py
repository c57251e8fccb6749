import asyncio
import itertools

import pytest

from pykubelet.api.duration import Duration
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Pod
from pykubelet.cri.runtime_pb2 import RuntimeCondition, RuntimeStatus, StatusResponse
from pykubelet.podconfig.mux import PodChange
from pykubelet.podsync.contract import PodLifecycleEvent
from pykubelet.podworkers.loop import PodEventHandlers, SyncLoop
from pykubelet.podworkers.runtime_state import RuntimeState, problems_in
from pykubelet.transport.errors import CriError
from pykubelet.util.tasks import TaskScope

MINUTE = Duration.parse("1m")


class Diary(PodEventHandlers):
    """Handlers that only write down what they were told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.fail = False

    def pod_changed(self, change: PodChange) -> None:
        self._note(f"{change.op} {change.pod.uid}")

    def runtime_changed(self, change: PodLifecycleEvent) -> None:
        self._note(f"runtime {change.uid}")

    def probe_changed(self, uid: str) -> None:
        self._note(f"probe {uid}")

    async def housekeep(self) -> None:
        self._note("housekeep")

    def _note(self, what: str) -> None:
        self.told.append(what)
        if self.fail:
            raise ValueError(what)


def change(op: str, uid: str) -> PodChange:
    pod = Pod(metadata=ObjectMeta(name="web", namespace="default", uid=uid))
    return PodChange(op=op, pod=pod, source="file")  # type: ignore[arg-type]


def answer(runtime: bool = True, network: bool = True) -> StatusResponse:
    return StatusResponse(
        status=RuntimeStatus(
            conditions=[
                RuntimeCondition(type="RuntimeReady", status=runtime, reason="R", message="m"),
                RuntimeCondition(type="NetworkReady", status=network, reason="N", message="n"),
            ]
        )
    )


def test_problems_in_separates_runtime_and_network_errors() -> None:
    assert problems_in(answer()) == ([], [])
    assert problems_in(answer(runtime=False)) == (["RuntimeReady=false reason:R message:m"], [])
    assert problems_in(answer(network=False)) == ([], ["NetworkReady=false reason:N message:n"])
    runtime, network = problems_in(StatusResponse())
    assert "missing" in runtime[0]
    assert "missing" in network[0]


@pytest.mark.looptime
async def test_runtime_state_status_changes_updates_errors() -> None:
    answers: list[StatusResponse | CriError] = [answer()]

    async def status() -> StatusResponse:
        found = answers[-1]
        if isinstance(found, CriError):
            raise found
        return found

    state = RuntimeState(status)
    assert state.errors()
    async with TaskScope() as scope:
        scope.start(state.run(), name="state")
        await asyncio.sleep(1)
        assert state.errors() == []
        answers.append(CriError("Status", "UNAVAILABLE", "gone"))
        await asyncio.sleep(6)
        assert "gone" in state.errors()[0]
        answers.append(answer(network=False))
        await asyncio.sleep(6)
        assert state.errors() == []
        assert state.network_errors()


@pytest.mark.looptime
async def test_runtime_state_status_call_hangs_reports_runtime_down() -> None:
    hanging = asyncio.Event()

    async def status() -> StatusResponse:
        if hanging.is_set():
            await asyncio.sleep(3600)
        return answer()

    state = RuntimeState(status)
    async with TaskScope() as scope:
        scope.start(state.run(), name="state")
        await asyncio.sleep(1)
        hanging.set()
        await asyncio.sleep(29)
        assert state.errors() == []
        await asyncio.sleep(10)
        assert state.errors() == ["container runtime is down"]


@pytest.mark.looptime
async def test_sync_loop_runtime_unhealthy_backs_off() -> None:
    asked: list[float] = []

    def errors() -> list[str]:
        asked.append(asyncio.get_running_loop().time())
        return ["down"]

    async with TaskScope() as scope:
        scope.start(SyncLoop(errors, MINUTE).run(Diary()), name="loop")
        await asyncio.sleep(30)
    gaps = [round(later - earlier, 3) for earlier, later in itertools.pairwise(asked)]
    assert gaps[:8] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@pytest.mark.looptime
async def test_sync_loop_health_loop_stopped_reports_error() -> None:
    loop = SyncLoop(list, MINUTE)
    assert loop.health() is None
    async with TaskScope() as scope:
        scope.start(loop.run(Diary()), name="loop")
        await asyncio.sleep(600)
        assert loop.health() is None
    await asyncio.sleep(117)
    assert loop.health() is None
    await asyncio.sleep(5)
    assert "took longer than expected" in (loop.health() or "")


@pytest.mark.looptime
async def test_sync_loop_without_events_wakes_once_per_housekeeping() -> None:
    rounds: list[float] = []

    def errors() -> list[str]:
        rounds.append(asyncio.get_running_loop().time())
        return []

    diary, loop = Diary(), SyncLoop(errors, MINUTE)
    async with TaskScope() as scope:
        await asyncio.sleep(0.3)
        scope.start(loop.run(diary), name="loop")
        await asyncio.sleep(60)
        quiet = len(rounds)
        loop.probe("1")
        await asyncio.sleep(0.1)
        assert diary.told[-1] == "probe 1", "an event does not wait for the tick"
    assert quiet == 31
    # Together with the other periodic tasks.
    assert all(time % 2 == pytest.approx(0, abs=0.01) for time in rounds[1:quiet])
    assert diary.told.count("housekeep") == 31


async def test_task_scope_task_fails_raises_exception_group() -> None:
    async def fails() -> None:
        raise ValueError("part died")

    with pytest.raises(ExceptionGroup) as caught:
        async with TaskScope() as scope:
            scope.start(fails(), name="part")
            await asyncio.sleep(60)
    assert caught.group_contains(ValueError, match="part died")


async def test_task_scope_exit_cancels_tasks() -> None:
    ended = asyncio.Event()

    async def part() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with TaskScope() as scope:
        scope.start(part(), name="part")
        await asyncio.sleep(0)
    assert ended.is_set()


@pytest.mark.looptime
async def test_sync_loop_updates_handled_in_order() -> None:
    diary = Diary()
    loop = SyncLoop(list, MINUTE)
    async with TaskScope() as scope:
        scope.start(loop.run(diary), name="loop")
        loop.pods([change("REMOVE", "1"), change("ADD", "2")])
        loop.runtime(PodLifecycleEvent("2"))
        loop.after(lambda: diary.told.append("then"))
        loop.probe("2")
        await asyncio.sleep(0.5)
    assert diary.told == ["housekeep", "REMOVE 1", "ADD 2", "runtime 2", "then", "probe 2"]


@pytest.mark.looptime
async def test_sync_loop_housekeeping_runs_every_two_seconds() -> None:
    diary = Diary()
    async with TaskScope() as scope:
        scope.start(SyncLoop(list, MINUTE).run(diary), name="loop")
        await asyncio.sleep(10.5)
    assert diary.told == ["housekeep"] * 6


@pytest.mark.looptime
async def test_sync_loop_runtime_down_updates_handled_after_recovery() -> None:
    diary, errors = Diary(), ["down"]
    loop = SyncLoop(lambda: errors, MINUTE)
    async with TaskScope() as scope:
        scope.start(loop.run(diary), name="loop")
        loop.pods([change("ADD", "1")])
        await asyncio.sleep(60)
        assert diary.told == []
        errors.clear()
        await asyncio.sleep(6)
    assert "ADD 1" in diary.told


@pytest.mark.looptime
async def test_sync_loop_handler_raises_continues() -> None:
    diary = Diary()
    diary.fail = True
    loop = SyncLoop(list, MINUTE)
    async with TaskScope() as scope:
        scope.start(loop.run(diary), name="loop")
        loop.pods([change("ADD", "1"), change("ADD", "2")])
        await asyncio.sleep(3)
    assert [told for told in diary.told if told != "housekeep"] == ["ADD 1", "ADD 2"]
