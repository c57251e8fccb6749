import asyncio

import pytest

from pykubelet.api.pod import Container, Lifecycle, LifecycleHandler, Probe, SleepAction
from pykubelet.kuberuntime.decide import KillReason
from pykubelet.kuberuntime.kill import KillError
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.transport.errors import CriError
from tests.support.containers import make_container, make_pod
from tests.unit.kuberuntime.stopping import StoppingRuntime, hooked, make_killer, running

pytestmark = pytest.mark.looptime


def sidecar(name: str) -> Container:
    return make_container(name, restart_policy="Always")


def warnings(journal: PodHistory) -> list[tuple[str, str, str]]:
    return [(e.reason, e.message, e.where) for e in journal.events("u-1") if e.kind == "Warning"]


async def test_pod_pre_stop_hook_runs_before_stop() -> None:
    runtime = StoppingRuntime(exec_seconds=1.5)
    pod = make_pod(hooked(), termination_grace_period_seconds=30)
    await make_killer(runtime).kill_pod(pod, running("main"))
    assert runtime.calls == [
        (0, "exec main save"),
        (1.5, "exec main exit 0"),
        # The second of the hook that has begun is not taken off: 30 - 1.
        (1.5, "stop main 29"),
        (1.5, "main ended"),
        (1.5, "stop sandbox box"),
    ]


@pytest.mark.parametrize(("seconds", "remaining"), [(0.4, 30), (0.99, 30), (1.0, 29), (27.5, 3), (29.9, 2)])
async def test_pod_remaining_grace_period_counts_started_second(seconds: float, remaining: int) -> None:
    runtime = StoppingRuntime(exec_seconds=seconds)
    await make_killer(runtime).kill_pod(
        make_pod(hooked(), termination_grace_period_seconds=30), running("main")
    )
    assert (seconds, f"stop main {remaining}") in runtime.calls


@pytest.mark.parametrize("grace", [0, 1])
async def test_container_grace_period_zero_skips_hook(grace: int) -> None:
    runtime = StoppingRuntime()
    pod = make_pod(hooked(), termination_grace_period_seconds=grace)
    await make_killer(runtime).kill_container(pod, running("main").containers[0])
    assert [call for _, call in runtime.calls if call.startswith("exec")] == (
        ["exec main save", "exec main exit 0"] if grace else []
    )
    assert (0, "stop main 2") in runtime.calls


async def test_pod_hook_beyond_grace_period_lives_until_container_ends() -> None:
    journal = PodHistory()
    runtime = StoppingRuntime(exec_seconds=3600, stop_seconds={"main": 60})
    pod = make_pod(hooked(), termination_grace_period_seconds=30)
    await make_killer(runtime, journal).kill_pod(pod, running("main"))
    assert runtime.calls == [
        (0, "exec main save"),
        (30, "stop main 2"),
        (32, "main ended"),
        (32, "exec main exit 137"),
        (32, "stop sandbox box"),
    ]
    assert warnings(journal) == [("FailedPreStopHook", "PreStopHook failed", "spec.containers{main}")]


async def test_pod_sleep_hook_beyond_grace_period_is_not_waited_for() -> None:
    runtime = StoppingRuntime()
    sleep = Lifecycle(pre_stop=LifecycleHandler(sleep=SleepAction(seconds=100)))
    pod = make_pod(make_container(lifecycle=sleep), termination_grace_period_seconds=5)
    await make_killer(runtime).kill_pod(pod, running("main"))
    assert runtime.calls[-1] == (5, "stop sandbox box")


async def test_pod_failed_hook_reports_event_and_stops() -> None:
    journal, runtime = PodHistory(), StoppingRuntime(exit_code=3)
    pod = make_pod(hooked(), termination_grace_period_seconds=30)
    await make_killer(runtime, journal).kill_pod(pod, running("main"))
    assert runtime.signalled == ["main"]
    assert warnings(journal) == [("FailedPreStopHook", "PreStopHook failed", "spec.containers{main}")]


async def test_pod_stops_sidecars_last_in_reverse_order() -> None:
    runtime = StoppingRuntime(stop_seconds={"main": 3, "other": 1, "second": 2, "first": 1})
    pod = make_pod(
        make_container("main"),
        make_container("other"),
        init_containers=[make_container("setup"), sidecar("first"), sidecar("second")],
        termination_grace_period_seconds=30,
    )
    await make_killer(runtime).kill_pod(pod, running("first", "second", "main", "other"))
    assert [call for call in runtime.calls if call[1].startswith("stop")] == [
        (0, "stop main 30"),
        (0, "stop other 30"),
        (3, "stop second 27"),
        (5, "stop first 25"),
        (6, "stop sandbox box"),
    ]


async def test_pod_sidecars_stop_when_grace_period_is_over() -> None:
    runtime = StoppingRuntime(stop_seconds={"main": 60})
    pod = make_pod(
        make_container("main"), init_containers=[sidecar("side")], termination_grace_period_seconds=10
    )
    await make_killer(runtime).kill_pod(pod, running("side", "main"))
    assert (10, "stop side 2") in runtime.calls


@pytest.mark.parametrize(
    ("reason", "deletion", "expected"),
    [("LivenessProbe", None, 5), ("StartupProbe", None, 7), ("", None, 30), ("LivenessProbe", 12, 12)],
)
async def test_container_probe_failed_uses_grace_period_of_probe(
    reason: KillReason, deletion: int | None, expected: int
) -> None:
    runtime = StoppingRuntime()
    container = make_container(
        liveness_probe=Probe(termination_grace_period_seconds=5),
        startup_probe=Probe(termination_grace_period_seconds=7),
    )
    pod = make_pod(container, termination_grace_period_seconds=30, deletion_grace_period_seconds=deletion)
    await make_killer(runtime).kill_container(pod, running("main").containers[0], "unhealthy", reason)
    assert runtime.calls[0] == (0, f"stop main {expected}")


async def test_pod_shorter_grace_period_keeps_running_hook() -> None:
    runtime = StoppingRuntime(exec_seconds=3600, stop_seconds={"main": 60})
    killer = make_killer(runtime)
    pod = make_pod(hooked(), termination_grace_period_seconds=100)
    first = asyncio.create_task(killer.kill_pod(pod, running("main")))
    await asyncio.sleep(10)
    first.cancel()
    await killer.kill_pod(pod, running("main"), 5)
    assert runtime.calls == [
        (0, "exec main save"),
        (15, "stop main 2"),
        (17, "main ended"),
        (17, "exec main exit 137"),
        (17, "stop sandbox box"),
    ]


async def test_pod_shorter_grace_period_sends_no_second_hook_or_signal() -> None:
    runtime = StoppingRuntime(stop_seconds={"main": 60})
    journal = PodHistory()
    killer = make_killer(runtime, journal)
    pod = make_pod(hooked(), termination_grace_period_seconds=100)
    first = asyncio.create_task(killer.kill_pod(pod, running("main")))
    await asyncio.sleep(10)
    first.cancel()
    await killer.kill_pod(pod, running("main"), 5)
    assert [call for _, call in runtime.calls if not call.endswith("ended")] == [
        "exec main save",
        "exec main exit 0",
        "stop main 100",
        "stop main 5",
        "stop sandbox box",
    ]
    assert runtime.signalled == ["main"]
    assert runtime.calls[-1][0] == 15
    assert warnings(journal) == []


async def test_pod_longer_grace_period_changes_nothing() -> None:
    runtime = StoppingRuntime(stop_seconds={"main": 60})
    killer = make_killer(runtime)
    pod = make_pod(termination_grace_period_seconds=20)
    first = asyncio.create_task(killer.kill_pod(pod, running("main")))
    await asyncio.sleep(10)
    first.cancel()
    await killer.kill_pod(pod, running("main"), 15)
    assert runtime.calls == [(0, "stop main 20"), (20, "main ended"), (20, "stop sandbox box")]


async def test_pod_cancelled_caller_keeps_sidecar_order() -> None:
    runtime = StoppingRuntime(stop_seconds={"main": 20})
    killer = make_killer(runtime)
    pod = make_pod(
        make_container("main"), init_containers=[sidecar("side")], termination_grace_period_seconds=100
    )
    first = asyncio.create_task(killer.kill_pod(pod, running("side", "main")))
    await asyncio.sleep(5)
    first.cancel()
    await asyncio.sleep(5)
    await killer.kill_pod(pod, running("side", "main"), 50)
    assert [call for call in runtime.calls if call[1].startswith("stop side")] == [(20, "stop side 40")]


async def test_pod_joins_stop_of_cancelled_sync() -> None:
    """Verify that a pod deleted while a container restarts runs the hook once."""
    runtime = StoppingRuntime(exec_seconds=20)
    killer, pod = make_killer(runtime), make_pod(hooked(), termination_grace_period_seconds=30)
    restart = asyncio.create_task(killer.kill_container(pod, running("main").containers[0], "unhealthy"))
    await asyncio.sleep(1)
    restart.cancel()
    await killer.kill_pod(pod, running("main"), 30)
    assert [call for _, call in runtime.calls if call.startswith("exec")] == [
        "exec main save",
        "exec main exit 0",
    ]


async def test_pod_failed_stop_is_reported_and_repeated() -> None:
    runtime = StoppingRuntime(failures={"main": CriError("StopContainer", "Unknown", "busy")})
    killer, pod = make_killer(runtime), make_pod(termination_grace_period_seconds=30)
    with pytest.raises(KillError, match="busy"):
        await killer.kill_pod(pod, running("main"))
    runtime.failures.clear()
    await killer.kill_pod(pod, running("main"))
    assert runtime.signalled == ["main"]
