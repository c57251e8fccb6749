"""A pod that one of its containers restarts as a whole, as a scheduler and an API server see it."""

import pytest

from tests.support.cluster_node import ClusterNode
from tests.support.node import all_statuses, condition
from tests.support.plane import Document, unique

pytestmark = pytest.mark.machine

KIND = "AllContainersRestarting"
RULE = {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [3]}}
STATES = {"main": "running", "stubborn": "running", "once": "terminated"}


def document(node: ClusterNode, namespace: str) -> Document:
    """A pod for a scheduler that knows what the node declares; it restarts when it finds a file."""
    script = "until rm /shared/go 2>/dev/null; do sleep 0.1; done; exit 3"
    volumes = [{"name": "shared", "emptyDir": {}}]
    found = node.pod_document(unique("p"), namespace, script, restartPolicy="Never", volumes=volumes)
    spec = found["spec"]
    del spec["nodeName"]
    spec["nodeSelector"] = {"kubernetes.io/hostname": node.name}
    mounts = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}], "restartPolicy": "Never"}
    main = spec["containers"][0] | mounts
    # One does not listen, so the pod can be seen while it restarts; and one has ended for good.
    stubborn = main | {"name": "stubborn", "command": ["sleep", "3600"]}
    once = main | {"name": "once", "command": ["true"]}
    spec["containers"] = [main | {"restartPolicyRules": [RULE]}, stubborn, once]
    return found


def lives(found: Document, number: int) -> bool:
    """Whether all containers have begun again at least so often, and none is on its way."""
    begun = {
        status["name"]: next(iter(status["state"]))
        for status in all_statuses(found)
        if status["restartCount"] >= number
    }
    return begun == STATES and condition(found, KIND) == "False"


def ids(found: Document) -> set[str]:
    return {status["containerID"] for status in all_statuses(found)}


def since(found: Document) -> str:
    """When the pod last began or ended to restart: this stays to be seen, however quick that was."""
    return next((c["lastTransitionTime"] for c in found["status"]["conditions"] if c["type"] == KIND), "")


def test_restart_all_containers_rule_restarts_pod_and_survives_kubelet_kill(
    cluster_member: ClusterNode, namespace: str
) -> None:
    node = cluster_member
    created = node.plane.create(document(node, namespace))
    name = created["metadata"]["name"]
    before = node.wait_api_pod(created, "to live", lambda found: lives(found, 0), 60)

    def restart(last: Document) -> None:
        node.shell(name, "touch /shared/go", "stubborn")
        node.wait_api_pod(created, "to restart", lambda found: since(found) != since(last))

    restart(before)
    again = node.wait_api_pod(created, "to live again", lambda found: lives(found, 1), 90)
    assert again["status"]["podIP"] == before["status"]["podIP"]
    assert not ids(again) & ids(before)
    assert [status["restartCount"] for status in all_statuses(again)] == [1, 1, 1]

    # It has been said, so an agent that comes anew goes on with it.
    restart(again)
    node.kill()
    node.start()
    third = node.wait_api_pod(created, "to live a third time", lambda found: lives(found, 2), 90)
    assert third["status"]["podIP"] == before["status"]["podIP"]
    assert not ids(third) & ids(again)
    assert len(node.truth.sandboxes(name)) == 1
    node.delete_pod(created)
