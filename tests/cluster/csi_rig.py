"""A real CSI driver on a node of a real cluster, with its volumes, claims and pods.

What the driver's own attacher would do (fulfil VolumeAttachments) the tests do.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pykubelet.devcluster.admin_client import UNREACHABLE, ApiStatusError
from pykubelet.linux.mounts import plan_unmounts, read_mounts, unmount
from tests.support.cluster_node import ClusterNode
from tests.support.csi_driver.process import DRIVER, DriverProcess, driver_process
from tests.support.plane import Document, Plane, unique

SECONDS = 90


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

    def claim(
        self, *, block: bool = False, of: Callable[[str], Document] | None = None, **source: Any
    ) -> tuple[str, str]:
        """Have a claim with its volume; gives the volume's name and its handle.

        `of` gives the source of another kind than csi, for the handle.
        """
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
                    **(of(handle) if of else {"csi": {"driver": DRIVER, "volumeHandle": handle, **source}}),
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
        places += [
            path
            for path in root.glob("plugins/kubernetes.io/csi/*/*")
            # Of devices the reference leaves these two, empty.
            if path.name not in ("staging", "publish") or any(path.iterdir())
        ]
        mounts = [mount.point for mount in read_mounts() if "csi" in str(mount.point.relative_to("/"))]
        return [
            *map(str, places),
            *(str(point) for point in mounts if point.is_relative_to(root)),
            *self.driver.loops(),
        ]


@contextmanager
def csi_rig(node: ClusterNode, namespace: str) -> Iterator[Rig]:
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
    """The drivers in its CSINode; raises when the API server cannot say, which is not the same as none."""
    found = node.plane.known("csinode", node.name)
    return (found["spec"].get("drivers") or []) if found is not None else []


def in_use(node: ClusterNode) -> list[str]:
    """The volumes that are in use as the node says; raises when the API server cannot say."""
    return node.plane.get("node", node.name)["status"].get("volumesInUse") or []


@contextmanager
def attaching(plane: Plane, driver: str = DRIVER) -> Iterator[None]:
    """Play the driver's attacher for the time of a block."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.1):
            try:
                for found in plane.items("volumeattachment"):
                    if found["spec"]["attacher"] == driver and not found["status"].get("attached"):
                        status = {"attached": True, "attachmentMetadata": {"disk": "seven"}}
                        name = found["metadata"]["name"]
                        plane.patch("volumeattachment", name, "", {"status": status}, subresource="status")
            except (*UNREACHABLE, ApiStatusError):
                continue

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
