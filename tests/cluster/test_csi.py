"""CSI in a real cluster: a real driver process, the real attach controller, real containers.

What the driver's own attacher would do (fulfil VolumeAttachments) the test does.
"""

import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pykubelet.devcluster.api import UNREACHABLE, ApiRefusal
from pykubelet.host.mounts import plan_unmounts, read_mounts, unmount
from pykubelet.volumes.csi.names import attachment_name, unique_name
from tests.cluster.node import ClusterNode, cluster_node, in_cluster
from tests.cluster.plane import Document, Plane, unique
from tests.conftest import RunningRuntime
from tests.csi_driver.process import DRIVER, DriverProcess, driver_process

pytestmark = pytest.mark.machine

SECONDS = 90


@pytest.fixture(scope="module")
def node(plane: Plane, runtime: RunningRuntime) -> Iterator[ClusterNode]:
    """A node that looks at its pods often, so that growth is noticed soon."""
    with in_cluster(cluster_node(plane, runtime, settings={"syncFrequency": "2s"})) as started:
        yield started


class Rig:
    """A driver on a node, and its objects."""

    def __init__(self, node: ClusterNode, driver: DriverProcess, namespace: str) -> None:
        self.node = node
        self.plane = node.plane
        self.driver = driver
        self.namespace = namespace
        self.volumes: list[str] = []

    def driver_object(self, **spec: Any) -> None:
        self.plane.delete("csidriver", DRIVER)
        meta = {"name": DRIVER}
        self.plane.create(
            {"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": meta, "spec": spec}
        )

    def claim(self, *, block: bool = False, **source: Any) -> tuple[str, str]:
        """Have a claim with its volume; gives the volume's name and its handle."""
        name, handle, mode = unique("pv"), unique("vol"), "Block" if block else "Filesystem"
        common = {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeMode": mode}
        self.volumes.append(name)
        self.plane.create(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name},
                "spec": common
                | {
                    "capacity": {"storage": "16Mi"},
                    "persistentVolumeReclaimPolicy": "Retain",
                    "claimRef": {"namespace": self.namespace, "name": name},
                    "csi": {"driver": DRIVER, "volumeHandle": handle, **source},
                },
            }
        )
        self.plane.create(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": common | {"volumeName": name, "resources": {"requests": {"storage": "16Mi"}}},
            }
        )
        self.plane.wait_for(
            "persistentvolumeclaim",
            name,
            self.namespace,
            lambda found: found["status"].get("phase") == "Bound",
            60,
        )
        return name, handle

    def pod(self, volume: Document, *, device: bool = False, **spec: Any) -> Document:
        """Create a pod with one volume at `/data`, or as the device `/dev/data`."""
        uses: Document = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
        if device:
            uses = {"volumeDevices": [{"name": "data", "devicePath": "/dev/data"}]}
        document = self.node.pod_document(
            unique("p"), self.namespace, volumes=[{"name": "data", **volume}], **spec
        )
        document["spec"]["containers"][0] |= uses
        return self.plane.create(document)

    def shell(self, pod: Document, script: str) -> str:
        return self.node.shell(pod["metadata"]["name"], script)

    def left(self) -> list[str]:
        """What is left of CSI volumes on the node."""
        root = self.node.root
        places = [*root.glob("pods/*/volumes/kubernetes.io~csi/*"), *root.glob("pods/*/volumeDevices/*/*")]
        places += root.glob("plugins/kubernetes.io/csi/*/*")
        mounts = [mount.point for mount in read_mounts() if "csi" in str(mount.point.relative_to("/"))]
        return [
            *map(str, places),
            *(str(point) for point in mounts if point.is_relative_to(root)),
            *self.driver.loops(),
        ]


@pytest.fixture
def rig(node: ClusterNode, namespace: str) -> Iterator[Rig]:
    """A driver that has registered; at the end nothing is left of its volumes, nor of itself."""
    plane = node.plane
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as folder:
        base = Path(folder).resolve()
        options = (f"--node-id={node.name}", "--limit=5", f"--topology=rack.example.com/{node.name}=r1")
        with driver_process(base, node.root / "plugins_registry", *options) as driver:
            made = Rig(node, driver, namespace)
            made.driver_object()
            try:
                node.wait("the driver to be told", lambda: drivers(node), SECONDS)
                yield made
                for pod in plane.items("pod", namespace):
                    node.delete_pod(pod, SECONDS)
                node.wait("nothing to be left", lambda: not made.left(), SECONDS)
            finally:
                driver.stop()
                for name in made.volumes:
                    plane.delete("persistentvolume", name)
                plane.delete("csidriver", DRIVER)
                for point in plan_unmounts(read_mounts(), base):
                    unmount(point, detach=True)
                node.wait("the driver to be gone", lambda: not drivers(node), SECONDS)


def drivers(node: ClusterNode) -> list[Document]:
    found = node.plane.find("csinode", node.name)
    return (found or {}).get("spec", {}).get("drivers") or []


@contextmanager
def attaching(plane: Plane) -> Iterator[None]:
    """Play the driver's attacher for the time of a block."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.1):
            try:
                for found in plane.items("volumeattachment"):
                    if found["spec"]["attacher"] == DRIVER and not found["status"].get("attached"):
                        status = {"attached": True, "attachmentMetadata": {"disk": "seven"}}
                        name = found["metadata"]["name"]
                        plane.patch("volumeattachment", name, "", {"status": status}, subresource="status")
            except (*UNREACHABLE, ApiRefusal):
                continue

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_the_cluster_knows_the_driver(rig: Rig, node: ClusterNode) -> None:
    found = node.plane.get("csinode", node.name)
    (entry,) = found["spec"]["drivers"]
    assert entry == {
        "name": DRIVER,
        "nodeID": node.name,
        "topologyKeys": [f"rack.example.com/{node.name}"],
        "allocatable": {"count": 5},
    }
    (owner,) = found["metadata"]["ownerReferences"]
    meta = node.plane.get("node", node.name)["metadata"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", node.name, meta["uid"])
    assert json.loads(meta["annotations"]["csi.volume.kubernetes.io/nodeid"]) == {DRIVER: node.name}
    assert meta["labels"][f"rack.example.com/{node.name}"] == "r1"
    rig.driver.stop()
    node.wait("the driver to be gone", lambda: not drivers(node), SECONDS)
    rig.driver.start()
    node.wait("the driver to be back", lambda: drivers(node), SECONDS)


def test_a_volume_is_attached_used_and_detached(rig: Rig, node: ClusterNode) -> None:
    rig.driver_object(attachRequired=True, fsGroupPolicy="File")
    name, handle = rig.claim(fsType="ext4", volumeAttributes={"color": "blue"})
    volume = {"persistentVolumeClaim": {"claimName": name}}
    pod = rig.pod(volume, securityContext={"fsGroup": 2000})
    attachment = attachment_name(handle, DRIVER, node.name)
    node.plane.wait_for("volumeattachment", attachment, "", seconds=SECONDS)
    assert rig.driver.names() == [], "it is not attached yet"
    with attaching(node.plane):
        node.wait_pod_ready(pod, SECONDS)
    assert rig.driver.calls("NodeStageVolume")[0]["publish_context"] == {"disk": "seven"}
    assert rig.shell(pod, "echo hello > /data/file; stat -c %g /data/file").strip() == "2000"
    node.wait(
        "the volume to be in use",
        lambda: (node.node_object() or {})["status"].get("volumesInUse") == [unique_name(DRIVER, handle)],
        SECONDS,
    )
    second = rig.pod(volume)
    node.wait_pod_ready(second, SECONDS)
    assert rig.shell(second, "cat /data/file").strip() == "hello"
    assert rig.driver.names().count("NodeStageVolume") == 1
    node.delete_pod(pod, SECONDS)
    node.delete_pod(second, SECONDS)
    node.wait("nothing to be left", lambda: not rig.left(), SECONDS)
    assert rig.driver.names()[-1] == "NodeUnstageVolume"
    node.plane.wait_gone("volumeattachment", attachment, seconds=SECONDS)


def test_a_device_survives_the_agents_death(rig: Rig, node: ClusterNode) -> None:
    rig.driver_object(attachRequired=False)
    name, handle = rig.claim(block=True)
    pod = rig.pod({"persistentVolumeClaim": {"claimName": name}}, device=True)
    node.wait_pod_ready(pod, SECONDS)
    rig.shell(pod, "echo written | dd of=/dev/data bs=512 conv=sync 2>/dev/null; sync")
    node.restart()
    node.wait_registered()
    assert rig.shell(pod, "head -c 7 /dev/data") == "written"
    node.delete_pod(pod, SECONDS)
    node.wait("nothing to be left", lambda: not rig.left(), SECONDS)
    with (rig.driver.volumes / f"{handle}.img").open("rb") as image:
        assert image.read(7) == b"written"


def test_an_inline_volume_with_tokens_while_the_driver_hangs_and_the_agent_dies(
    rig: Rig, node: ClusterNode
) -> None:
    rig.driver_object(
        attachRequired=False,
        podInfoOnMount=True,
        volumeLifecycleModes=["Ephemeral"],
        tokenRequests=[{"audience": "bank", "expirationSeconds": 3600}],
        requiresRepublish=True,
    )
    rig.driver.behave(hang=["NodePublishVolume"])
    pod = rig.pod({"csi": {"driver": DRIVER, "volumeAttributes": {"color": "blue"}}})
    node.wait("the driver to be asked", lambda: rig.driver.calls("NodePublishVolume"), SECONDS)
    node.restart()
    rig.driver.behave()
    node.wait_pod_ready(pod, SECONDS)
    context = rig.driver.calls("NodePublishVolume")[-1]["volume_context"]
    assert context["csi.storage.k8s.io/pod.uid"] == pod["metadata"]["uid"]
    assert (context["csi.storage.k8s.io/ephemeral"], context["color"]) == ("true", "blue")
    tokens = json.loads(context["csi.storage.k8s.io/serviceAccount.tokens"])
    assert tokens["bank"]["token"].count(".") == 2
    assert tokens["bank"]["expirationTimestamp"].endswith("Z")
    times = len(rig.driver.calls("NodePublishVolume"))
    node.wait("it to be published again", lambda: len(rig.driver.calls("NodePublishVolume")) > times, SECONDS)
    assert rig.shell(pod, "echo x > /data/x; cat /data/x").strip() == "x"


def test_a_volume_grows_under_its_pod(rig: Rig, node: ClusterNode) -> None:
    rig.driver_object(attachRequired=False)
    name, handle = rig.claim(fsType="ext4")
    pod = rig.pod({"persistentVolumeClaim": {"claimName": name}})
    node.wait_pod_ready(pod, SECONDS)
    node.plane.patch("persistentvolume", name, "", {"spec": {"capacity": {"storage": "32Mi"}}})
    node.plane.wait_for(
        "persistentvolumeclaim",
        name,
        rig.namespace,
        lambda found: found["status"]["capacity"]["storage"] == "32Mi",
        SECONDS,
    )
    assert (rig.driver.volumes / f"{handle}.img").stat().st_size == 32 << 20
    for about in (name, pod["metadata"]["name"]):

        def told(about: str = about) -> bool:
            events = node.plane.events(rig.namespace, about)
            return "FileSystemResizeSuccessful" in {event["reason"] for event in events}

        node.wait(f"an event about {about}", told, SECONDS)


def test_a_pod_waits_for_a_driver_that_comes_later(rig: Rig, node: ClusterNode) -> None:
    rig.driver_object(attachRequired=False)
    name, _ = rig.claim()
    rig.driver.stop()
    node.wait("the driver to be gone", lambda: not drivers(node), SECONDS)
    pod = rig.pod({"persistentVolumeClaim": {"claimName": name}})

    def told() -> bool:
        events = node.plane.events(rig.namespace, pod["metadata"]["name"])
        return any("not found in the list of registered CSI drivers" in event["message"] for event in events)

    node.wait("an event that says so", told, SECONDS)
    rig.driver.start()
    node.wait_pod_ready(pod, SECONDS)


def in_use(node: ClusterNode) -> list[str]:
    return (node.node_object() or {})["status"].get("volumesInUse") or []


def test_pods_leave_although_their_driver_never_comes_back(rig: Rig, node: ClusterNode) -> None:
    """Nobody may detach the volumes meanwhile; an agent that dies owes the same as before."""
    rig.driver_object(attachRequired=True)
    pods, handles = [], []
    with attaching(node.plane):
        for block in (False, True):
            name, handle = rig.claim(block=block, fsType="" if block else "ext4")
            handles.append(handle)
            pods.append(rig.pod({"persistentVolumeClaim": {"claimName": name}}, device=block))
        for pod in pods:
            node.wait_pod_ready(pod, SECONDS)
    used = sorted(unique_name(DRIVER, handle) for handle in handles)
    attachments = [attachment_name(handle, DRIVER, node.name) for handle in handles]
    node.wait("the volumes to be in use", lambda: in_use(node) == used, SECONDS)
    rig.driver.kill()
    for pod in pods:
        node.plane.delete("pod", pod["metadata"]["name"], rig.namespace)
    for pod in pods:
        node.delete_pod(pod, SECONDS)
        assert read_mounts(node.root / "pods" / pod["metadata"]["uid"]) == []

    def told(pod: Document) -> bool:
        events = node.plane.events(rig.namespace, pod["metadata"]["name"])
        return any(
            event["reason"] == "UnpublishedWithoutDriver" and DRIVER in event["message"] for event in events
        )

    node.wait("events that say so", lambda: all(map(told, pods)), SECONDS)
    node.restart()
    node.wait_registered()
    assert in_use(node) == used
    for attachment in attachments:
        assert "deletionTimestamp" not in node.plane.get("volumeattachment", attachment)["metadata"]
    rig.driver.start()
    node.wait("nothing to be left", lambda: not rig.left(), SECONDS)
    last = rig.driver.names()[-4:]
    assert sorted(last) == ["NodeUnpublishVolume"] * 2 + ["NodeUnstageVolume"] * 2
    node.wait("the volumes not to be in use", lambda: in_use(node) == [], SECONDS)
    assert not (node.root / "pykubelet").exists()
    for attachment in attachments:
        node.plane.wait_gone("volumeattachment", attachment, seconds=SECONDS)


def test_a_volume_is_reported_before_it_is_mounted(rig: Rig, node: ClusterNode) -> None:
    rig.driver_object(attachRequired=True)
    name, handle = rig.claim()
    pod = rig.pod({"persistentVolumeClaim": {"claimName": name}})
    # It is attached only now, so nothing can have been mounted.
    node.wait("the volume to be in use", lambda: in_use(node) == [unique_name(DRIVER, handle)], SECONDS)
    assert rig.driver.names() == []
    with attaching(node.plane):
        node.wait_pod_ready(pod, SECONDS)


def test_a_node_is_ready_when_it_has_its_csi_node(node: ClusterNode) -> None:
    """Whoever finds a node ready finds its CSINode; and a restart does not make a ready node unready."""
    plane = node.plane
    since = _ready(plane.get("node", node.name))["lastTransitionTime"]
    node.restart()
    node.wait_registered()
    assert _ready(plane.get("node", node.name))["lastTransitionTime"] == since
    assert plane.get("csinode", node.name)


def _ready(node: Document) -> Document:
    (found,) = (condition for condition in node["status"]["conditions"] if condition["type"] == "Ready")
    return dict(found)
