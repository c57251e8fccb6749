"""The end of a pod: its last status, what its deletion waits for, and the removal of what is left."""

import asyncio
from typing import Any

import msgspec
import pytest

from pykubelet.api.pod import Container, ExecAction, Pod, Probe
from pykubelet.api.pod_status import PodStatus
from pykubelet.podsync.contract import KillPodOptions, SyncError
from pykubelet.podsync.reporter import MESSAGE
from pykubelet.status.compute import PREEMPTED, preempted_status
from pykubelet.volumes.errors import VolumeError
from tests.support.pods import NOW, condition, make_pod, make_status
from tests.unit.podsync.ending import EndingNode, cri_failure

pytestmark = pytest.mark.looptime

FINISHED = ["unmount", "remove cgroup"]
REMOVED = ["remove main", "remove sandbox box", "remove logs", "remove directory", "removed"]


def timed(seconds: int = 10, *, policy: str = "Never", deleting: bool = False) -> Pod:
    """Return a pod that started at loop time 0 and has a deadline."""
    pod = make_pod(policy=policy, deleting=deleting, status=PodStatus(phase="Running", start_time=NOW))
    pod.spec.active_deadline_seconds = seconds
    return pod


def preempt(status: PodStatus) -> PodStatus:
    return preempted_status(make_pod(), status, NOW)


def last(node: EndingNode) -> tuple[str, str, str]:
    return node.status.phase, node.status.reason, node.status.message


# Terminal phases


@pytest.mark.parametrize("policy", ["Never", "Always", "OnFailure"])
@pytest.mark.parametrize("code", [0, 1])
async def test_sync_deadline_exceeded_pod_stays_failed(policy: str, code: int) -> None:
    node = EndingNode(timed(policy=policy), exit_code=code)
    assert await node.life.sync(node.pod) == (False, 10)
    await asyncio.sleep(9.5)
    assert await node.life.sync(node.pod) == (False, 0.5)
    await asyncio.sleep(0.5)
    assert await node.life.sync(node.pod) == (True, None)
    assert last(node) == ("Failed", "DeadlineExceeded", MESSAGE)
    await node.life.terminate(node.pod.uid, node.pod, KillPodOptions(30))
    assert node.status.container_statuses[0].state.terminated is not None
    assert last(node) == ("Failed", "DeadlineExceeded", MESSAGE)
    assert [e.message for e in node.journal.events("u1") if e.reason == "DeadlineExceeded"] == [MESSAGE]


@pytest.mark.parametrize(
    ("end", "expected"), [(12, ("Failed", "DeadlineExceeded", MESSAGE)), (8, ("Succeeded", "", ""))]
)
@pytest.mark.parametrize("deleting", [False, True])
async def test_deadline_after_restart_counts_when_containers_ended(
    end: float, expected: tuple[str, str, str], deleting: bool
) -> None:
    """Verify that a kubelet killed while it stopped the pod, at 10 s, does not change the outcome."""
    node = EndingNode(timed(deleting=deleting))
    await asyncio.sleep(20)
    node.exit("main", 0, at=end)
    if not deleting:
        assert await node.life.sync(node.pod) == (True, None)
    await node.life.terminate(node.pod.uid, node.pod, KillPodOptions(30))
    assert last(node) == expected


async def test_terminate_pod_status_survives_successful_exit() -> None:
    node = EndingNode(make_pod(status=make_status("Running")))
    await node.life.sync(node.pod)
    await node.life.terminate(node.pod.uid, node.pod, KillPodOptions(1, preempt))
    assert last(node) == ("Failed", "Preempting", PREEMPTED)
    conditions = {c.type: (c.status, c.reason) for c in node.status.conditions}
    assert conditions["DisruptionTarget"] == ("True", "TerminationByKubelet")
    assert conditions["Ready"] == ("False", "PodFailed")


@pytest.mark.parametrize("cluster", [True, False])
async def test_terminate_pod_status_is_set_before_containers_stop(cluster: bool) -> None:
    node = EndingNode(make_pod(), stop_seconds=20)
    life = node.new_life(cluster=cluster)
    stop = asyncio.create_task(life.terminate(node.pod.uid, node.pod, KillPodOptions(30, preempt)))
    await asyncio.sleep(5)
    assert node.calls == ["stop main"]
    assert last(node) == ("Failed", "Preempting", PREEMPTED)
    await stop


async def test_terminate_pod_status_keeps_earlier_terminal_phase() -> None:
    node = EndingNode(make_pod(policy="Never"))
    node.exit("main", 0)
    await node.life.sync(node.pod)
    await node.life.terminate(node.pod.uid, node.pod, KillPodOptions(1, preempt))
    assert last(node) == ("Succeeded", "", "")


async def test_terminate_after_restart_keeps_phase_of_api_server() -> None:
    evicted = make_status("Failed", reason="Evicted", message="low on memory")
    evicted.conditions.append(condition("DisruptionTarget", reason="TerminationByKubelet"))
    node = EndingNode(make_pod(policy="Never", status=evicted))
    await node.life.sync(node.pod)
    await node.life.terminate(node.pod.uid, node.pod, KillPodOptions(1))
    assert last(node) == ("Failed", "Evicted", "low on memory")
    assert "DisruptionTarget" in {c.type for c in node.status.conditions}


# Probes and hooks


async def test_terminate_stops_liveness_and_startup_probes() -> None:
    probes: dict[str, Any] = {
        kind: Probe(exec=ExecAction(command=[kind]), period_seconds=1, initial_delay_seconds=0)
        for kind in ("liveness_probe", "readiness_probe")
    }
    pod = make_pod(status=make_status("Running"))
    pod.spec.containers = [Container(name="main", **probes)]
    node = EndingNode(pod, stop_seconds=20)
    probing = asyncio.create_task(node.prober.run())
    await node.life.sync(pod)
    await asyncio.sleep(5)
    assert {command for _, command in node.probes} == set(probes)
    node.probes.clear()
    await node.life.terminate(pod.uid, pod, KillPodOptions(30))
    assert {command for _, command in node.probes} == {"readiness_probe"}
    assert max(second for second, _ in node.probes) > 20
    node.probes.clear()
    await asyncio.sleep(10)
    assert node.probes == []
    probing.cancel()


# Deletion


async def ended(pod: Pod) -> EndingNode:
    """Return a node on which everything of the pod has just been stopped."""
    node = EndingNode(pod)
    await node.life.sync(pod)
    await node.life.terminate(pod.uid, pod, KillPodOptions(1))
    node.calls.clear()
    return node


async def test_clean_up_deletes_pod_before_removing_it() -> None:
    node = await ended(make_pod(deleting=True))
    node.fate = "deleted"
    remnants = await node.life.clean_up(node.pod.uid, node.pod)
    assert node.calls == [*FINISHED, "status reported", "delete in API server", "gone"]
    assert remnants is not None
    await node.life.remove(remnants)
    # The sandbox was stopped with the containers.
    assert node.calls[5:] == REMOVED


async def test_clean_up_waits_until_status_is_reported() -> None:
    node = await ended(make_pod(deleting=True))
    node.fate = "deleted"
    node.may_report.clear()
    clean_up = asyncio.create_task(node.life.clean_up(node.pod.uid, node.pod))
    await asyncio.sleep(60)
    assert node.calls == FINISHED
    assert "main" in node.containers
    node.may_report.set()
    await clean_up
    assert node.calls[2:] == ["status reported", "delete in API server", "gone"]


async def test_clean_up_ended_pod_stays_known() -> None:
    node = await ended(make_pod(policy="Never"))
    assert await node.life.clean_up(node.pod.uid, node.pod) is None
    assert node.calls == FINISHED
    assert node.status.phase == "Succeeded"


async def test_clean_up_failed_unmount_keeps_api_object() -> None:
    node = await ended(make_pod(deleting=True))
    node.fate = "deleted"
    node.failures["unmount"] = VolumeError("busy")
    with pytest.raises(SyncError, match="busy"):
        await node.life.clean_up(node.pod.uid, node.pod)
    assert node.calls == ["unmount"]


@pytest.mark.parametrize("stuck", ["remove main", "remove sandbox box", "remove directory"])
@pytest.mark.parametrize("fate", ["deleted", "gone"])
async def test_clean_up_does_not_wait_for_removal(stuck: str, fate: str) -> None:
    """Verify that volumes and the API object are released although a remnant cannot be removed."""
    node = await ended(make_pod(deleting=True))
    node.fate = "deleted" if fate == "deleted" else "gone"
    node.failures[stuck] = OSError("busy") if "directory" in stuck else cri_failure()
    remnants = await node.life.clean_up(node.pod.uid, node.pod)
    assert remnants is not None
    reported = ["status reported", "delete in API server"] if fate == "deleted" else []
    assert node.calls == [*FINISHED, *reported, "gone"]
    node.calls.clear()
    for _ in range(2):
        with pytest.raises(SyncError, match=r"cannot remove pod: .*busy"):
            await node.life.remove(remnants)
        assert "removed" not in node.calls
        assert node.calls[-2:] == ["remove logs", "remove directory"]
        # Everything else is removed, except the sandbox of a container that is not.
        assert bool(node.containers) == (stuck == "remove main")
        assert bool(node.sandboxes) == (stuck != "remove directory")
        node.calls.clear()
    del node.failures[stuck]
    await node.life.remove(remnants)
    assert node.calls[-1] == "removed"
    assert not node.containers
    assert not node.sandboxes


async def test_remove_orphan_found_after_restart_stops_its_sandbox() -> None:
    """Verify that a new kubelet process removes what the previous one did not get to."""
    node = EndingNode(make_pod())
    node.exit("main", 0)
    node.sandboxes = (msgspec.structs.replace(node.sandboxes[0], ready=False),)
    node.fate = "gone"
    await node.life.terminate(node.pod.uid, None, KillPodOptions())
    remnants = await node.life.clean_up(node.pod.uid, None)
    assert remnants is not None
    await node.life.remove(remnants)
    assert node.calls == ["stop sandbox box", *FINISHED, "gone", *REMOVED]
