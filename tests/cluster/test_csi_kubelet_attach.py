"""`enableControllerAttachDetach: false` in a real cluster: the kubelet attaches and detaches CSI volumes.

The attach/detach controller of the cluster runs, and leaves this node alone.
"""

from collections.abc import Iterator

import pytest

from pykubelet.volumes.csi.attacher import DIRECTORY
from pykubelet.volumes.csi.names import attachment_name
from tests.cluster.csi_rig import SECONDS, Rig, attaching, csi_rig
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.csi_driver.process import DRIVER
from tests.support.plane import Document, Plane, unique
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def node(plane: Plane, runtime: RunningRuntime) -> Iterator[ClusterNode]:
    settings = {"syncFrequency": "2s", "enableControllerAttachDetach": False}
    with in_cluster(cluster_node(plane, runtime, settings=settings)) as started:
        yield started


@pytest.fixture
def rig(node: ClusterNode, namespace: str) -> Iterator[Rig]:
    with csi_rig(node, namespace) as made:
        yield made


def events(node: ClusterNode, pod: Document) -> dict[str, str]:
    """Return the messages of the pod's events by their reasons."""
    meta = pod["metadata"]
    return {
        event["reason"]: event["message"]
        for event in node.plane.items("event", meta["namespace"])
        if event["involvedObject"].get("uid") == meta["uid"]
    }


def test_kubelet_attach_without_permission_event_names_remedy_then_attaches_and_detaches(
    rig: Rig, node: ClusterNode
) -> None:
    plane = node.plane
    rig.driver_object(attachRequired=True)
    name, handle = rig.claim(fsType="ext4")
    pod = rig.pod({"persistentVolumeClaim": {"claimName": name}})
    attachment = attachment_name(handle, DRIVER, node.name)
    node.wait("the denial", lambda: "FailedAttachVolume" in events(node, pod), SECONDS)
    message = events(node, pod)["FailedAttachVolume"]
    assert message.startswith(f'AttachVolume.Attach failed for volume "{name}" : '), message
    assert "grant create and delete on volumeattachments.storage.k8s.io" in message
    assert plane.find("volumeattachment", attachment) is None
    role = unique("attaching")
    rule = {"apiGroups": ["storage.k8s.io"], "resources": ["volumeattachments"]}
    plane.create(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": role},
            "rules": [{**rule, "verbs": ["create", "delete"]}],
        }
    )
    plane.create(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": role},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "User", "name": node.user, "apiGroup": "rbac.authorization.k8s.io"}],
        }
    )
    try:
        found = plane.wait_for("volumeattachment", attachment, "", seconds=SECONDS)
        assert found["spec"]["nodeName"] == node.name
        assert found["spec"]["source"] == {"persistentVolumeName": name}
        assert rig.driver.names() == [], "it is not attached yet"
        with attaching(plane):
            node.wait_pod_ready(pod, SECONDS)
        assert rig.driver.calls("NodeStageVolume")[0]["publish_context"] == {"disk": "seven"}
        node.wait("the event", lambda: "SuccessfulAttachVolume" in events(node, pod), SECONDS)
        assert (node.root / DIRECTORY / f"{attachment}.json").exists()
        # A kubelet that did not attach it detaches it.
        node.restart()
        node.wait_registered()
        node.delete_pod(pod, SECONDS)
        node.wait("the detachment", lambda: plane.find("volumeattachment", attachment) is None, SECONDS)
        node.wait("no record", lambda: not (node.root / DIRECTORY).exists(), SECONDS)
    finally:
        plane.delete("clusterrolebinding", role)
        plane.delete("clusterrole", role)
