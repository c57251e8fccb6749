"""Refusals that need more than one look: by size, by affinity, by others' links; and that stay refusals.

What every reason says is in `test_admission.py`. Here is what `kubectl describe` shows of it, that a
refused pod does not come in when there is room later, not even by a new agent, and that static pods and
links that are installed beside the agent are refused and refuse in the same words.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.metrics_page import Page
from tests.support.plane import Document, Plane
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

TOO_LITTLE = "Node didn't have enough resource: {}, requested: {}, used: {}, capacity: {}"
AFFINITY = "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"
CURFEW = """
from pykubelet.admission.handler import AdmitRejection

class Curfew:
    for_running = False

    def __init__(self, given):
        self.given = given

    def admit(self, attempt):
        if attempt.pod.metadata.labels.get("age") == "child":
            return AdmitRejection("Curfew", "children stay at home")
"""


@dataclass(frozen=True, eq=False)
class Case:
    """A pod that is refused."""

    name: str
    reason: str
    message: str
    spec: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def node(
    plane: Plane, runtime: RunningRuntime, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterNode]:
    """A node beside whose agent a link of admission is installed."""
    site = tmp_path_factory.mktemp("site")
    _install(site)
    made = cluster_node(plane, runtime, settings={"maxPods": 4}, env={"PYTHONPATH": str(site)})
    with in_cluster(made) as node:
        yield node


def _install(site: Path) -> None:
    (site / "curfew.py").write_text(CURFEW)
    info = site / "curfew-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: curfew\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pykubelet.admission]\ncurfew = curfew:Curfew\n")


def cases(node: Document) -> list[Case]:
    has = node["status"]["allocatable"]
    selector = [{"matchExpressions": [{"key": "kubernetes.io/os", "operator": "NotIn", "values": ["linux"]}]}]
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": selector}}
    found = [
        Case("not-here", "NodeAffinity", AFFINITY, {"affinity": {"nodeAffinity": affinity}}),
        Case(
            "first-is-told",
            "OutOfcpu",
            "Node didn't have enough resource: cpu, requested: 9000,",
            {"nodeSelector": {"kubernetes.io/os": "plan9"}},
            {"cpu": "9", "memory": "99Ti"},
        ),
        Case("at-home", "Curfew", "children stay at home", labels={"age": "child"}),
    ]
    if has.get("hugepages-2Mi") == "0":
        message = TOO_LITTLE.format("hugepages-2Mi", 2 << 20, 0, 0)
        amounts = {"hugepages-2Mi": "2Mi", "cpu": "1m"}
        found.append(Case("huge", "OutOfhugepages-2Mi", message, {}, amounts))
    return found


def create(node: ClusterNode, namespace: str, case: Case) -> Document:
    document = node.pod_document(case.name, namespace, **case.spec)
    document["metadata"]["labels"] = case.labels
    document["spec"]["containers"][0]["resources"] = {"requests": case.resources, "limits": case.resources}
    return node.plane.create(document)


def described(plane: Plane, pod: Document) -> str:
    """What kubectl says of a pod, with single blanks."""
    meta = pod["metadata"]
    return " ".join(plane.kubectl("describe", "pod", meta["name"], "-n", meta["namespace"]).split())


def _says(plane: Plane, pod: Document, words: str) -> bool:
    return words in described(plane, pod)


def test_admission_rejection_shown_by_kubectl_describe_and_metrics(
    plane: Plane, namespace: str, node: ClusterNode
) -> None:
    known = node.node_object()
    assert known is not None
    told = {case: create(node, namespace, case) for case in cases(known)}
    for case, pod in told.items():
        status = node.wait_pod_phase(pod, "Failed")["status"]
        assert status["reason"] == case.reason, status
        assert status["message"].startswith(f"Pod was rejected: {case.message}"), status
        text = described(plane, pod)
        assert f"Status: Failed Reason: {case.reason} Message: Pod was rejected: {case.message}" in text
        event = f"Warning {case.reason}"
        node.wait(f"the event {case.reason} in what kubectl says", partial(_says, plane, pod, event))
    # A reason that the reference does not have is counted, too, but not under a name of others' choosing.
    page = Page(node.page("/metrics"))
    assert page.value("kubelet_admission_rejections_total", reason="OutOfcpu") >= 1
    assert page.value("kubelet_admission_rejections_total", reason="Other") >= 1


def test_admission_rejected_pod_stays_failed_when_resources_freed(
    plane: Plane, namespace: str, node: ClusterNode
) -> None:
    known = node.node_object()
    assert known is not None
    resources = {"cpu": known["status"]["allocatable"]["cpu"]}
    first = node.wait_pod_ready(create(node, namespace, Case("first", "", "", {}, resources)))
    second = create(node, namespace, Case("second", "", "", {}, resources))
    failed = node.wait_pod_phase(second, "Failed")
    assert failed["status"]["reason"] == "OutOfcpu"
    node.delete_pod(first)
    # Somebody looks at it again, with room: it had its answer.
    plane.patch("pod", "second", namespace, {"metadata": {"labels": {"looked": "at"}}})
    node.kill()
    node.start()
    node.wait_registered()
    third = node.wait_pod_ready(create(node, namespace, Case("third", "", "", {}, resources)))
    now = node.api_pod(second)
    assert now is not None
    assert now["status"] == failed["status"]
    assert not node.truth.containers("second")
    for pod in (second, third):
        node.delete_pod(pod)


def test_admission_rejected_static_pod_reported_on_mirror_pod(plane: Plane, node: ClusterNode) -> None:
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "static"},
        "spec": {
            "nodeSelector": {"kubernetes.io/os": "plan9"},
            "containers": [{"name": "main", "image": node.image}],
        },
    }
    name = node.write(document)

    def is_refused(pod: Document) -> bool:
        return bool(pod["status"].get("reason") == "NodeAffinity")

    node.wait_pod(name, "to be refused", is_refused)
    mirror = plane.wait_for("pod", name, "default", is_refused)
    assert mirror["status"]["phase"] == "Failed"
    assert mirror["status"]["message"] == f"Pod was rejected: {AFFINITY}"
    node.kill()
    node.start()
    node.wait_pod(name, "to be refused again", is_refused)
    assert not node.truth.containers(name)
    mirror = plane.wait_for("pod", name, "default", is_refused)
    assert mirror["status"]["message"] == f"Pod was rejected: {AFFINITY}"
    node.remove("static")
    node.wait("the mirror pod to be gone", lambda: plane.find("pod", name, "default") is None)
