"""Evictions for process IDs and for soft thresholds, and a kubelet that is killed during an eviction."""

import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.cluster_node import ClusterNode
from tests.support.node_pressure import (
    MI,
    available_memory,
    available_pids,
    condition,
    memory_pod,
    process_script,
    wait_condition,
)
from tests.support.plane import Document

pytestmark = [pytest.mark.machine, pytest.mark.pressure]
StartNode = Callable[..., ClusterNode]
MANY, FEW, PID_DISTANCE = 3600, 50, 1800
"""Processes of pods, and the distance to the threshold: other tests have many processes, too."""
LARGE_MI, SMALL_MI, MEMORY_DISTANCE_MI, RECLAIM_MI = 1500, 1000, 1500, 1000
"""Without the large pod the threshold is not met, but only without both is the minimum reclaim available."""
SOFT_SECONDS, MAX_GRACE_SECONDS, TRANSITION_SECONDS = 4, 4, 8
PATIENCE = 90


def api_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def evicted_status(node: ClusterNode, pod: Document) -> Document:
    """Wait until a pod is evicted, and return its status, which is complete."""
    status: Document = node.wait_pod_phase(pod, "Failed", PATIENCE)["status"]
    assert status["reason"] == "Evicted"
    (target,) = (one for one in status["conditions"] if one["type"] == "DisruptionTarget")
    assert (target["status"], target["reason"]) == ("True", "TerminationByKubelet")
    assert target["message"] == status["message"]
    assert all("terminated" in one["state"] for one in status["containerStatuses"])
    return status


def evicted_at(node: ClusterNode, pod: Document) -> float:
    """Return the time at which the eviction of a pod began; upstream's DisruptionTarget is of its end."""
    events = node.plane.events(pod["metadata"]["namespace"], pod["metadata"]["name"])
    return min(api_time(event["firstTimestamp"]) for event in events if event["reason"] == "Evicted")


def check_undisturbed(node: ClusterNode, pod: Document) -> None:
    """Fail unless a pod has run without a restart, and nothing says that it was evicted."""
    found = node.api_pod(pod)
    assert found is not None
    status = found["status"]
    assert (status["phase"], status["containerStatuses"][0]["restartCount"]) == ("Running", 0)
    assert "reason" not in status
    assert all(one["type"] != "DisruptionTarget" for one in status["conditions"])


def test_eviction_process_ids_pod_with_most_evicted_and_node_recovers(
    start_node: StartNode, namespace: str
) -> None:
    threshold = available_pids() - PID_DISTANCE
    node = start_node(
        {
            "evictionHard": {"pid.available": str(threshold)},
            "evictionPressureTransitionPeriod": f"{TRANSITION_SECONDS}s",
            "podPidsLimit": 2 * MANY,
        }
    )
    kept = node.create_pod(namespace, "few", process_script(FEW))
    node.wait_pod_ready(kept)
    many = node.create_pod(namespace, "many", process_script(MANY))
    pressure = wait_condition(node, "PIDPressure", "True")
    status = evicted_status(node, many)
    numbers = re.fullmatch(
        r"The node was low on resource: pids\. Threshold quantity: (\d+), available: (\d+)\. ",
        status["message"],
    )
    assert numbers is not None, status["message"]
    assert int(numbers[1]) == threshold > int(numbers[2])
    assert (pressure["reason"], pressure["message"]) == (
        "KubeletHasInsufficientPID",
        "kubelet has insufficient PID available",
    )
    rejected = node.wait_pod_phase(node.create_pod(namespace, "late"), "Failed")["status"]
    assert (rejected["reason"], rejected["message"]) == (
        "Evicted",
        "Pod was rejected: The node had condition: [PIDPressure]. ",
    )
    events = {event["reason"]: event for event in node.plane.events(namespace, "many")}
    assert events["Evicted"]["message"] == status["message"]
    assert events["Evicted"]["metadata"]["annotations"] == {
        "offending_containers": "",
        "offending_containers_usage": "",
        "starved_resource": "pids",
    }
    node_events = {event["reason"]: event["message"] for event in node.plane.events("default", node.name)}
    assert node_events["EvictionThresholdMet"] == "Attempting to reclaim pids"
    wait_condition(node, "PIDPressure", "False")
    if not node.reference:
        # Upstream evicts this pod, too, while the processes of the other one still run.
        check_undisturbed(node, kept)
    node.wait_pod_ready(node.create_pod(namespace, "after"))


@pytest.mark.skipif(detect_cgroups().unified, reason="reads the files of cgroup v1")
def test_eviction_soft_threshold_grace_periods_and_minimum_reclaim_respected(
    start_node: StartNode, namespace: str
) -> None:
    threshold = available_memory() - MEMORY_DISTANCE_MI * MI
    node = start_node(
        {
            "evictionHard": {"memory.available": "100Mi"},
            "evictionSoft": {"memory.available": str(threshold)},
            "evictionSoftGracePeriod": {"memory.available": f"{SOFT_SECONDS}s"},
            "evictionMaxPodGracePeriod": MAX_GRACE_SECONDS,
            "evictionMinimumReclaim": {"memory.available": f"{RECLAIM_MI}Mi"},
            "evictionPressureTransitionPeriod": f"{TRANSITION_SECONDS}s",
        }
    )
    kept = node.pod_document("kept", namespace)
    resources = {"memory": "64Mi", "cpu": "100m"}
    kept["spec"]["containers"][0]["resources"] = {"requests": resources, "limits": resources}
    kept = node.plane.create(kept)
    node.wait_pod_ready(kept)
    # The large pod would use a minute to end, the small one ends as soon as it is told to.
    large = node.plane.create(
        memory_pod(node, "large", namespace, [LARGE_MI], "trap '' TERM; ", terminationGracePeriodSeconds=60)
    )
    small = node.plane.create(memory_pod(node, "small", namespace, [SMALL_MI]))
    met = wait_condition(node, "MemoryPressure", "True")
    first, second = evicted_status(node, large), evicted_status(node, small)
    begun, second_begun = evicted_at(node, large), evicted_at(node, small)
    # Times of the API are whole seconds.
    assert begun - api_time(met["lastTransitionTime"]) >= SOFT_SECONDS - 1
    ended = first["containerStatuses"][0]["state"]["terminated"]
    assert ended["exitCode"] == 137
    assert MAX_GRACE_SECONDS - 1 <= api_time(ended["finishedAt"]) - begun < 15
    assert api_time(ended["finishedAt"]) <= second_begun
    for status, above in ((first, False), (second, True)):
        assert re.fullmatch(
            r"The node was low on resource: memory\. Threshold quantity: \d+, available: \d+Ki\. "
            r"Container main was using \d+Ki, request is 0, has larger consumption of memory\. ",
            status["message"],
        )
        quantity, available = re.findall(r"(?:quantity|available): (\d+)", status["message"])
        assert (int(available) * 1024 > int(quantity)) == above, status["message"]
    released = time.time()
    recovered = wait_condition(node, "MemoryPressure", "False")
    assert api_time(recovered["lastTransitionTime"]) - second_begun >= TRANSITION_SECONDS - 1
    assert time.time() - released < 45
    check_undisturbed(node, kept)


@pytest.mark.parametrize("kubelet_program", ["ours"], indirect=True)
def test_eviction_kubelet_killed_during_it_pod_runs_on_or_is_evicted(
    start_node: StartNode, namespace: str
) -> None:
    node = start_node(
        {
            "evictionHard": {"memory.available": "100Mi"},
            "evictionSoft": {"pid.available": str(available_pids() - PID_DISTANCE)},
            "evictionSoftGracePeriod": {"pid.available": "1s"},
            "evictionMaxPodGracePeriod": 10,
            "evictionPressureTransitionPeriod": "1s",
        }
    )

    def evict_and_kill(name: str, on_term: str) -> Document:
        """Create a pod that must be evicted, and kill the kubelet when the pod has the signal to end."""
        script = process_script(MANY, f"{on_term} touch /tmp/told")
        pod = node.create_pod(namespace, name, script, terminationGracePeriodSeconds=60)
        node.wait_pod_ready(pod)
        (running,) = node.truth.running(name)
        told = Path(f"/proc/{node.truth.container_pid(running.id)}/root/tmp/told")
        node.wait("the pod to have the signal to end", told.exists, PATIENCE)
        node.kill()
        assert [one.id for one in node.truth.running(name)] == [running.id]
        found = node.api_pod(pod)
        assert found is not None
        assert (found["status"]["phase"], "reason" in found["status"]) == ("Running", False)
        return pod

    yielding = evict_and_kill("yielding", "killall sleep;")
    node.start()
    wait_condition(node, "PIDPressure", "False")
    node.wait_pod_ready(yielding)
    check_undisturbed(node, yielding)
    assert condition(node, "PIDPressure")["status"] == "False"
    # It ignores the signal, and would have a minute.
    node.plane.delete("pod", "yielding", namespace, grace=1)
    node.delete_pod(yielding)

    stubborn = evict_and_kill("stubborn", "")
    node.start()
    status = evicted_status(node, stubborn)
    # Killed again before anything of the pod is cleaned up, perhaps.
    node.kill()
    node.start()
    assert re.match(r"The node was low on resource: pids\. ", status["message"])
    wait_condition(node, "PIDPressure", "False")
    found = node.api_pod(stubborn)
    assert found is not None
    assert (found["status"]["phase"], found["status"]["message"]) == ("Failed", status["message"])
    node.wait_none(
        "the cgroups of the evicted pod to be gone",
        lambda: [str(path) for path in node.pod_cgroups() if path.name.endswith(stubborn["metadata"]["uid"])],
    )
    node.delete_pod(stubborn)
    node.wait_pod_ready(node.create_pod(namespace, "after"))
