"""CSI in a real cluster: a real driver process, the real attach controller, real containers.

What the driver's own attacher would do (fulfil VolumeAttachments) the test does.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.linux.mounts import read_mounts
from pykubelet.volumes.csi.names import MIGRATED, attachment_name, unique_name
from tests.cluster.csi_rig import SECONDS, Rig, attaching, csi_rig, drivers, in_use
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.csi_driver.process import DRIVER, driver_process
from tests.support.plane import Document, Plane
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def node(plane: Plane, runtime: RunningRuntime) -> Iterator[ClusterNode]:
    """A node that looks at its pods often, so that growth is noticed soon."""
    with in_cluster(cluster_node(plane, runtime, settings={"syncFrequency": "2s"})) as started:
        yield started


@pytest.fixture
def rig(node: ClusterNode, namespace: str) -> Iterator[Rig]:
    """A driver that has registered; at the end nothing is left of its volumes, nor of itself."""
    with csi_rig(node, namespace) as made:
        yield made


def test_csi_node_info_driver_registered_and_removed(rig: Rig, node: ClusterNode) -> None:
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


def test_csi_attachable_volume_attached_mounted_and_detached(rig: Rig, node: ClusterNode) -> None:
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
        lambda: in_use(node) == [unique_name(DRIVER, handle)],
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


def test_csi_migrated_in_tree_volume_uses_csi_driver(rig: Rig, node: ClusterNode) -> None:
    """The attach controller reads it by itself: it and the agent must mean the same volume."""
    name = MIGRATED["awsElasticBlockStore"]

    def names() -> list[str]:
        return [found["name"] for found in drivers(node)]

    def in_tree(handle: str) -> Document:
        return {"awsElasticBlockStore": {"volumeID": f"aws://zone/{handle}", "fsType": "ext4"}}

    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as folder:
        base, registry = Path(folder).resolve(), node.root / "plugins_registry"
        with driver_process(base, registry, f"--name={name}", f"--node-id={node.name}") as driver:
            node.wait("the driver to be told", lambda: name in names(), SECONDS)
            claim, handle = rig.claim(of=in_tree)
            with attaching(node.plane, name):
                pod = rig.pod({"persistentVolumeClaim": {"claimName": claim}})
                node.wait_pod_ready(pod, SECONDS)
            (published,) = driver.calls("NodePublishVolume")
            assert published["volume_id"] == handle
            assert published["volume_context"] == {"partition": "0"}
            assert published["publish_context"] == {"disk": "seven"}
            assert rig.shell(pod, "echo x > /data/x; cat /data/x").strip() == "x"
            node.wait("it to be in use", lambda: in_use(node) == [unique_name(name, handle)], SECONDS)
            node.delete_pod(pod, SECONDS)
            node.wait("nothing to be left", lambda: not rig.left() and not driver.loops(), SECONDS)
            attachment = attachment_name(handle, name, node.name)
            node.plane.wait_gone("volumeattachment", attachment, seconds=SECONDS)
            driver.stop()
            node.wait("the driver to be gone", lambda: name not in names(), SECONDS)


def test_csi_block_volume_kubelet_restart_device_usable(rig: Rig, node: ClusterNode) -> None:
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


def test_csi_volumes_handover_to_upstream_kubelet_and_back(rig: Rig, node: ClusterNode) -> None:
    """Each takes down what the other has mounted, by what it left on disk."""
    program = rig.plane.reference_kubelet
    if program is None:
        pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
    rig.driver_object(attachRequired=False, volumeLifecycleModes=["Persistent", "Ephemeral"])

    def hand_to(agent: Path | None) -> None:
        node.kill()
        node.hand_to(agent)
        node.start()
        node.wait_registered()

    def pods() -> dict[str, Document]:
        files, block = rig.claim(fsType="ext4"), rig.claim(block=True)
        made = {
            files[1]: rig.pod({"persistentVolumeClaim": {"claimName": files[0]}}),
            block[1]: rig.pod({"persistentVolumeClaim": {"claimName": block[0]}}, device=True),
            "inline": rig.pod({"csi": {"driver": DRIVER}}),
        }
        for pod in made.values():
            node.wait_pod_ready(pod, SECONDS)
        return made

    def delete(made: dict[str, Document]) -> None:
        for pod in made.values():
            node.delete_pod(pod, SECONDS)
        node.wait("nothing to be left", lambda: not rig.left(), SECONDS)
        unstaged = {call["volume_id"] for call in rig.driver.calls("NodeUnstageVolume")}
        assert set(made) - {"inline"} <= unstaged

    with undo_host_changes():
        try:
            ours = pods()
            hand_to(program)
            for pod in ours.values():
                node.wait_pod_ready(pod, SECONDS)
            delete(ours)
            theirs = pods()
            hand_to(None)
            for pod in theirs.values():
                node.wait_pod_ready(pod, SECONDS)
            delete(theirs)
        finally:
            if node.reference:
                hand_to(None)


def test_csi_inline_volume_driver_hangs_kubelet_restart_published(rig: Rig, node: ClusterNode) -> None:
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
    assert node.stop() == 0, node.log_tail()
    # Before the next agent starts: it asks at once, and waits for two minutes for a driver that hangs.
    rig.driver.behave()
    node.start()
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


def test_csi_volume_expansion_with_running_pod_resizes_file_system(rig: Rig, node: ClusterNode) -> None:
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


def test_csi_driver_registered_later_pod_waits_and_starts(rig: Rig, node: ClusterNode) -> None:
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


def test_csi_driver_gone_pods_deleted_and_unpublish_retried_on_return(rig: Rig, node: ClusterNode) -> None:
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
    before = len(rig.driver.calls())
    rig.driver.start()
    node.wait("nothing to be left", lambda: not rig.left(), SECONDS)
    asked = [(call["call"], call["request"].get("volume_id")) for call in rig.driver.calls()]
    for handle in handles:
        assert ("NodeUnpublishVolume", handle) in asked[before:]
        assert ("NodeUnstageVolume", handle) in asked[before:]
    node.wait("the volumes not to be in use", lambda: in_use(node) == [], SECONDS)
    assert not (node.root / "pykubelet").exists()
    for attachment in attachments:
        node.plane.wait_gone("volumeattachment", attachment, seconds=SECONDS)


def test_csi_volume_in_use_reported_before_mount(rig: Rig, node: ClusterNode) -> None:
    rig.driver_object(attachRequired=True)
    name, handle = rig.claim()
    pod = rig.pod({"persistentVolumeClaim": {"claimName": name}})
    # It is attached only now, so nothing can have been mounted.
    node.wait("the volume to be in use", lambda: in_use(node) == [unique_name(DRIVER, handle)], SECONDS)
    assert rig.driver.names() == []
    with attaching(node.plane):
        node.wait_pod_ready(pod, SECONDS)


def test_csi_node_exists_when_node_ready_and_restart_keeps_ready(node: ClusterNode) -> None:
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
