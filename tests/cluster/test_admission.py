"""Every reason to refuse a pod, provoked once on a real control plane, with the words that people look up.

Ours and the reference kubelet are asked the same.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from pykubelet.admission.node_support import apparmor_is_enabled
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.metrics_page import Page
from tests.support.plane import Document, Plane
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

DONGLE = "example.com/dongle"
PREDICATE = "Predicate {} failed: node(s) "
TOO_LITTLE = "Node didn't have enough resource: {}, requested: {}, used: {}, capacity: {}"
CRITICAL = {"priorityClassName": "system-node-critical"}
RULES = [{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [3]}}]


@dataclass(frozen=True, eq=False)
class Case:
    """A pod that is refused; its containers get `container`, its message begins with `message`."""

    reason: str
    message: str
    spec: dict[str, Any] = field(default_factory=dict)
    container: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


def asking(**texts: str) -> dict[str, Any]:
    amounts = {name.replace("_", "-"): text for name, text in texts.items()}
    return {"resources": {"requests": amounts, "limits": amounts}}


def cases(node: Document) -> list[Case]:
    """What this node refuses, on this machine."""
    found = [
        Case(
            "OutOfcpu",
            "Node didn't have enough resource: cpu, requested: 999000, used: 100,",
            {},
            asking(cpu="999"),
        ),
        Case(
            "OutOfmemory", "Node didn't have enough resource: memory, requested: ", {}, asking(memory="99Ti")
        ),
        Case(
            "OutOfephemeral-storage",
            "Node didn't have enough resource: ephemeral-storage, requested: ",
            {},
            asking(ephemeral_storage="999Ti"),
        ),
        Case(
            f"OutOf{DONGLE}",
            TOO_LITTLE.format(DONGLE, 2, 0, 1),
            {},
            asking(**{DONGLE: "2"}),
        ),
        Case(
            "NodeAffinity",
            PREDICATE.format("NodeAffinity") + "didn't match Pod's node affinity/selector",
            {"nodeSelector": {"kubernetes.io/arch": "vax"}},
        ),
        Case(
            "NodePorts",
            PREDICATE.format("NodePorts") + "didn't have free ports for the requested pod ports",
            {},
            {"ports": [{"containerPort": 80, "hostPort": 31999}]},
        ),
        Case(
            "PodOSSelectorNodeLabelDoesNotMatch",
            "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
            labels={"kubernetes.io/os": "windows"},
        ),
        Case(
            "PodOSNotSupported",
            "Failed to admit pod as the OS field doesn't match node OS",
            {"os": {"name": "windows"}},
        ),
        Case(
            "SysctlForbidden",
            'forbidden sysctl: "kernel.msgmax" not allowlisted',
            {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "65536"}]}},
        ),
        Case(
            "PodLevelResourcesNotSupported",
            "PodLevelResources feature gate is disabled",
            {"resources": {"requests": {"cpu": "1m"}}},
        ),
        Case(
            "PodFeatureUnsupported",
            "Pod requires node features that are not available: RestartAllContainersOnContainerExits",
            {"restartPolicy": "Never"},
            {"restartPolicy": "Never", "restartPolicyRules": RULES},
        ),
        Case(
            "UnexpectedAdmissionError",
            "Unexpected error while attempting to recover from admission failure: preemption: error finding "
            "a set of pods to preempt: no set of running pods found to reclaim resources: [(res: cpu, q: ",
            CRITICAL,
            asking(cpu="999"),
        ),
    ]
    if not apparmor_is_enabled():
        profile = {"appArmorProfile": {"type": "RuntimeDefault"}}
        message = "Cannot enforce AppArmor: AppArmor is not enabled on the host"
        found.append(Case("AppArmor", message, {"securityContext": profile}))
    if not node["status"].get("features", {}).get("supplementalGroupsPolicy"):
        strict = {"supplementalGroupsPolicy": "Strict"}
        message = "SupplementalGroupsPolicy=Strict is not supported in this node"
        found.append(Case("SupplementalGroupsPolicyNotSupported", message, {"securityContext": strict}))
    return found


@pytest.fixture(scope="module", params=["ours", "reference"])
def node(plane: Plane, runtime: RunningRuntime, request: pytest.FixtureRequest) -> Iterator[ClusterNode]:
    """A node with little room, of either kind."""
    program = None
    if request.param == "reference":
        program = plane.reference_kubelet
        if program is None:
            pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
    off = (
        "PodLevelResources",
        "InPlacePodLevelResourcesVerticalScaling",
        "PodLevelResourceManagers",
        "RestartAllContainersOnContainerExits",
    )
    settings = {"maxPods": 3, "featureGates": dict.fromkeys(off, False)}
    with ExitStack() as stack:
        if program is not None:
            stack.enter_context(undo_host_changes())
        made = cluster_node(plane, runtime, program=program, settings=settings)
        yield stack.enter_context(in_cluster(made))


def pod_of(node: ClusterNode, case: Case, namespace: str) -> Document:
    name = case.reason.replace("/", "-").lower()
    document = node.pod_document(name, namespace, **case.spec)
    document["metadata"]["labels"] = case.labels
    document["spec"]["containers"][0] |= case.container
    return document


def wait_event(node: ClusterNode, pod: Document, reason: str) -> str:
    """Wait for a pod's event; gives what it says."""
    meta = pod["metadata"]

    def look() -> list[str]:
        found = node.plane.events(meta["namespace"], meta["name"])
        return [
            event["message"] for event in found if event["reason"] == reason and event["type"] == "Warning"
        ]

    message: str = node.wait(f"the event {reason} of {meta['name']}", look)[0]
    return message


def test_admission_every_rejection_reason_and_message(
    plane: Plane, namespace: str, node: ClusterNode
) -> None:
    amounts = {DONGLE: "1"}
    plane.patch(
        "node", node.name, "", {"status": {"capacity": amounts, "allocatable": amounts}}, subresource="status"
    )
    document = node.pod_document("runs", namespace)
    document["spec"]["containers"][0] |= {
        "ports": [{"containerPort": 80, "hostPort": 31999}],
        "resources": {"requests": {"cpu": "100m"}},
    }
    runs = node.wait_pod_ready(plane.create(document))
    known = node.node_object()
    assert known is not None
    refused = {case: plane.create(pod_of(node, case, namespace)) for case in cases(known)}
    seen = {}
    for case, pod in refused.items():
        failed = node.wait_pod_phase(pod, "Failed")
        status = failed["status"]
        assert status["reason"] == case.reason, status
        assert status["message"].startswith(f"Pod was rejected: {case.message}"), status
        assert status.keys() <= {"phase", "reason", "message", "startTime", "qosClass", "observedGeneration"}
        assert status["startTime"]
        assert wait_event(node, pod, case.reason) == status["message"].removeprefix("Pod was rejected: ")
        seen[pod["metadata"]["name"]] = failed
    if not node.reference:
        page = Page(node.page("/metrics"))
        assert page.value("kubelet_admission_rejections_total", reason="SysctlForbidden") == 1
    # An agent that comes anew leaves all of it as it is, and what runs alone.
    node.restart()
    node.wait_registered()
    last = node.create_pod(namespace, "last")
    node.wait_pod_ready(last)
    for name, failed in seen.items():
        now = node.api_pod(failed)
        assert now is not None
        if not node.reference:
            assert now["status"] == failed["status"], name
        assert (now["status"]["phase"], now["status"]["reason"]) == ("Failed", failed["status"]["reason"])
    again = node.api_pod(runs)
    assert again is not None
    assert again["status"]["containerStatuses"] == runs["status"]["containerStatuses"]
    # Three at most: these two, and one more.
    third = node.wait_pod_ready(node.create_pod(namespace, "third"))
    fourth = node.wait_pod_phase(node.create_pod(namespace, "fourth"), "Failed")
    assert (fourth["status"]["reason"], fourth["status"]["message"]) == (
        "OutOfpods",
        f"Pod was rejected: {TOO_LITTLE.format('pods', 1, 3, 3)}",
    )
    # Pods that were refused are deleted like others.
    for pod in (*seen.values(), fourth, third, last, runs):
        node.delete_pod(pod)


def test_admission_critical_pod_preempts_running_pod(plane: Plane, namespace: str, node: ClusterNode) -> None:
    known = node.node_object()
    assert known is not None
    cpu = known["status"]["allocatable"]["cpu"]
    # One that ends well is said to have succeeded, by the reference, too.
    victim = node.pod_document("victim", namespace, "trap 'exit 3' TERM; sleep 3600 & wait $!")
    victim["spec"]["containers"][0] |= {"resources": {"requests": {"cpu": cpu}}}
    victim = node.wait_pod_ready(plane.create(victim))
    critical = node.pod_document("critical", namespace, **CRITICAL)
    critical["spec"]["containers"][0] |= {"resources": {"requests": {"cpu": "100m"}}}
    critical = node.wait_pod_ready(plane.create(critical), 60)
    failed = node.wait_pod_phase(victim, "Failed")
    status = failed["status"]
    text = "Preempted in order to admit critical pod"
    assert (status["reason"], status["message"]) == ("Preempting", text)
    target = next(one for one in status["conditions"] if one["type"] == "DisruptionTarget")
    assert (target["status"], target["reason"], target["message"]) == (
        "True",
        "TerminationByKubelet",
        "Pod was preempted by Kubelet to accommodate a critical pod.",
    )
    assert wait_event(node, victim, "Preempting") == text
    if not node.reference:
        assert Page(node.page("/metrics")).value("kubelet_preemptions", preemption_signal="cpu") == 1
    for pod in (victim, critical):
        node.delete_pod(pod)


def test_admission_untolerated_no_execute_taint_rejected(
    plane: Plane, namespace: str, node: ClusterNode
) -> None:
    plane.patch("node", node.name, "", {"spec": {"taints": [{"key": "keep-off", "effect": "NoExecute"}]}})
    message = PREDICATE.format("TaintToleration") + "had taints that the pod didn't tolerate"
    try:
        # The agent hears of the taint and of the pod on different ways: a first pod may still come in.
        for number in range(10):
            pod = node.create_pod(namespace, f"tainted-{number}")
            # The cluster deletes it at once, for the same reason.
            told = node.wait("what became of it", partial(_said, plane, pod))
            if told == ("TaintToleration", message):
                return
        pytest.fail("no pod was refused")
    finally:
        plane.patch("node", node.name, "", {"spec": {"taints": None}})


def _said(plane: Plane, pod: Document) -> tuple[str, str] | None:
    """The first event of the node about a pod; of one that is gone it may have heard too late to say any."""
    meta = pod["metadata"]
    is_gone = plane.find("pod", meta["name"], meta["namespace"]) is None
    if is_gone:
        time.sleep(2)  # events may come after the end
    found = plane.events(meta["namespace"], meta["name"])
    return next(
        ((one["reason"], one["message"]) for one in found if one["source"].get("component") == "kubelet"),
        ("gone", "") if is_gone else None,
    )


def test_admission_node_label_added_before_pod_is_admitted(
    plane: Plane, namespace: str, node: ClusterNode
) -> None:
    plane.patch("node", node.name, "", {"metadata": {"labels": {"example.com/new": "yes"}}})
    pod = node.create_pod(namespace, "wanting", nodeSelector={"example.com/new": "yes"})
    node.wait_pod_ready(pod)
    node.delete_pod(pod)
