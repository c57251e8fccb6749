"""A node that comes up again while the API server is away: its pods come back all the same."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster_node import ClusterNode
from tests.support.node import is_ready, status_of
from tests.support.plane import Plane, unique

pytestmark = pytest.mark.machine


def pods_in(folder: Path) -> list[str]:
    """The uids of the pods that have a checkpoint."""
    return [path.stem for path in folder.glob("*.json") if path.stem != "node"]


def test_pod_checkpoint_api_server_unavailable_pods_restored(
    plane: Plane, make_node: Callable[..., ClusterNode], namespace: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    node = make_node(flags=[f"--pod-checkpoint-dir={folder}"])
    node.start()
    node.wait_registered()
    plane.create(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "settings", "namespace": namespace},
            "data": {"color": "blue"},
        }
    )
    # A label that only the API server knows: without it the pod would be refused.
    plane.patch("node", node.name, "", {"metadata": {"labels": {"example.com/disk": "fast"}}})
    node.wait("the node's checkpoint", lambda: "example.com/disk" in (folder / "node.json").read_text())
    document = node.pod_document(unique("p"), namespace, nodeSelector={"example.com/disk": "fast"})
    variable = {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "color"}}}
    document["spec"]["containers"][0]["env"] = [variable]
    kept = node.wait_pod_ready(plane.create(document))
    deleted = node.wait_pod_ready(node.create_pod(namespace))
    name = kept["metadata"]["name"]
    node.wait("the checkpoints", lambda: len(pods_in(folder)) == 2)
    # One that is written just now may be gone, or have another name, a moment later.
    node.wait(
        "files that are nobody else's",
        lambda: {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600},
    )
    node.stop()
    # As after a reboot: nothing runs any more.
    for box in node.truth.sandboxes():
        node.truth.remove_sandbox(box.id)
    plane.delete("pod", deleted["metadata"]["name"], namespace, grace=0)
    with plane.without_server():
        node.start()
        node.wait("the pod to run", lambda: node.truth.running(name), 60)
        assert node.shell(name, "echo -n $COLOR") == "blue"
        node.wait("the other one to run, too", lambda: node.truth.running(deleted["metadata"]["name"]), 60)
    # Its word wins.
    node.wait_gone(deleted["metadata"]["name"], deleted["metadata"]["uid"], 60)
    (running,) = node.truth.running(name)
    # The API server has called it ready all the time, of its container of before.
    node.wait_api_pod(
        kept,
        "to be told of as it is",
        lambda found: (
            is_ready(found) and status_of(found, "main").get("containerID", "").endswith(running.id)
        ),
    )
    node.wait(
        "only its checkpoint",
        lambda: pods_in(folder) == [kept["metadata"]["uid"]],
    )
    node.delete_pod(kept)
    node.wait("no checkpoint but the node's", lambda: [path.stem for path in folder.iterdir()] == ["node"])


def test_pod_checkpoint_pod_with_claim_restored_without_api_server(
    plane: Plane, make_node: Callable[..., ClusterNode], namespace: str, tmp_path: Path
) -> None:
    folder, data, volume = tmp_path / "checkpoints", tmp_path / "data", unique("pv")
    data.mkdir()
    (data / "file").write_text("kept")
    node = make_node(flags=[f"--pod-checkpoint-dir={folder}"])
    node.start()
    node.wait_registered()
    common = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    plane.create(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": common
            | {
                "capacity": {"storage": "1Mi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": namespace, "name": "data"},
                "hostPath": {"path": str(data)},
            },
        }
    )
    try:
        plane.create(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": "data", "namespace": namespace},
                "spec": common | {"volumeName": volume, "resources": {"requests": {"storage": "1Mi"}}},
            }
        )
        plane.wait_for(
            "persistentvolumeclaim",
            "data",
            namespace,
            lambda found: found["status"].get("phase") == "Bound",
            60,
        )
        claimed = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
        document = node.pod_document(unique("p"), namespace, volumes=[claimed])
        document["spec"]["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
        pod = node.wait_pod_ready(plane.create(document))
        name = pod["metadata"]["name"]
        checkpoint = folder / f"{pod['metadata']['uid']}.json"
        node.wait("the claim's checkpoint", lambda: volume in checkpoint.read_text())
        node.stop()
        for box in node.truth.sandboxes():
            node.truth.remove_sandbox(box.id)
        with plane.without_server():
            node.start()
            node.wait("the pod to run", lambda: node.truth.running(name), 60)
            assert node.shell(name, "cat /data/file") == "kept"
        node.delete_pod(pod)
    finally:
        plane.delete("persistentvolume", volume)
