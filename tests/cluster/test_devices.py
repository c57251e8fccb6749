"""Devices of a node in a cluster: in its status, before the scheduler, and refused where there are none."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_node import ClusterNode
from tests.support.device_plugin.asking import Asking, dongles
from tests.support.device_plugin.process import RESOURCE, DevicePluginProcess
from tests.support.node import status_of
from tests.support.plane import Document, Plane

pytestmark = pytest.mark.machine

SLOW = {"nodeStatusUpdateFrequency": "5m", "nodeStatusReportFrequency": "5m", "nodeLeaseDurationSeconds": 40}
"""The node's status is not looked at by itself for so long: what is seen before was told at once."""


@pytest.fixture
def node(make_node: Callable[..., ClusterNode]) -> ClusterNode:
    started = make_node(settings=SLOW)
    started.start()
    started.wait_registered()
    return started


@pytest.fixture
def plugin(node: ClusterNode, tmp_path: Path) -> Iterator[DevicePluginProcess]:
    with dongles(tmp_path / "plugin", node.root) as started:
        yield started


def amounts(node: ClusterNode) -> tuple[str | None, str | None]:
    """How many devices the node has, and how many of them can be had, as the API server knows it."""
    status = (node.node_object() or {}).get("status", {})
    return status.get("capacity", {}).get(RESOURCE), status.get("allocatable", {}).get(RESOURCE)


def wait_amounts(node: ClusterNode, capacity: str, allocatable: str) -> None:
    node.wait(f"{allocatable} of {capacity} devices", lambda: amounts(node) == (capacity, allocatable), 60)


def wanting(node: ClusterNode, name: str, namespace: str, count: int = 1, *, bound: bool = False) -> Document:
    """A pod that wants devices, which the scheduler has to place unless it is bound."""
    document = node.pod_document(name, namespace)
    some = {RESOURCE: str(count)}
    document["spec"]["containers"][0]["resources"] = {"limits": some, "requests": some}
    if not bound:
        del document["spec"]["nodeName"]
    return node.plane.create(document)


def health(pod: Document) -> list[Any]:
    told = status_of(pod, "main").get("allocatedResourcesStatus", ())
    return [(one["name"], [(dev["resourceID"], dev["health"]) for dev in one["resources"]]) for one in told]


def test_device_plugin_pods_scheduled_allocated_and_rejected(
    plane: Plane, node: ClusterNode, plugin: DevicePluginProcess, namespace: str
) -> None:
    asking = Asking(node.root)
    wait_amounts(node, "2", "2")
    first = node.wait_pod_ready(wanting(node, "first", namespace), 90)
    assert first["spec"]["nodeName"] == node.name
    assert "TEST_DEVICES=d1" in node.shell("first", "tr '\\0' '\\n' < /proc/1/environ").split()
    node.shell("first", "test -c /dev/d1")
    assert asking.listed() == {"first/main": ["d1"]}

    # The scheduler keeps away what does not fit; what comes past it is refused here.
    much = wanting(node, "much", namespace, 2)
    found = node.wait_api_pod(much, "not to be scheduled", lambda pod: pod["status"].get("conditions"), 90)
    [condition] = found["status"]["conditions"]
    assert (condition["reason"], f"Insufficient {RESOURCE}" in condition["message"]) == (
        "Unschedulable",
        True,
    )
    past = node.wait_pod_phase(wanting(node, "past", namespace, 2, bound=True), "Failed")
    assert (past["status"]["reason"], past["status"]["message"]) == (
        "UnexpectedAdmissionError",
        f"Pod was rejected: Allocate failed due to requested number of devices unavailable for {RESOURCE}. "
        "Requested: 2, Available: 1, which is unexpected",
    )

    # A device is lost: the node offers one less, and the pod that has it says so.
    plugin.behave(devices={"d1": "Unhealthy", "d2": "Healthy"})
    wait_amounts(node, "2", "1")
    node.wait_api_pod(first, "to show it", lambda pod: health(pod) == [(RESOURCE, [("d1", "Unhealthy")])])
    # One that was given stays counted, as long as its pod runs: the other is free all the same.
    second = node.wait_pod_ready(wanting(node, "second", namespace, bound=True))
    assert asking.listed() == {"first/main": ["d1"], "second/main": ["d2"]}
    node.delete_pod(second)
    plugin.behave()
    wait_amounts(node, "2", "2")

    # The plugin goes, and then the agent: what runs goes on, and nothing new is offered.
    plugin.kill()
    wait_amounts(node, "2", "0")
    before = node.truth.running("first")[0].id
    node.kill()
    node.start()
    wait_amounts(node, "0", "0")
    assert node.wait_pod_ready(first)["status"]["containerStatuses"][0]["restartCount"] == 0
    assert [one.id for one in node.truth.running("first")] == [before]
    # That the pod is ready the API server knows of the agent before: this one may not have heard of it yet.
    node.wait("the device to be the pod's", lambda: asking.listed() == {"first/main": ["d1"]}, 60)
    # A pod that comes before the plugin is back waits for it.
    late = wanting(node, "late", namespace, bound=True)
    assert node.wait_event("late", "AdmissionWaiting").endswith(f"for the device plugin of {RESOURCE}")
    assert not node.truth.containers("late")
    plugin.start()
    wait_amounts(node, "2", "2")
    node.wait_pod_ready(late)
    node.delete_pod(late)
    # The pod that waited for the scheduler gets what has become free.
    node.delete_pod(first)
    assert node.wait_pod_ready(much, 90)["spec"]["nodeName"] == node.name
    assert asking.listed() == {"much/main": ["d1", "d2"]}


def test_device_plugin_checkpoint_removed_capacity_reset_to_zero(
    plane: Plane, node: ClusterNode, plugin: DevicePluginProcess
) -> None:
    wait_amounts(node, "2", "2")
    plugin.kill()
    wait_amounts(node, "2", "0")
    assert node.stop() == 0
    # The machine was set up anew: nobody knows whether it will have devices again.
    (node.root / "device-plugins" / "kubelet_internal_checkpoint").unlink()
    by_hand = {"status": {"capacity": {RESOURCE: "7", "example.com/other": "3"}}}
    plane.patch("node", node.name, "", by_hand, subresource="status")
    node.start()
    wait_amounts(node, "0", "0")
    found = node.node_object()
    assert found is not None
    assert found["status"]["capacity"]["example.com/other"] == "0"
