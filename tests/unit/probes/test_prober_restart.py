"""Restarts of the agent, and many pods at once, with the clock of the test."""

import asyncio
import itertools
from collections import Counter

import pytest

from pykubelet.api.pod import Container, Probe, TCPSocketAction
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.probes.prober import BATCH_SECONDS, MAX_STARTS_PER_ITERATION, aligned, probe_phase
from tests.support.probes import SECOND, exec_probe, full_pod, observed, pod, ready, running, scene, start

pytestmark = pytest.mark.looptime


# Restarts of the agent


async def test_prober_kubelet_restart_readiness_does_not_flap() -> None:
    asked = full_pod()
    status = ContainerStatus(name="app", ready=True, started=True, container_id="containerd://c1")
    asked.status.container_statuses = [status]
    async with scene() as here:
        old = observed(running("app", "c1", here.clock() - 100 * SECOND))
        assert here.prober.update_status(asked, old)["app"] == (True, True)  # before it is even added
        here.prober.add_pod(asked)
        here.prober.observe(asked, old)
        for _ in range(40):
            assert here.prober.update_status(asked, old)["app"] == (True, True)
            await asyncio.sleep(0.1)
        assert "s" not in here.asked  # it had started
        assert len(here.asked["r"]) >= 3
        here.answers["r"] = 1
        await asyncio.sleep(1.5)
        assert here.prober.update_status(asked, old)["app"] == (True, True)  # not by one failure
        await asyncio.sleep(2.5)
        assert here.prober.update_status(asked, old)["app"] == (True, False)
        assert here.verdicts() == [("readiness", "failure")]


async def test_prober_kubelet_restart_without_status_readiness_does_not_flap() -> None:
    asked = full_pod()
    async with scene() as here:
        old = observed(running("app", "c1", here.clock() - 100 * SECOND))
        here.prober.add_pod(asked)
        here.prober.observe(asked, old)
        for _ in range(40):
            assert here.prober.update_status(asked, old)["app"] == (True, True)
            await asyncio.sleep(0.1)
        assert here.verdicts() == [("startup", "success"), ("readiness", "success")]


async def test_prober_kubelet_restart_without_restores_container_begins_as_new() -> None:
    asked = full_pod()
    status = ContainerStatus(name="app", ready=True, started=True, container_id="containerd://c1")
    asked.status.container_statuses = [status]
    async with scene(restores=False) as here:
        old = observed(running("app", "c1", here.clock() - 100 * SECOND))
        assert here.prober.update_status(asked, old)["app"] == (False, False)
        here.prober.add_pod(asked)
        here.prober.observe(asked, old)
        assert here.prober.update_status(asked, old)["app"] == (False, False)
        await asyncio.sleep(10)
        assert here.prober.update_status(asked, old)["app"] == (True, True)
        assert here.verdicts()[:2] == [("startup", "success"), ("readiness", "success")]


async def test_prober_kubelet_restart_unready_container_is_probed_immediately() -> None:
    asked = pod(Container(name="app", readiness_probe=exec_probe("r", period_seconds=100)))
    status = ContainerStatus(name="app", ready=False, started=True, container_id="containerd://c1")
    asked.status.container_statuses = [status]
    async with scene() as here:
        start(here, asked, age=1000)
        assert ready(here, asked) == (True, False)
        await asyncio.sleep(0.1)
        assert ready(here, asked) == (True, True)


async def test_prober_clock_jumps_back_container_is_not_treated_as_older() -> None:
    asked = pod(Container(name="app", readiness_probe=exec_probe("r")))
    async with scene() as here:
        await asyncio.sleep(600)
        here.clock_error = -3600 * SECOND
        here.answers["r"] = 1
        start(here, asked)
        assert ready(here, asked) == (True, False)
        await asyncio.sleep(0.1)
        here.clock_error = 3600 * SECOND
        assert ready(here, asked) == (True, False)


# Many


async def test_prober_kubelet_restart_spreads_probes_over_period() -> None:
    async with scene() as here:
        for number in range(1000):
            uid = f"u{number}"
            asked = pod(Container(name="app", liveness_probe=exec_probe("l")), uid=uid)
            start(here, asked, f"c{number}", age=1000)
        await asyncio.sleep(10 + BATCH_SECONDS / 2)
        assert len(here.asked["l"]) == 1000
        per_tenth = Counter(int(moment) for moment in here.asked["l"])
        assert max(per_tenth.values()) < 200
        expected = aligned(probe_phase("u7", "app", "liveness") * 10)
        assert any(abs(moment - expected) < 0.001 for moment in here.asked["l"])


async def test_prober_many_probes_due_limits_starts_per_iteration() -> None:
    turns: list[int] = []
    async with scene() as here:
        for number in range(1000):
            probe = Probe(tcp_socket=TCPSocketAction(port="nope"), period_seconds=100)
            asked = pod(Container(name="app", readiness_probe=probe), uid=f"u{number}")
            start(here, asked, f"c{number}")
        begun = len(here.prober._schedule)
        assert begun == 1000
        while min(entry_due for entry_due, *_ in here.prober._schedule._heap) <= here.time():
            await asyncio.sleep(0)
            turns.append(begun - len(here.prober._schedule))
    starts = [later - earlier for earlier, later in itertools.pairwise(turns)]
    assert max(starts) <= MAX_STARTS_PER_ITERATION
    assert len(turns) >= 1000 / MAX_STARTS_PER_ITERATION


async def test_prober_exec_probes_of_many_pods_limited_by_slots() -> None:
    async with scene(exec_slots=4) as here:
        here.seconds_per_answer = 0.1
        most = 0
        for number in range(100):
            asked = pod(Container(name="app", readiness_probe=exec_probe("r")), uid=f"u{number}")
            start(here, asked, f"c{number}")
        await asyncio.sleep(2.6)
        moments = sorted(here.asked["r"])
        assert len(moments) == 100
        for moment in moments:
            most = max(most, sum(moment - 0.0999 < other <= moment for other in moments))
        assert most == 4


async def test_prober_stopped_during_probes_cancels_them() -> None:
    async with scene() as here:
        here.seconds_per_answer = 1000
        for number in range(20):
            start(here, full_pod(f"u{number}"), f"c{number}")
        await asyncio.sleep(0.1)
        assert here.asked["s"]
    assert here.verdicts() == []
