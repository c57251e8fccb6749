"""A node of a cluster on small disks, for tests of disk pressure, and what both kubelets must report."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pykubelet.api.quantity import Quantity
from pykubelet.standalone.seed_images import PAUSE_IMAGE
from tests.support.cluster_node import ClusterNode
from tests.support.plane import Document, Plane, unique
from tests.support.small_disk import MIB, available_bytes, free_disk, import_pause_image

INODES_FREE = 20_000
THRESHOLD, MINIMUM_RECLAIM = 100 * MIB, 50 * MIB
TRANSITION_SECONDS = 8
ROUND = 30.0
"""Seconds in which a round of the eviction manager runs and acts, on a busy machine."""
STORAGE = "ephemeral-storage"
CONSUMPTION = rf"Container main was using (\S+), request is 0, has larger consumption of {STORAGE}\. "
_PRIORITIES = {"lower": -10, "higher": 100, "highest": 200}
_IDLE = "trap 'exit 1' TERM; while true; do sleep 3600 & wait $!; done"
"""Not with exit code 0: upstream then reports an evicted pod as Succeeded."""
_PRESSURE = ("KubeletHasDiskPressure", "kubelet has disk pressure")
_NO_PRESSURE = ("KubeletHasNoDiskPressure", "kubelet has no disk pressure")


@dataclass(frozen=True)
class PressedNode:
    """A node on small disks."""

    node: ClusterNode
    nodefs: Path
    """Mount point of the kubelet's disk."""
    imagefs: Path
    """Mount point of containerd's disk; the same with one disk."""
    prefix: str
    """Prefix of the names of its priority classes."""

    def free(self) -> None:
        """Delete all fillers."""
        for point in {self.nodefs, self.imagefs}:
            free_disk(point)

    def create(
        self, name: str, namespace: str, script: str = "", request: str = "", priority: str = "", **spec: Any
    ) -> Document:
        """Create a pod with an emptyDir volume at /v.

        The upstream kubelet may have removed the image of sandboxes, which containerd pins since 1.7.
        """
        if self.node.reference and PAUSE_IMAGE not in self.image_names():
            import_pause_image(self.node.instance)
        spec.setdefault("volumes", [{"name": "v", "emptyDir": {}}])
        if priority:
            own = priority.startswith("system-")
            spec["priorityClassName"] = priority if own else f"{self.prefix}-{priority}"
        document = self.node.pod_document(
            name, namespace, script or _IDLE, automountServiceAccountToken=False, **spec
        )
        (container,) = document["spec"]["containers"]
        container["volumeMounts"] = [{"name": "v", "mountPath": "/v"}]
        if request:
            container["resources"] = {"requests": {STORAGE: request}}
        return self.node.plane.create(document)

    def usage(self, pod: Document) -> dict[str, int] | None:
        """Return the measured usage of a pod: bytes of layer, logs and volume, and the volume's inodes."""
        for found in self.node.get("/stats/summary").get("pods") or ():
            if found["podRef"]["uid"] != pod["metadata"]["uid"]:
                continue
            containers: list[Document] = found.get("containers") or [{}]
            volumes: list[Document] = found.get("volume") or [{}]
            container, volume = containers[0], volumes[0]
            return {
                "layer": container.get("rootfs", {}).get("usedBytes", -1),
                "logs": container.get("logs", {}).get("usedBytes", -1),
                "volume": volume.get("usedBytes", -1),
                "inodes": volume.get("inodesUsed", -1),
            }
        return None

    def wait_usage(self, pod: Document, **least: int) -> dict[str, int]:
        """Wait until a pod is measured completely, with at least these amounts."""

        def look() -> dict[str, int] | None:
            found = self.usage(pod)
            fits = found is not None and all(found[key] >= least.get(key, 0) for key in found)
            return found if fits else None

        return self.node.wait(f"usage of {pod['metadata']['name']}", look)

    def wait_available(self, point: Path, amount: int) -> None:
        """Wait until so many bytes of a disk are available."""
        self.node.wait("space to be released", lambda: available_bytes(point) >= amount, ROUND)

    def condition(self) -> Document:
        """Return the node's DiskPressure condition."""
        found = self.node.node_object()
        assert found is not None
        return next(one for one in found["status"]["conditions"] if one["type"] == "DiskPressure")

    def wait_pressure(self, status: str) -> Document:
        """Wait until the DiskPressure condition has this status, and return it."""

        def look() -> Document | None:
            found = self.condition()
            return found if found["status"] == status else None

        found = self.node.wait(f"DiskPressure to be {status}", look, ROUND + TRANSITION_SECONDS)
        assert (found["reason"], found["message"]) == (_PRESSURE if status == "True" else _NO_PRESSURE)
        return found

    def wait_evicted(self, pods: Sequence[Document], count: int) -> list[Document]:
        """Wait until `count` of the pods are Failed, and return these in the order of their eviction."""
        order: list[str] = []
        latest: dict[str, Document] = {}

        def look() -> list[Document] | None:
            for pod in pods:
                found = self.node.api_pod(pod)
                assert found is not None
                name = pod["metadata"]["name"]
                if found["status"].get("phase") == "Failed" and name not in order:
                    order.append(name)
                    latest[name] = found
            return [latest[name] for name in order] if len(order) >= count else None

        return self.node.wait(f"{count} evicted pods", look, ROUND * count)

    def assert_kept(self, *pods: Document) -> None:
        """Assert that pods still run and were never restarted."""
        for pod in pods:
            found = self.node.api_pod(pod)
            assert found is not None
            name, status = pod["metadata"]["name"], found["status"]
            assert (name, status["phase"]) == (name, "Running")
            assert (name, status["containerStatuses"][0]["restartCount"]) == (name, 0)

    def attempts(self) -> set[str]:
        """Return the messages of the node's EvictionThresholdMet events."""
        events = self.node.plane.events("default", self.node.name)
        return {event["message"] for event in events if event["reason"] == "EvictionThresholdMet"}

    def image_names(self) -> set[str]:
        """Return the names of the images that the runtime has."""
        found = self.node.truth.images()
        return {tag for image in found for tag in image.repo_tags}

    def remove_images(self, names: Sequence[str]) -> None:
        """Remove images, with their files, if they exist."""
        for name in self.image_names() & set(names):
            self.node.truth.remove_image(name)


@contextmanager
def priority_classes(plane: Plane) -> Iterator[str]:
    """Create the priority classes, and yield the prefix of their names."""
    prefix = unique("pressed")
    for name, value in _PRIORITIES.items():
        document = {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": f"{prefix}-{name}"},
            "value": value,
        }
        plane.create(document)
    try:
        yield prefix
    finally:
        for name in _PRIORITIES:
            plane.delete("priorityclass", f"{prefix}-{name}")


def seconds_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def assert_evicted(plane: Plane, pod: Document, resource: str, consumption: str = "") -> re.Match[str]:
    """Assert status, condition and event of an evicted pod, and return the match of its message."""
    status = pod["status"]
    assert (status["phase"], status["reason"]) == ("Failed", "Evicted")
    message = re.fullmatch(
        rf"The node was low on resource: {resource}\. Threshold quantity: (\S+), available: (\S+)\. "
        + consumption,
        status["message"],
    )
    assert message is not None, status["message"]
    threshold, available = (int(Quantity.parse(text)) for text in message.groups()[:2])
    assert threshold == (THRESHOLD if resource == STORAGE else INODES_FREE)
    # Until the minimum reclaim is available, pods are evicted above the threshold as well.
    assert available < threshold + MINIMUM_RECLAIM
    (target,) = (one for one in status["conditions"] if one["type"] == "DisruptionTarget")
    assert (target["status"], target["reason"]) == ("True", "TerminationByKubelet")
    assert target["message"] == status["message"]
    meta = pod["metadata"]
    (event,) = (one for one in plane.events(meta["namespace"], meta["name"]) if one["reason"] == "Evicted")
    assert (event["type"], event["message"]) == ("Warning", status["message"])
    assert event["metadata"]["annotations"] == {
        "offending_containers": "main" if consumption else "",
        "offending_containers_usage": message[3] if consumption else "",
        "starved_resource": resource,
    }
    return message


def evicted_at(pod: Document) -> float:
    """Return the time of the eviction of a pod in seconds since the epoch, in whole seconds."""
    (target,) = (one for one in pod["status"]["conditions"] if one["type"] == "DisruptionTarget")
    return seconds_of(target["lastTransitionTime"])


def names(pods: Sequence[Document]) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods]
