"""Pods that are resized, for tests: wishing as people do, and looking in the API server and the cgroups."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.node import all_statuses
from tests.support.plane import Document, Plane, unique
from tests.support.runtime import RunningRuntime

MI = 1024**2
SETTLED = 45.0
"""Seconds; a failed try is repeated after about ten."""
SMALL = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "200m", "memory": "64Mi"}}
LARGE = {"requests": {"cpu": "250m", "memory": "128Mi"}, "limits": {"cpu": "500m", "memory": "128Mi"}}
FILL = (
    "trap 'exit 0' TERM; dd if=/dev/zero of=/dev/shm/x bs=1M count=40; while true; do sleep 1 & wait $!; done"
)
USED = "du -h /dev/shm/x 2>/dev/null || true"
"""Says how much of it there is; a container runs a moment before the file is there."""


def make_node(
    plane: Plane, runtime: RunningRuntime, kind: str, root: Path | None = None, **settings: Any
) -> tuple[ClusterNode, ExitStack]:
    stack = ExitStack()
    program = None
    if kind == "reference":
        program = plane.reference_kubelet
        if program is None:
            pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
        stack.enter_context(undo_host_changes())
    settings = {"syncFrequency": "10s", **settings}
    made = cluster_node(plane, runtime, program=program, root=root, settings=settings)
    return stack.enter_context(in_cluster(made)), stack


def start(
    node: ClusterNode, namespace: str, resources: Document, *, script: str = "", policy: str = "", **spec: Any
) -> Document:
    """Have a pod run whose container has these resources."""
    document = node.pod_document(unique("p"), namespace, script, **spec)
    document["spec"]["containers"][0] |= {"resources": resources}
    if policy:
        rules = [{"resourceName": name, "restartPolicy": policy} for name in ("cpu", "memory")]
        document["spec"]["containers"][0]["resizePolicy"] = rules
    return node.wait_pod_ready(node.plane.create(document))


def resize(node: ClusterNode, pod: Document, resources: Document, container: str = "main") -> Document:
    """Wish for other resources, as people do."""
    kind = "initContainers" if container != "main" else "containers"
    change = {"spec": {kind: [{"name": container, "resources": resources}]}}
    return patch(node, pod, change)


def patch(node: ClusterNode, pod: Document, change: Document) -> Document:
    meta = pod["metadata"]
    where = ("-n", meta["namespace"], "pod", meta["name"])
    node.plane.kubectl("patch", *where, "--subresource", "resize", "-p", json.dumps(change))
    return told(node, pod)


def told(node: ClusterNode, pod: Document) -> Document:
    """The pod as the API server has it now, however busy it is."""
    return node.wait_api_pod(pod, "to be told", lambda _: True)


def condition(pod: Document, kind: str) -> Document | None:
    found = [one for one in pod["status"].get("conditions", ()) if one["type"] == f"PodResize{kind}"]
    return found[0] if found else None


def is_settled(pod: Document) -> bool:
    """Whether every container has what its author wishes, and nothing more is to be said."""
    if condition(pod, "Pending") or condition(pod, "InProgress"):
        return False
    spec = {one["name"]: one["resources"] for one in (*pod["spec"]["containers"], *_sidecars(pod))}
    told = {one["name"]: one for one in all_statuses(pod)}
    return all(
        told[name].get("resources") == wish and told[name].get("allocatedResources") == wish.get("requests")
        for name, wish in spec.items()
    )


def _sidecars(pod: Document) -> list[Document]:
    return [one for one in pod["spec"].get("initContainers", ()) if one.get("restartPolicy") == "Always"]


def wait_settled(node: ClusterNode, pod: Document, seconds: float = SETTLED) -> Document:
    return node.wait_api_pod(pod, "to have what it wishes for", is_settled, seconds)


def wait_condition(node: ClusterNode, pod: Document, kind: str, reason: str = "") -> Document:
    """Wait for a condition with this reason; gives it."""

    def fits(found: Document) -> bool:
        one = condition(found, kind)
        return one is not None and one.get("reason", "") == reason

    found = condition(node.wait_api_pod(pod, f"to be {kind} {reason}", fits, SETTLED), kind)
    assert found is not None
    return found


def events(node: ClusterNode, pod: Document) -> dict[str, list[str]]:
    """What was said of resizing a pod, by reason."""
    said: dict[str, list[str]] = {}
    for event in node.plane.events(pod["metadata"]["namespace"], pod["metadata"]["name"]):
        if event["reason"].startswith("Resize"):
            said.setdefault(event["reason"], []).append(event["message"])
    return said


def wait_event(node: ClusterNode, pod: Document, reason: str) -> str:
    said: list[str] = node.wait(f"the event {reason}", lambda: events(node, pod).get(reason), SETTLED)
    return said[-1]


def cgroup(node: ClusterNode, pod: Document, container_id: str = "") -> dict[str, int]:
    """What the kernel has been told of a pod, or of a container of it."""
    uid = pod["metadata"]["uid"]
    folders = [path / container_id for path in node.pod_cgroups() if path.name.endswith(uid)]

    def read(file: str) -> int:
        found = next(folder / file for folder in folders if (folder / file).exists())
        return int(found.read_text())

    return {
        "shares": read("cpu.shares"),
        "quota": read("cpu.cfs_quota_us"),
        "memory": read("memory.limit_in_bytes"),
    }


def tier_shares(node: ClusterNode) -> int:
    """What all burstable pods weigh together."""
    path = f"{node.instance.cgroup_root}/kubepods/burstable"
    return int((detect_cgroups().path("cpu", path) / "cpu.shares").read_text())


def main_of(pod: Document) -> Document:
    found: Document = next(one for one in all_statuses(pod) if one["name"] == "main")
    return found


def container_id(status: Document) -> str:
    return str(status["containerID"]).removeprefix("containerd://")


def assert_untouched(before: Document, after: Document) -> None:
    """Containers have not been restarted."""
    old = {one["name"]: (one["containerID"], one["restartCount"]) for one in all_statuses(before)}
    assert {one["name"]: (one["containerID"], one["restartCount"]) for one in all_statuses(after)} == old


BOOKS = ("allocated_pods_state", "actuated_pods_state")

v1_only = pytest.mark.skipif(detect_cgroups().unified, reason="reads the files of cgroup v1")


def wait_known(node: ClusterNode, pod: Document) -> None:
    """Wait until an agent that was started anew has heard of a pod: before that it runs nothing in it."""
    uid = pod["metadata"]["uid"]
    node.wait("the agent to know the pod", lambda: any(one["metadata"]["uid"] == uid for one in node.pods()))


def shell(node: ClusterNode, pod: Document, script: str) -> str:
    meta = pod["metadata"]
    return node.plane.kubectl("exec", "-n", meta["namespace"], meta["name"], "--", "sh", "-c", script)
