"""Schedules, thresholds and lives of containers, with the clock of the test."""

import asyncio
import itertools
from datetime import UTC, datetime

import pytest

from pykubelet.api.pod import Container
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.probes.prober import MAX_RESULTS
from pykubelet.transport.errors import CommandTimedOut, CriError
from tests.support.probes import exec_probe, exited, full_pod, observed, pod, ready, running, scene, start

pytestmark = pytest.mark.looptime


async def test_prober_readiness_probed_immediately_then_every_period() -> None:
    asked = pod(Container(name="app", readiness_probe=exec_probe("r")))
    async with scene() as here:
        start(here, asked)
        assert ready(here, asked) == (True, False)
        await asyncio.sleep(0.01)
        assert ready(here, asked) == (True, True)
        await asyncio.sleep(60)
    first, second, *_ = here.asked["r"]
    assert first == 0
    assert 5 <= second <= 10
    gaps = {round(later - earlier, 3) for earlier, later in itertools.pairwise(here.asked["r"][1:])}
    assert gaps == {10.0}
    assert here.verdicts() == [("readiness", "success")]
    assert here.events == []


async def test_prober_history_has_last_results_and_last_failure_bounded() -> None:
    asked = pod(Container(name="app", readiness_probe=exec_probe("r", period_seconds=1)))
    async with scene() as here:
        start(here, asked)
        assert here.prober.history("u1")[0].passed == ()
        here.answers["r"] = lambda now: int(1 < now < 4)
        await asyncio.sleep(10)
        (found,) = here.prober.history("u1")
        runs = len(here.asked["r"])
        assert len(found.passed) == runs < MAX_RESULTS
        assert list(found.passed) == [not 1 < now < 4 for now in here.asked["r"]]
        assert (found.container, found.kind, found.failure) == ("app", "readiness", "output")
        assert found.last_run == pytest.approx(here.clock() / 1e9, abs=1.5)
        await asyncio.sleep(10_000)
        (found,) = here.prober.history("u1")
        assert found.passed == (True,) * MAX_RESULTS
        here.prober.remove_pod("u1")
        assert here.prober.history("u1") == []


async def test_prober_slow_starting_container_is_retried_within_first_period() -> None:
    asked = pod(Container(name="app", readiness_probe=exec_probe("r", period_seconds=10)))
    async with scene() as here:
        here.answers["r"] = lambda now: 0 if now >= 1.2 else 1
        start(here, asked)
        await asyncio.sleep(3)
    assert here.asked["r"] == [0, 0.5, 1.5]
    assert here.verdicts() == [("readiness", "success")]
    assert here.events == []


async def test_prober_initial_delay_counts_from_container_start() -> None:
    probe = exec_probe("r", initial_delay_seconds=20)
    async with scene() as here:
        start(here, pod(Container(name="app", readiness_probe=probe)), age=5)
        await asyncio.sleep(60)
    assert here.asked["r"][0] == pytest.approx(15)


async def test_prober_readiness_changes_at_thresholds() -> None:
    probe = exec_probe("r", period_seconds=1, failure_threshold=2, success_threshold=3)
    asked = pod(Container(name="app", readiness_probe=probe))
    async with scene() as here:
        start(here, asked)
        await asyncio.sleep(2.5)
        assert here.verdicts() == [("readiness", "success")]
        here.answers["r"] = 1
        await asyncio.sleep(5)
        assert here.verdicts()[1:] == [("readiness", "failure")]
        assert ready(here, asked) == (True, False)
        assert here.events[0] == ("app", "Unhealthy", "Readiness probe failed: output")
        here.answers["r"] = 0
        await asyncio.sleep(1.5)
        assert len(here.verdicts()) == 2
        await asyncio.sleep(2)
        assert here.verdicts()[2:] == [("readiness", "success")]


async def test_prober_liveness_failed_stops_until_container_restarts() -> None:
    probe = exec_probe("l", period_seconds=5, failure_threshold=3)
    asked = pod(Container(name="app", liveness_probe=probe))
    async with scene() as here:
        here.answers["l"] = 1
        start(here, asked)
        assert here.prober.results.get("liveness", "c1") == "success"
        await asyncio.sleep(100)
        assert len(here.asked["l"]) == 3
        assert 2.5 <= here.asked["l"][0] <= 5
        assert here.verdicts() == [("liveness", "failure")]
        assert here.prober.results.get("liveness", "c1") == "failure"
        assert here.events == [("app", "Unhealthy", "Liveness probe failed: output")] * 3
        assert ready(here, asked) == (True, True)
        here.prober.observe(asked, observed(exited("app", "c1")))
        here.answers["l"] = 0
        start(here, asked, "c2")
        assert here.prober.results.get("liveness", "c1") is None
        assert here.prober.results.get("liveness", "c2") == "success"
        await asyncio.sleep(10)
        assert len(here.asked["l"]) > 3
        assert here.asked_ids[-1] == "c2"


async def test_prober_startup_probe_precedes_liveness_and_readiness() -> None:
    asked = pod(
        Container(
            name="app",
            startup_probe=exec_probe("s", period_seconds=2, failure_threshold=10),
            readiness_probe=exec_probe("r"),
            liveness_probe=exec_probe("l"),
        )
    )
    async with scene() as here:
        here.answers["s"] = lambda now: 0 if now >= 7 else 1
        start(here, asked)
        await asyncio.sleep(6.9)
        assert set(here.asked) == {"s"}
        assert ready(here, asked) == (False, False)
        await asyncio.sleep(2)
        assert here.verdicts() == [("startup", "success"), ("readiness", "success")]
        assert ready(here, asked) == (True, True)
        assert here.asked["r"][0] == here.asked["s"][-1] == 8
        times = len(here.asked["s"])
        await asyncio.sleep(30)
        assert len(here.asked["s"]) == times
        assert 8 + 5 <= here.asked["l"][0] <= 8 + 10


async def test_prober_startup_never_succeeds_fails_after_threshold_periods() -> None:
    probe = exec_probe("s", period_seconds=3, failure_threshold=4)
    asked = pod(Container(name="app", startup_probe=probe, liveness_probe=exec_probe("l")))
    async with scene() as here:
        here.answers["s"] = 1
        start(here, asked)
        await asyncio.sleep(11.9)
        assert here.verdicts() == []
        await asyncio.sleep(100)
        assert here.verdicts() == [("startup", "failure")]
        assert here.asked["s"][-1] == 12
        assert len(here.events) == 4
        assert here.events[0][2] == "Startup probe failed: output"
        assert "l" not in here.asked


async def test_prober_probes_sidecars_but_not_other_init_containers() -> None:
    sidecar = Container(name="app", restart_policy="Always", readiness_probe=exec_probe("side"))
    ordinary = Container(name="init", readiness_probe=exec_probe("init"))
    asked = pod(init=(ordinary, sidecar))
    async with scene() as here:
        here.prober.add_pod(asked)
        seen = observed(running("app", "c1", here.clock()), running("init", "c2", here.clock()))
        here.prober.observe(asked, seen)
        await asyncio.sleep(1)
        assert set(here.asked) == {"side"}
        assert here.prober.update_status(asked, seen)["app"] == (True, True)


async def test_prober_timeout_is_failure_and_error_is_ignored() -> None:
    probe = exec_probe("l", period_seconds=1, failure_threshold=2)
    asked = pod(Container(name="app", liveness_probe=probe))
    async with scene() as here:
        here.answers["l"] = CriError("ExecSync", "Unavailable", "runtime is away")
        start(here, asked)
        await asyncio.sleep(10)
        assert here.verdicts() == []
        assert len(here.asked["l"]) % 3 == 0  # three tries each
        assert here.events[0][1:] == (
            "Unhealthy",
            "Liveness probe errored and resulted in unknown state: "
            "rpc error: code = Unavailable desc = runtime is away",
        )
        here.events.clear()
        here.answers["l"] = CommandTimedOut(["l"], 1, "late")
        await asyncio.sleep(2.5)
        assert here.verdicts() == [("liveness", "failure")]
        assert here.events[0][2] == 'Liveness probe failed: command timed out: "l" timed out after 1s'


async def test_prober_exception_in_probe_does_not_stop_others() -> None:
    async with scene() as here:
        here.answers["bad"] = ZeroDivisionError("oops")
        start(here, pod(Container(name="app", readiness_probe=exec_probe("bad", period_seconds=1))))
        start(here, pod(Container(name="app", readiness_probe=exec_probe("good")), uid="u2"))
        await asyncio.sleep(3)
        assert here.verdicts() == [("readiness", "success")]
        assert "ZeroDivisionError: oops" in here.events[0][2]
        assert len(here.asked["bad"]) >= 3


async def test_prober_container_exited_late_result_is_discarded() -> None:
    asked = pod(Container(name="app", readiness_probe=exec_probe("r", period_seconds=1)))
    async with scene() as here:
        here.seconds_per_answer = 5
        start(here, asked)
        await asyncio.sleep(1)
        here.prober.observe(asked, observed(exited("app", "c1")))
        await asyncio.sleep(60)
        assert here.asked["r"] == [0]
        assert here.verdicts() == []
        start(here, asked, "c2")
        await asyncio.sleep(1)
        start(here, asked, "c3")  # replaced while being asked
        await asyncio.sleep(5.5)
        assert [update.container_id for update in here.updates] == ["c3"]


async def test_prober_slow_probe_does_not_run_concurrently() -> None:
    async with scene() as here:
        here.seconds_per_answer = 2.5
        start(here, pod(Container(name="app", readiness_probe=exec_probe("r", period_seconds=1))))
        await asyncio.sleep(20)
    gaps = [later - earlier for earlier, later in itertools.pairwise(here.asked["r"])]
    assert min(gaps) >= 2.5


async def test_prober_container_missing_temporarily_keeps_result() -> None:
    asked = pod(Container(name="app", readiness_probe=exec_probe("r", period_seconds=1)))
    async with scene() as here:
        start(here, asked)
        await asyncio.sleep(3)
        here.prober.observe(asked, observed())
        await asyncio.sleep(5)
        times = len(here.asked["r"])
        start(here, asked, age=8)
        assert ready(here, asked) == (True, True)
        await asyncio.sleep(3)
        assert len(here.asked["r"]) >= times + 2
        assert here.verdicts() == [("readiness", "success")]


# The ends of pods


async def test_prober_terminating_pod_runs_only_readiness() -> None:
    asked = full_pod()
    async with scene() as here:
        start(here, asked)
        await asyncio.sleep(3)
        here.prober.stop_liveness_and_startup("u1")
        counts = {name: len(times) for name, times in here.asked.items()}
        here.answers["r"] = here.answers["l"] = 1
        await asyncio.sleep(10)
        assert len(here.asked["l"]) == counts["l"]
        assert len(here.asked["r"]) > counts["r"]
        assert ready(here, asked) == (True, False)
        assert here.prober.results.get("liveness", "c1") is None


async def test_prober_terminating_pod_not_started_stays_not_started() -> None:
    asked = full_pod()
    async with scene() as here:
        here.answers["s"] = 1
        start(here, asked)
        await asyncio.sleep(1)
        here.prober.stop_liveness_and_startup("u1")
        await asyncio.sleep(10)
        assert ready(here, asked) == (False, False)
        assert "r" not in here.asked


async def test_prober_add_terminating_pod_runs_only_readiness() -> None:
    asked = full_pod()
    asked.metadata.deletion_timestamp = datetime.now(UTC)
    status = ContainerStatus(name="app", ready=True, started=True, container_id="containerd://c1")
    asked.status.container_statuses = [status]
    async with scene() as here:
        start(here, asked, age=100)
        await asyncio.sleep(5)
        assert set(here.asked) == {"r"}
        assert ready(here, asked) == (True, True)


@pytest.mark.parametrize("how", ["remove", "cleanup"])
async def test_prober_pod_removed_drops_metrics_and_results(how: str) -> None:
    async with scene() as here:
        start(here, full_pod())
        start(here, full_pod("u2"), "c2")
        await asyncio.sleep(3)
        labels = {"container": "app", "pod": "pod-u1", "namespace": "ns"}
        total = {**labels, "probe_type": "Readiness", "result": "successful", "pod_uid": "u1"}
        assert (here.metric("prober_probe_total", **total) or 0) >= 2
        count = here.metric("prober_probe_duration_seconds_count", **labels, probe_type="Readiness")
        assert count == here.metric("prober_probe_total", **total)
        assert here.metric("prober_probe_total", **{**total, "result": "failed"}) is None
        if how == "remove":
            here.prober.remove_pod("u1")
            here.prober.remove_pod("u1")
        else:
            here.prober.cleanup({"u2"})
        assert here.metric("prober_probe_total", **total) is None
        assert here.metric("prober_probe_duration_seconds_count", **labels, probe_type="Readiness") is None
        assert here.prober.results.get("readiness", "c1") is None
        here.asked_ids.clear()
        await asyncio.sleep(5)
        assert set(here.asked_ids) == {"c2"}


async def test_prober_listener_may_remove_pod() -> None:
    async with scene() as here:
        here.prober.results.subscribe(lambda update: here.prober.remove_pod(update.pod_uid))
        start(here, full_pod())
        await asyncio.sleep(10)
        assert here.verdicts() == [("startup", "success")]
        assert set(here.asked) == {"s"}


async def test_prober_pod_not_added_is_not_probed() -> None:
    asked = full_pod()
    async with scene() as here:
        here.prober.observe(asked, observed(running("app", "c1", here.clock())))
        await asyncio.sleep(5)
        assert not here.asked
        here.prober.add_pod(asked)
        here.prober.add_pod(asked)
        start(here, asked)
        await asyncio.sleep(0.1)
        assert here.asked["s"] == [5]
