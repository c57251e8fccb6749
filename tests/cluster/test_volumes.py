"""Claims of a real cluster on a real node: used by real containers, and nothing is left behind."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykubelet.linux.loop_devices import attached_loops
from pykubelet.linux.mounts import read_mounts
from tests.support.cluster_node import ClusterNode
from tests.support.plane import Document, Plane, unique

pytestmark = pytest.mark.machine


class Storage:
    """Volumes and claims of one test."""

    def __init__(self, node: ClusterNode, namespace: str, folder: Path) -> None:
        self.node = node
        self.plane: Plane = node.plane
        self.namespace = namespace
        self.folder = folder
        self.volumes: list[str] = []

    def volume(self, claim: str, *, local: str = "", **spec: Any) -> str:
        """Have a volume for a claim, which need not exist yet."""
        name = unique("pv")
        if local:
            here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [self.node.name]}
            spec["local"] = {"path": local}
            spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}}
        spec = {
            "capacity": {"storage": "8Mi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": self.namespace, "name": claim},
        } | spec
        self.volumes.append(name)
        self.plane.create(
            {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
        )
        return name

    def claim(self, name: str, **spec: Any) -> None:
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "8Mi"}},
            "storageClassName": "",
        } | spec
        meta = {"name": name, "namespace": self.namespace}
        self.plane.create(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}
        )

    def wait_bound(self, claim: str) -> None:
        self.plane.wait_for(
            "persistentvolumeclaim",
            claim,
            self.namespace,
            lambda found: found["status"].get("phase") == "Bound",
            60,
        )

    def pod(self, script: str = "", *, uses: Document | None = None, **spec: Any) -> Document:
        """A pod with a volume `data`, that its container mounts, unless told otherwise."""
        document = self.node.pod_document(unique("p"), self.namespace, script, **spec)
        uses = uses or {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
        document["spec"]["containers"][0] |= uses
        return self.plane.create(document)

    def failure(self, pod: Document, words: str) -> str:
        """Wait for an event that says why a pod's volumes cannot be had."""

        def look() -> str | None:
            events = self.plane.events(self.namespace, pod["metadata"]["name"])
            found = [event["message"] for event in events if event["reason"] == "FailedMount"]
            return next((message for message in found if words in message), None)

        return self.node.wait(f"an event about {words}", look, 60)

    def left(self) -> list[str]:
        """What is left of volumes on the node."""
        root = self.node.root
        loops = [file for _, file in attached_loops() if file.startswith((str(root), str(self.folder)))]
        places = [str(path) for path in root.glob("pods/*/volume*/*~local*")]
        return [*loops, *places, *(str(path) for path in root.glob("plugins/*local*/volumeDevices/*"))]


@pytest.fixture
def storage(cluster_member: ClusterNode, namespace: str, tmp_path: Path) -> Iterator[Storage]:
    made = Storage(cluster_member, namespace, tmp_path)
    yield made
    for pod in made.plane.items("pod", namespace):
        cluster_member.delete_pod(pod, 60)
    try:
        cluster_member.wait("nothing to be left of volumes", lambda: not made.left())
        assert [mount for mount in read_mounts() if str(tmp_path) in str(mount.point)] == []
    finally:
        for name in made.volumes:
            made.plane.delete("persistentvolume", name)


def data(claim: str, **more: Any) -> list[Document]:
    return [{"name": "data", "persistentVolumeClaim": {"claimName": claim, **more}}]


def shell(node: ClusterNode, pod: Document, script: str) -> str:
    return node.shell(pod["metadata"]["name"], script)


def test_local_volume_directory_fs_group_and_read_only(
    storage: Storage, cluster_member: ClusterNode, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    (folder / "old").write_text("kept")
    storage.volume("claim", local=str(folder))
    storage.claim("claim")
    storage.wait_bound("claim")
    writer = storage.pod(
        volumes=data("claim"), securityContext={"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000}
    )
    # One after the other: only the first pod on a volume that pods share gives it its group.
    cluster_member.wait_pod_ready(writer, 60)
    reader = storage.pod(volumes=data("claim", readOnly=True))
    cluster_member.wait_pod_ready(reader, 60)
    assert shell(cluster_member, writer, "echo new > /data/new; cat /data/old") == "kept"
    assert (folder / "new").stat().st_gid == 2000
    assert (folder / "new").stat().st_uid == 1000
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2770
    said = shell(cluster_member, reader, "cat /data/new; touch /data/x 2>/dev/null || echo refused")
    assert said.split() == ["new", "refused"]
    cluster_member.delete_pod(writer)
    assert shell(cluster_member, reader, "cat /data/new") == "new\n"
    assert sorted(path.name for path in folder.iterdir()) == ["new", "old"]


def test_local_volume_block_file_removed_by_restarted_kubelet(
    storage: Storage, cluster_member: ClusterNode, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.write(b"hello")
        file.truncate(8 << 20)
    storage.volume("claim", local=str(image), volumeMode="Block")
    storage.claim("claim", volumeMode="Block")
    storage.wait_bound("claim")
    uses = {"volumeDevices": [{"name": "data", "devicePath": "/dev/xvdb"}]}
    pod = storage.pod(volumes=data("claim"), uses=uses)
    cluster_member.wait_pod_ready(pod, 60)
    script = "head -c 5 /dev/xvdb; printf WORLD | dd of=/dev/xvdb conv=notrunc 2>/dev/null; sync"
    assert shell(cluster_member, pod, script) == "hello"
    # An agent that never saw the pod takes everything down.
    cluster_member.kill()
    cluster_member.start()
    cluster_member.delete_pod(pod)
    assert image.read_bytes()[:5] == b"WORLD"
    wrong = storage.pod(volumes=data("claim"))
    assert "has volumeMode Block, but is specified in volumeMounts" in storage.failure(wrong, "volumeMode")


def test_pvc_bound_later_pod_waits_with_event(
    storage: Storage, cluster_member: ClusterNode, tmp_path: Path
) -> None:
    storage.claim("claim")
    pod = storage.pod(volumes=data("claim"))
    missing = storage.pod(volumes=data("nothing"))
    where = f"error processing PVC {storage.namespace}"
    # A first try may also miss what others know late: the pod's token, or that the pod is this node's.
    unbound = (
        "unmounted volumes=[data], unattached volumes=[], "
        f"failed to process volumes=[data]: {where}/claim: PVC is not bound"
    )
    assert storage.failure(pod, unbound) == f"Unable to attach or mount volumes: {unbound}"
    assert storage.failure(missing, '"nothing" not found').endswith(
        f'{where}/nothing: failed to fetch PVC from API server: persistentvolumeclaims "nothing" not found'
    )
    storage.volume("claim", hostPath={"path": str(tmp_path), "type": "Directory"})
    cluster_member.wait_pod_ready(pod, 60)
    (tmp_path / "file").write_text("seen")
    assert shell(cluster_member, pod, "cat /data/file") == "seen"


def test_generic_ephemeral_volume_claim_deleted_with_pod(
    storage: Storage, cluster_member: ClusterNode, tmp_path: Path
) -> None:
    template = {
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "8Mi"}},
            "storageClassName": "",
        }
    }
    volume = {"name": "data", "ephemeral": {"volumeClaimTemplate": template}}
    pod = storage.pod("echo x > /data/x; sleep 3600", volumes=[volume])
    claim = f"{pod['metadata']['name']}-data"
    storage.volume(claim, local=str(tmp_path))
    cluster_member.wait_pod_ready(pod, 60)
    cluster_member.wait("the file", (tmp_path / "x").exists)
    cluster_member.delete_pod(pod, 60)
    storage.plane.wait_gone("persistentvolumeclaim", claim, storage.namespace, 60)


def test_pvc_read_write_once_pod_second_pod_waits(
    storage: Storage, cluster_member: ClusterNode, tmp_path: Path
) -> None:
    only = {"accessModes": ["ReadWriteOncePod"]}
    name = storage.volume("claim", local=str(tmp_path), **only)
    storage.claim("claim", **only)
    storage.wait_bound("claim")
    first = storage.pod(volumes=data("claim"))
    cluster_member.wait_pod_ready(first, 60)
    second = storage.pod(volumes=data("claim"))
    assert storage.failure(second, "ReadWriteOncePod") == (
        f'MountVolume.SetUp failed for volume "{name}" : '
        "volume uses the ReadWriteOncePod access mode and is already in use by another pod"
    )
    cluster_member.delete_pod(first)
    cluster_member.wait_pod_ready(second, 130)


def test_iscsi_volume_attached_by_controller_before_mount(
    storage: Storage, cluster_member: ClusterNode
) -> None:
    """There is no such disk here, but the controllers give leave to look for it."""
    iqn = f"iqn.2026-01.com.example:{unique('disk')}"
    name = storage.volume("claim", iscsi={"targetPortal": "192.0.2.7", "iqn": iqn, "lun": 0})
    storage.claim("claim")
    storage.wait_bound("claim")
    pod = storage.pod(volumes=data("claim"))
    reason = storage.failure(pod, "iscsiadm")
    assert reason.startswith(f'MountVolume.SetUp failed for volume "{name}" : ')
    status = storage.plane.get("node", cluster_member.name)["status"]
    attached = f"kubernetes.io/iscsi/192.0.2.7:{iqn}:0"
    assert attached in status["volumesInUse"]
    assert attached in [volume["name"] for volume in status["volumesAttached"]]
    cluster_member.delete_pod(pod)
    storage.plane.wait_for(
        "node",
        cluster_member.name,
        "",
        lambda found: attached not in found["status"].get("volumesInUse", ()),
        60,
    )


def test_volume_setup_failure_event_message_and_retry(storage: Storage, tmp_path: Path) -> None:
    name = storage.volume("claim", local=f"{tmp_path}/nothing")
    storage.claim("claim")
    storage.wait_bound("claim")
    pod = storage.pod(volumes=data("claim"))
    assert storage.failure(pod, "does not exist") == (
        f'MountVolume.NewMounter initialization failed for volume "{name}" : '
        f'path "{tmp_path}/nothing" does not exist'
    )
    image = storage.pod(volumes=[{"name": "data", "image": {"reference": "registry.invalid/x:1"}}])
    assert "container runtime cannot mount images" in storage.failure(image, "mount images")
    (tmp_path / "nothing").mkdir()
    storage.node.wait_pod_ready(pod, 130)
