"""Pods that nobody made by hand: of a Deployment, a DaemonSet, a Job and a CronJob, on our node.

The scheduler and the controllers are the real ones; what is looked at is what people see with kubectl.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.conftest import fresh_namespace
from tests.cluster.kubectl_program import Kubectl
from tests.support.cluster_node import ClusterNode
from tests.support.manifests import forever
from tests.support.plane import Document, Plane

pytestmark = pytest.mark.machine

NEXT_MINUTE = 120.0
"""In seconds: a CronJob's first turn is at the beginning of a minute."""
LONG = 120.0
"""In seconds: for what pods, the scheduler and the controllers do one after the other."""


def owner(kind: str, name: str, version: str, **spec: Any) -> Document:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def template(node: ClusterNode, app: str, command: list[str], **spec: Any) -> Document:
    """Pods for this node, which the scheduler has to find: others of the test run may still be leaving."""
    container = {"name": "main", "image": node.image, "imagePullPolicy": "Never", "command": command}
    chosen = {"kubernetes.io/hostname": node.name}
    spec = {"containers": [container], "nodeSelector": chosen, "terminationGracePeriodSeconds": 2, **spec}
    return {"metadata": {"labels": {"app": app}}, "spec": spec}


def lasting(node: ClusterNode, app: str) -> Document:
    """What a Deployment and a DaemonSet have in common."""
    return {"selector": {"matchLabels": {"app": app}}, "template": template(node, app, forever())}


def passing(node: ClusterNode, app: str, word: str) -> Document:
    return {"template": template(node, app, ["echo", word], restartPolicy="Never")}


def pods_of(node: ClusterNode, namespace: str, app: str) -> list[Document]:
    return node.plane.items("pod", namespace, query=f"labelSelector=app%3D{app}")


@pytest.fixture(scope="module")
def space(plane: Plane) -> Iterator[str]:
    with fresh_namespace(plane) as name:
        yield name


@pytest.fixture(scope="module")
def kubectl(plane: Plane) -> Kubectl:
    return Kubectl(plane)


@pytest.fixture(scope="module", autouse=True)
def cron_job(cluster_member: ClusterNode, space: str, kubectl: Kubectl) -> str:
    """Made first of all: its turn comes while the others are tried."""
    job = {"spec": {"ttlSecondsAfterFinished": 600, **passing(cluster_member, "nightly", "on time")}}
    made = owner("CronJob", "nightly", "batch/v1", schedule="* * * * *", jobTemplate=job)
    kubectl.ok("apply", "-n", space, "-f", "-", input=json.dumps(made).encode())
    return "nightly"


def test_deployment_rollout_scale_and_delete(
    cluster_member: ClusterNode, space: str, kubectl: Kubectl
) -> None:
    node, name = cluster_member, "web"
    made = owner("Deployment", name, "apps/v1", replicas=2, **lasting(node, name))
    kubectl.ok("apply", "-n", space, "-f", "-", input=json.dumps(made).encode())
    kubectl.ok("rollout", "status", "-n", space, f"deployment/{name}", timeout=LONG)
    first = {pod["metadata"]["uid"] for pod in pods_of(node, space, name)}
    assert len(first) == 2
    said = kubectl.ok("get", "deployment", "-n", space, name, "--no-headers").decode().split()
    assert said[:4] == [name, "2/2", "2", "2"]
    # A new version takes the old one's place pod by pod, and a smaller size ends what is too much.
    kubectl.ok("rollout", "restart", "-n", space, f"deployment/{name}")
    kubectl.ok("rollout", "status", "-n", space, f"deployment/{name}", timeout=LONG)
    kubectl.ok("scale", "-n", space, f"deployment/{name}", "--replicas=1")
    node.wait("one pod to be left", lambda: len(pods_of(node, space, name)) == 1, LONG)
    (last,) = pods_of(node, space, name)
    assert last["metadata"]["uid"] not in first
    kubectl.ok("delete", "-n", space, f"deployment/{name}", "--cascade=foreground", timeout=LONG)
    node.wait_gone(last["metadata"]["name"], last["metadata"]["uid"])


def test_daemon_set_deleted_pod_is_recreated(
    cluster_member: ClusterNode, space: str, kubectl: Kubectl
) -> None:
    node, name = cluster_member, "everywhere"
    made = owner("DaemonSet", name, "apps/v1", **lasting(node, name))
    kubectl.ok("apply", "-n", space, "-f", "-", input=json.dumps(made).encode())
    kubectl.ok("rollout", "status", "-n", space, f"daemonset/{name}", timeout=LONG)
    (pod,) = pods_of(node, space, name)
    assert pod["spec"]["nodeName"] == node.name
    # It is made anew when somebody deletes it.
    kubectl.ok("delete", "pod", "-n", space, pod["metadata"]["name"], timeout=LONG)
    kubectl.ok("rollout", "status", "-n", space, f"daemonset/{name}", timeout=LONG)
    another = node.wait("another pod", lambda: pods_of(node, space, name))[0]
    assert another["metadata"]["uid"] != pod["metadata"]["uid"]
    node.wait_pod_ready(another)
    kubectl.ok("delete", "-n", space, f"daemonset/{name}", "--cascade=foreground", timeout=LONG)


def test_job_parallel_completions_succeed(cluster_member: ClusterNode, space: str, kubectl: Kubectl) -> None:
    node = cluster_member
    made = owner("Job", "sum", "batch/v1", completions=2, parallelism=2, **passing(node, "sum", "done"))
    kubectl.ok("apply", "-n", space, "-f", "-", input=json.dumps(made).encode())
    kubectl.ok("wait", "-n", space, "--timeout=115s", "--for=condition=Complete", "job/sum", timeout=LONG)
    assert kubectl.ok("logs", "-n", space, "-l", "app=sum").decode().split() == ["done", "done"]
    assert {pod["status"]["phase"] for pod in pods_of(node, space, "sum")} == {"Succeeded"}


def test_job_failing_container_reports_exit_code(
    cluster_member: ClusterNode, space: str, kubectl: Kubectl
) -> None:
    work = template(cluster_member, "vain", ["sh", "-c", "exit 3"], restartPolicy="Never")
    made = owner("Job", "vain", "batch/v1", backoffLimit=0, template=work)
    kubectl.ok("apply", "-n", space, "-f", "-", input=json.dumps(made).encode())
    kubectl.ok("wait", "-n", space, "--timeout=115s", "--for=condition=Failed", "job/vain", timeout=LONG)
    (pod,) = pods_of(cluster_member, space, "vain")
    assert pod["status"]["phase"] == "Failed"
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3


def test_cron_job_pod_succeeds(
    cluster_member: ClusterNode, space: str, kubectl: Kubectl, cron_job: str
) -> None:
    node = cluster_member
    found = node.wait("its turn", lambda: pods_of(node, space, cron_job), NEXT_MINUTE)
    # There may be some already; of more than three that have ended the oldest one goes.
    pod = max(found, key=lambda one: one["metadata"]["creationTimestamp"])
    node.wait_pod_phase(pod, "Succeeded", LONG)
    assert kubectl.ok("logs", "-n", space, pod["metadata"]["name"]) == b"on time\n"
    kubectl.ok("delete", "-n", space, f"cronjob/{cron_job}", "--cascade=foreground", timeout=LONG)
    node.wait("its pods to go", lambda: not pods_of(node, space, cron_job), LONG)
