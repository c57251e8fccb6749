"""Eviction of pods from a node of a real cluster: by memory pressure, and by limits on local storage."""

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.cli_node import PYKUBELET
from tests.support.cluster_node import ClusterNode
from tests.support.node_pressure import available_memory, condition, wait_condition
from tests.support.plane import Document

pytestmark = pytest.mark.machine
Make = Callable[..., ClusterNode]
MI = 1 << 20
HOG_MI, DISTANCE_MI = 1500, 700


@pytest.mark.skipif(detect_cgroups().unified, reason="reads the files of cgroup v1")
@pytest.mark.pressure
@pytest.mark.parametrize("notified", [False, True], ids=["monitoring", "kernel-notification"])
def test_eviction_memory_hog_evicted_and_node_recovers(
    start_node: Callable[[dict[str, Any]], ClusterNode], namespace: str, notified: bool
) -> None:
    limit = available_memory() - DISTANCE_MI * MI
    node = start_node(
        {
            "evictionHard": {"memory.available": str(limit)},
            "enforceNodeAllocatable": [],
            "evictionPressureTransitionPeriod": "8s",
            "kernelMemcgNotification": notified,
        }
    )
    small = {"requests": {"memory": "64Mi", "cpu": "10m"}, "limits": {"memory": "64Mi", "cpu": "100m"}}
    kept = node.pod_document("kept", namespace)
    kept["spec"]["containers"][0]["resources"] = small
    kept = node.plane.create(kept)
    node.wait_pod_ready(kept)
    hog = node.pod_document(
        "hog",
        namespace,
        f"head -c {HOG_MI}m /dev/zero > /mem/used; sleep 3600",
        volumes=[{"name": "mem", "emptyDir": {"medium": "Memory"}}],
    )
    hog["spec"]["containers"][0]["volumeMounts"] = [{"name": "mem", "mountPath": "/mem"}]
    hog = node.plane.create(hog)
    status = node.wait_pod_phase(hog, "Failed", 60)["status"]
    assert status["reason"] == "Evicted"
    assert re.fullmatch(
        r"The node was low on resource: memory\. Threshold quantity: \S+, available: \S+\. "
        r"Container main was using \S+, request is 0, has larger consumption of memory\. ",
        status["message"],
    )
    (target,) = (one for one in status["conditions"] if one["type"] == "DisruptionTarget")
    assert (target["status"], target["reason"]) == ("True", "TerminationByKubelet")
    assert target["message"] == status["message"]
    if not node.reference:
        assert ("Kernel notified of memory usage" in node.log.read_text()) == notified
    pressure = wait_condition(node, "MemoryPressure", "True")
    assert (pressure["reason"], pressure["message"]) == (
        "KubeletHasInsufficientMemory",
        "kubelet has insufficient memory available",
    )
    rejected = node.wait_pod_phase(node.create_pod(namespace, "late"), "Failed")["status"]
    assert (rejected["reason"], "The node had condition: [MemoryPressure]. " in rejected["message"]) == (
        "Evicted",
        True,
    )
    events = {event["reason"]: event for event in node.plane.events(namespace, "hog")}
    assert events["Evicted"]["metadata"]["annotations"]["offending_containers"] == "main"
    assert events["Evicted"]["metadata"]["annotations"]["starved_resource"] == "memory"
    node_events = {event["reason"]: event["message"] for event in node.plane.events("default", node.name)}
    assert node_events["EvictionThresholdMet"] == "Attempting to reclaim memory"
    wait_condition(node, "MemoryPressure", "False")
    found = node.api_pod(kept)
    assert found is not None
    assert (found["status"]["phase"], found["status"]["containerStatuses"][0]["restartCount"]) == (
        "Running",
        0,
    )
    node.wait_pod_ready(node.create_pod(namespace, "after"))


def test_eviction_local_storage_limits_pods_above_evicted(
    start_node: Callable[[dict[str, Any]], ClusterNode], namespace: str
) -> None:
    node = start_node({"evictionHard": {"memory.available": "1Mi"}, "volumeStatsAggPeriod": "2s"})
    scratch = {"name": "scratch", "emptyDir": {"sizeLimit": "5Mi"}}
    filler = node.pod_document(
        "filler", namespace, "head -c 20m /dev/zero > /scratch/used; sleep 3600", volumes=[scratch]
    )
    filler["spec"]["containers"][0]["volumeMounts"] = [{"name": "scratch", "mountPath": "/scratch"}]
    hosts = node.pod_document("hosts", namespace, "head -c 20m /dev/zero >> /etc/hosts; sleep 3600")
    layer = node.pod_document("layer", namespace, "head -c 20m /dev/zero > /used; sleep 3600")
    for document in (hosts, layer):
        document["spec"]["containers"][0]["resources"] = {"limits": {"ephemeral-storage": "10Mi"}}
    created = [node.plane.create(document) for document in (filler, hosts, layer)]
    messages = {}
    for pod in created:
        status = node.wait_pod_phase(pod, "Failed", 90)["status"]
        assert status["reason"] == "Evicted"
        assert all(one["type"] != "DisruptionTarget" for one in status["conditions"])
        messages[pod["metadata"]["name"]] = status["message"]
    total = "Pod ephemeral local storage usage exceeds the total limit of containers 10Mi. "
    assert messages == {
        "filler": 'Usage of EmptyDir volume "scratch" exceeds the limit "5Mi". ',
        "hosts": total,
        "layer": total,
    }
    assert condition(node, "DiskPressure")["status"] == "False"


def test_pressure_command_real_node_shows_distances_and_victim(make_node: Make, namespace: str) -> None:
    node = make_node(settings={"evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%"}})
    node.start()
    node.wait_registered()
    pod = node.create_pod(namespace, "first")
    node.wait_pod_ready(pod)
    command = [PYKUBELET, "pressure", "--data-dir", str(node.instance.data_dir)]

    def look() -> Document | None:
        done = subprocess.run([*command, "-o", "json"], capture_output=True, check=True, timeout=60)
        found: Document = json.loads(done.stdout)
        memory = found["signals"][0]
        return found if memory.get("available") and memory.get("firstVictim") else None

    report = node.wait("a report with a victim", look, 60)
    assert [one["signal"] for one in report["signals"]] == [
        "memory.available",
        "nodefs.available",
        "allocatableMemory.available",
        "containerfs.available",
    ]
    assert report["signals"][0]["firstVictim"]["name"] == "first"
    text = subprocess.run(command, capture_output=True, check=True, timeout=60, text=True).stdout
    assert f"{namespace}/first, for memory.available" in text
