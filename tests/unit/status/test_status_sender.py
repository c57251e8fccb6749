"""When the sender tells the API server what, and how often; faults are in `test_status_sender_faults.py`."""

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.meta import to_document
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.status import manager as status_sender
from pykubelet.status.manager import (
    BURST_HOLD_SECONDS,
    HOLD_SECONDS,
    MAX_CONCURRENT_REQUESTS,
    QUEUED_HOLD_SECONDS,
    StatusMetrics,
)
from pykubelet.status.patch import merged_status
from tests.support.pods import LATER, condition, container, ended, make_pod, make_status, waiting
from tests.unit.status.sender_api import Api, pending, sending

pytestmark = pytest.mark.looptime


async def test_status_manager_metric_counts_seconds_since_first_change() -> None:
    pod, registry = make_pod(), CollectorRegistry()
    api = Api(pod)
    async with sending(api, metrics=StatusMetrics(registry)) as sender:
        sender.set_status(pod, pending())
        await asyncio.sleep(0.3)
        sender.set_status(pod, make_status())
        await asyncio.sleep(60)
    assert registry.get_sample_value("kubelet_pod_status_sync_duration_seconds_count") == 1
    total = registry.get_sample_value("kubelet_pod_status_sync_duration_seconds_sum")
    assert total == pytest.approx(0.3, abs=0.05)


async def test_status_manager_quick_start_sends_one_patch() -> None:
    pod = make_pod()
    api = Api(pod)
    async with sending(api) as sender:
        sender.set_status(pod, pending())
        await asyncio.sleep(0.3)
        assert api.verbs == []
        sender.set_status(pod, make_status())
        await asyncio.sleep(0.1)
        assert api.verbs == ["patch web"]
        assert api.phases == {"web": "Running"}
        api.sync(sender)
        await asyncio.sleep(60)
        assert api.verbs == ["patch web"]


async def test_status_manager_slow_start_sends_waiting_reason_after_hold() -> None:
    pod = make_pod()
    api = Api(pod)
    async with sending(api) as sender:
        for _ in range(20):
            sender.set_status(pod, pending())
            await asyncio.sleep(0.1)
        assert api.verbs == ["patch web"]
        assert abs(api.requests[0][0] - HOLD_SECONDS) < 0.1
        assert api.pods[pod.full_name].status.container_statuses[0].state.waiting is not None


async def test_status_manager_burst_sends_running_immediately_and_holds_pending() -> None:
    first, second = make_pod("u1", "first"), make_pod("u2", "second")
    api = Api(first, second)
    async with sending(api, crowded=lambda: True) as sender:
        sender.set_status(first, pending())
        sender.set_status(second, pending())
        await asyncio.sleep(5)
        assert api.verbs == []
        sender.set_status(first, make_status())
        await asyncio.sleep(0.1)
        assert api.verbs == ["patch first"]
        await asyncio.sleep(QUEUED_HOLD_SECONDS - 4)
        assert api.phases == {"first": "Running", "second": "Pending"}
        assert api.verbs == ["patch first", "patch second"]
        # A new wait is a new one, not the rest of the last.
        sender.set_status(second, make_status("Pending", container("main", waiting("ErrImagePull"))))
        await asyncio.sleep(5)
        assert len(api.verbs) == 2
        await asyncio.wait_for(sender.wait_reported(second.uid), 1)
        assert len(api.verbs) == 3


async def test_status_manager_burst_failure_held_shorter_than_queued_pod() -> None:
    queued, failing = make_pod("u1", "queued"), make_pod("u2", "failing")
    api = Api(queued, failing)
    async with sending(api, crowded=lambda: True) as sender:
        sender.set_status(queued, pending())
        sender.set_status(failing, make_status("Pending", container("main", waiting("ErrImagePull"))))
        await asyncio.sleep(BURST_HOLD_SECONDS + 0.1)
        assert api.verbs == ["patch failing"]
        await asyncio.sleep(QUEUED_HOLD_SECONDS - BURST_HOLD_SECONDS)
        assert api.verbs == ["patch failing", "patch queued"]


async def test_status_manager_burst_held_status_not_computed_until_burst_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Verify that the cost of a pod does not grow with the time for which it waits among others."""
    pods = [make_pod(f"u{number}", f"pod-{number}") for number in range(20)]
    api, crowd, computed = Api(*pods), [True], list[str]()

    def counted(pod: Pod, *more: Any, **facts: Any) -> PodStatus:
        computed.append(pod.uid)
        return merged_status(pod, *more, **facts)

    monkeypatch.setattr(status_sender, "merged_status", counted)
    async with sending(api, crowded=lambda: bool(crowd)) as sender:
        for pod in pods:
            sender.set_status(pod, pending())
        await asyncio.sleep(QUEUED_HOLD_SECONDS - 1)
        assert (computed, api.verbs) == ([], [])
        crowd.clear()
        await asyncio.sleep(1.5)
        assert api.verbs == [f"patch {pod.metadata.name}" for pod in pods]
        # Once for what is sent, and once for what the API server made of it.
        assert len(computed) == 2 * len(pods)


async def test_status_manager_burst_ends_held_status_is_sent() -> None:
    pod = make_pod()
    api = Api(pod)
    crowd = [True]
    async with sending(api, crowded=lambda: bool(crowd)) as sender:
        sender.set_status(pod, pending())
        await asyncio.sleep(3.5)
        crowd.clear()
        await asyncio.sleep(1)
        assert api.verbs == ["patch web"]


async def test_expedite_delayed_status_is_sent_immediately_also_in_burst() -> None:
    """Verify that only what is delayed at that time is sent early, and nothing twice."""
    pod = make_pod()
    api = Api(pod)
    async with sending(api, crowded=lambda: True) as sender:
        sender.expedite(pod.uid)
        sender.set_status(pod, pending())
        await asyncio.sleep(HOLD_SECONDS + 1)
        assert api.verbs == []
        sender.expedite(pod.uid)
        await asyncio.sleep(0.1)
        assert api.verbs == ["patch web"]
        api.sync(sender)
        sender.expedite(pod.uid)
        sender.set_status(pod, make_status("Pending", container("main", waiting("ErrImagePull"))))
        await asyncio.sleep(BURST_HOLD_SECONDS - 1)
        assert api.verbs == ["patch web"]
        sender.expedite(pod.uid)
        await asyncio.sleep(0.1)
        assert api.verbs == ["patch web"] * 2


async def test_status_manager_only_observed_generation_changed_is_held() -> None:
    known = make_status(conditions=[condition("Ready", observed_generation=1)], observed_generation=1)
    pod = make_pod(status=known)
    pod.metadata.deletion_timestamp = LATER
    api = Api(pod)
    async with sending(api, {pod.uid}) as sender:
        seen = make_status(conditions=[condition("Ready", observed_generation=2)], observed_generation=2)
        sender.set_status(pod, seen)
        await asyncio.sleep(BURST_HOLD_SECONDS / 2)
        assert api.verbs == []
        await asyncio.sleep(BURST_HOLD_SECONDS)
        assert api.verbs == ["patch web"]
        gone = [condition("Ready", "False", observed_generation=2)]
        sender.set_status(pod, make_status(conditions=gone, observed_generation=2))
        await asyncio.sleep(HOLD_SECONDS + 0.1)
        assert api.verbs == ["patch web"] * 2


async def test_status_manager_status_unchanged_sends_nothing() -> None:
    pod = make_pod(status=make_status())
    api = Api(pod)
    async with sending(api) as sender:
        again = make_status(
            conditions=[condition("ContainersReady", at=LATER), condition("Ready", at=LATER)],
            start_time=LATER,
        )
        sender.set_status(pod, again)
        await asyncio.sleep(60)
        assert api.requests == []
        await asyncio.wait_for(sender.wait_reported(pod.uid), 1)


async def test_status_manager_request_in_flight_sends_only_newest_afterwards() -> None:
    pod = make_pod()
    api = Api(pod, delay=1.0)
    async with sending(api) as sender:
        sender.set_status(pod, make_status(ready="False"))
        await asyncio.sleep(0.5)
        for count in range(1, 6):
            sender.set_status(pod, make_status("Running", container(restart_count=count)))
        await asyncio.sleep(5)
        assert api.verbs == ["patch web"] * 2
        assert api.pods[pod.full_name].status.container_statuses[0].restart_count == 5


async def test_status_manager_limits_concurrent_requests() -> None:
    pods = [make_pod(f"u{number}", f"p{number}") for number in range(40)]
    api = Api(*pods, delay=0.5)
    async with sending(api) as sender:
        for pod in pods:
            sender.set_status(pod, make_status())
        await asyncio.sleep(30)
        assert set(api.phases.values()) == {"Running"}
        assert MAX_CONCURRENT_REQUESTS - 1 <= api.most <= MAX_CONCURRENT_REQUESTS


async def test_status_manager_status_overwritten_is_corrected_with_rate_limit() -> None:
    pod = make_pod()
    api = Api(pod)
    async with sending(api) as sender:
        sender.set_status(pod, make_status())
        await asyncio.sleep(0.1)
        api.sync(sender)
        for _ in range(50):
            document = to_document(api.pods[pod.full_name].status)
            document["phase"] = "Pending"
            api.write(api.pods[pod.full_name], document)
            api.sync(sender)
            await asyncio.sleep(0.1)
        await asyncio.sleep(5)
        assert api.phases == {"web": "Running"}
        assert 3 <= len(api.verbs) <= 8


async def test_status_manager_foreign_conditions_unchanged() -> None:
    pod = make_pod()
    api = Api(pod)
    async with sending(api) as sender:
        sender.set_status(pod, make_status())
        await asyncio.sleep(0.1)
        document = to_document(api.pods[pod.full_name].status)
        document["conditions"].append({"type": "example.com/gate", "status": "True"})
        api.write(api.pods[pod.full_name], document)
        api.sync(sender)
        sender.set_status(pod, make_status(ready="False"))
        await asyncio.sleep(5)
        conditions = {c.type: c.status for c in api.pods[pod.full_name].status.conditions}
        assert conditions == {"Ready": "False", "ContainersReady": "False", "example.com/gate": "True"}


async def test_status_manager_field_dropped_by_server_is_not_resent() -> None:
    pod = make_pod()
    api = Api(pod)
    api.drops = {"observedGeneration", "podIP"}
    async with sending(api) as sender:
        sender.set_status(pod, make_status(pod_ip="10.0.0.1"))
        for _ in range(10):
            await asyncio.sleep(5)
            api.sync(sender)
            sender.check(pod.uid)
        assert api.verbs == ["patch web"]
        sender.set_status(pod, make_status(pod_ip="10.0.0.1", ready="False"))
        await asyncio.sleep(5)
        assert api.verbs == ["patch web"] * 2


async def test_status_manager_terminal_phase_sent_only_after_containers_stop() -> None:
    pod = make_pod(policy="Never", status=make_status())
    api, running = Api(pod), {"u1"}
    async with sending(api, running) as sender:
        sender.set_status(pod, make_status("Failed", container("main", ended(1)), ready="False"))
        await asyncio.sleep(5)
        assert api.phases == {"web": "Running"}
        running.clear()
        sender.check(pod.uid)
        await asyncio.sleep(1)
        assert api.phases == {"web": "Failed"}


async def test_wait_reported_sends_newest_status_without_hold() -> None:
    pod = make_pod(deleting=True)
    api = Api(pod)
    async with sending(api) as sender:
        sender.set_status(pod, make_status())
        sender.set_status(pod, make_status("Succeeded", container("main", ended(0)), ready="False"))
        began = asyncio.get_running_loop().time()
        await sender.wait_reported(pod.uid)
        assert asyncio.get_running_loop().time() - began < 0.1
        assert api.phases == {"web": "Succeeded"}
        assert api.verbs == ["patch web"]


async def test_wait_reported_pod_forgotten_returns() -> None:
    pod = make_pod()
    api = Api(pod, delay=5)
    async with sending(api) as sender:
        sender.set_status(pod, make_status("Failed"))
        waits = asyncio.ensure_future(sender.wait_reported(pod.uid))
        await asyncio.sleep(1)
        sender.forget(pod.uid)
        await asyncio.wait_for(waits, 1)
        await sender.wait_reported(pod.uid)
        await asyncio.sleep(60)
        assert len(api.verbs) == 1


async def test_status_manager_mirror_pod_created_receives_status_immediately() -> None:
    static, mirror = make_pod("static"), make_pod("m1")
    api = Api()
    async with sending(api) as sender:
        sender.set_status(static, make_status())
        await asyncio.sleep(10)
        assert api.verbs == []
        for uid in ("m1", "m2"):
            mirror = make_pod(uid)
            api.pods[mirror.full_name] = api.watched["static"] = mirror
            sender.handle_object_update("static")
            await asyncio.sleep(0.1)
            assert api.phases == {"web": "Running"}
            del api.pods[mirror.full_name], api.watched["static"]
            sender.set_status(static, make_status(ready="False"))
            await asyncio.sleep(10)
            sender.set_status(static, make_status())
