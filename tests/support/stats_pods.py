"""Pods that use every resource of which a kubelet has statistics.

They are the same for the comparison with the upstream kubelet, for Prometheus, and for recordings: a CPU
burner with a limit, a memory holder, a writer, a network sender, a crash loop, an init container, a sidecar,
probes, a pod on the host's network, a static pod, and volumes of all common kinds with a claim.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.cluster_node import ClusterNode
from tests.support.manifests import forever
from tests.support.node import status_of
from tests.support.plane import Document, unique

HELD_BYTES = 20_000_000
"""What the memory holder writes into its emptyDir in memory."""
ANONYMOUS_BYTES = 4_000_000
"""What its shell holds besides."""
WRITTEN_BYTES, LAYER_BYTES, CLAIM_BYTES = 1_000_000, 200_000, 3_000_000
"""What the writer has in its emptyDir and in its writable layer, and what is in the claim."""
STATIC, HOST_NETWORK = "static", "hostnet"
"""Names of the static pod, to which the node's is appended, and of the pod on the host's network."""
CRASHING = ("crasher", "bad")
"""Pod and container that is restarted all the time."""
_GATEWAY = "$(ip route | awk '/default/ {print $3}')"
_SECONDS = 120.0


class StatsPods:
    """The pods in one namespace of a node, with the objects that they use."""

    def __init__(self, node: ClusterNode, namespace: str, directory: Path) -> None:
        self.node, self.namespace = node, namespace
        self.directory = directory
        """Directory of the local volume."""
        self.volume = unique("pv")
        self.pods: dict[str, Document] = {}

    def create(self) -> None:
        """Create the pods and the static pod's manifest."""
        self._create_objects()
        for name, spec in self._specs().items():
            document = self.node.pod_document(name, self.namespace)
            document["spec"] |= {"terminationGracePeriodSeconds": 1, **spec}
            self.pods[name] = self.node.plane.create(document)
        static = self.node.pod_document(STATIC, self.namespace)
        del static["spec"]["nodeName"]
        static["spec"]["automountServiceAccountToken"] = False
        self.mirror = self.node.write(static)

    def wait_running(self) -> None:
        """Wait until all run, the crasher has been restarted and the files are written."""
        node = self.node
        for name, pod in self.pods.items():
            if name == "crasher":
                node.wait_api_pod(
                    pod, "to crash", lambda it: status_of(it, "bad")["restartCount"] > 0, _SECONDS
                )
            else:
                node.wait_pod_ready(pod, _SECONDS)
        node.plane.wait_for(
            "pod", self.mirror, self.namespace, lambda it: it["status"].get("phase") == "Running", _SECONDS
        )
        sizes = {
            ("holder", "/memory/file"): HELD_BYTES,
            ("writer", "/disk/file"): WRITTEN_BYTES,
            ("writer", "/layer"): LAYER_BYTES,
            ("volumes", "/claim/file"): CLAIM_BYTES,
        }
        for (name, path), size in sizes.items():
            node.wait(f"{path} of {name}", partial(self._has_bytes, name, path, size))

    def running_containers(self) -> list[tuple[str, str]]:
        """Return the containers that run all the time, by the names of pod and container."""
        found = [(self.mirror, "main")]
        for name, pod in self.pods.items():
            spec = pod["spec"]
            sidecars = [one for one in spec.get("initContainers", ()) if one.get("restartPolicy")]
            found += [(name, one["name"]) for one in (*sidecars, *spec["containers"])]
        return [pair for pair in found if pair != CRASHING]

    def volumes(self) -> dict[str, list[str]]:
        """Return the names of volumes that have usage, by pod: all but those of the host's directories."""
        return {
            name: [volume["name"] for volume in pod["spec"]["volumes"] if "hostPath" not in volume]
            for name, pod in self.pods.items()
        }

    def remove(self) -> None:
        """Delete the pods, and what is not in their namespace."""
        self.node.remove(STATIC)
        for pod in self.pods.values():
            self.node.plane.delete("pod", pod["metadata"]["name"], self.namespace, grace=0)
        self.node.plane.delete("persistentvolume", self.volume)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _has_bytes(self, pod: str, path: str, size: int) -> bool:
        return int(self.node.shell(pod, f"stat -c %s {path} 2>/dev/null || echo 0")) >= size

    def _create_objects(self) -> None:
        plane, node = self.node.plane, self.node
        self.directory.mkdir(parents=True, exist_ok=True)
        for kind, field in (("ConfigMap", "data"), ("Secret", "stringData")):
            plane.create(
                {
                    "apiVersion": "v1",
                    "kind": kind,
                    "metadata": self._meta("words"),
                    field: {"word": "x" * 5000},
                }
            )
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name]}
        spec = {
            "capacity": {"storage": "8Mi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": self.namespace, "name": "claim"},
            "local": {"path": str(self.directory)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        }
        plane.create(
            {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": self.volume}, "spec": spec}
        )
        claim = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "8Mi"}},
            "storageClassName": "",
        }
        plane.create(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": self._meta("claim"),
                "spec": claim,
            }
        )

    def _meta(self, name: str) -> Document:
        return {"name": name, "namespace": self.namespace}

    def _container(self, command: list[str], name: str = "main", **fields: Any) -> Document:
        return {
            "name": name,
            "image": self.node.image,
            "imagePullPolicy": "Never",
            "command": command,
            **fields,
        }

    def _specs(self) -> dict[str, Document]:
        """Return the pods' specs by name."""
        container = self._container
        overwrite = f"dd if=/dev/urandom of=/disk/file bs=1000 count={WRITTEN_BYTES // 1000} conv=notrunc"
        write = (
            f"head -c {LAYER_BYTES} /dev/urandom > /layer; "
            f"while :; do {overwrite}; echo line; sync; sleep 1; done"
        )
        limits = {"cpu": "100m", "memory": "32Mi"}
        probe = {"exec": {"command": ["true"]}, "periodSeconds": 2}
        volumes: dict[str, Document] = {
            "disk": {"emptyDir": {}},
            "map": {"configMap": {"name": "words"}},
            "secret": {"secret": {"secretName": "words"}},
            "downward": {
                "downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}
            },
            "host": {"hostPath": {"path": "/etc"}},
            "claim": {"persistentVolumeClaim": {"claimName": "claim"}},
        }
        return {
            "burner": {
                "containers": [container(["sh", "-c", "while :; do :; done"], resources={"limits": limits})],
            },
            "holder": {
                "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}}],
                "containers": [
                    container(
                        forever(
                            f"head -c {HELD_BYTES} /dev/zero > /memory/file; "
                            f"held=$(head -c {ANONYMOUS_BYTES} /dev/zero | tr '\\0' x)"
                        ),
                        volumeMounts=[{"name": "memory", "mountPath": "/memory"}],
                        resources={"requests": {"memory": "32Mi"}, "limits": {"memory": "128Mi"}},
                    )
                ],
            },
            "writer": {
                "volumes": [{"name": "disk", "emptyDir": {}}],
                "containers": [
                    container(["sh", "-c", write], volumeMounts=[{"name": "disk", "mountPath": "/disk"}])
                ],
            },
            "sender": {
                "containers": [
                    container(["sh", "-c", f"ping -s 1000 -i 0.5 {_GATEWAY} > /dev/null"]),
                    container(forever(), "idle"),
                ],
            },
            "crasher": {
                "containers": [container(["sh", "-c", "exit 3"], "bad"), container(forever(), "good")]
            },
            "sidecar": {
                "initContainers": [
                    container(["true"], "init"),
                    container(forever(), "side", restartPolicy="Always"),
                ],
                "containers": [container(forever(), readinessProbe=probe, livenessProbe=probe)],
            },
            HOST_NETWORK: {"hostNetwork": True, "containers": [container(forever())]},
            "volumes": {
                "volumes": [{"name": name, **source} for name, source in volumes.items()],
                "containers": [
                    container(
                        forever(f"head -c {CLAIM_BYTES} /dev/urandom > /claim/file"),
                        volumeMounts=[{"name": name, "mountPath": f"/{name}"} for name in volumes],
                    )
                ],
            },
        }


@contextmanager
def stats_pods(node: ClusterNode, namespace: str) -> Iterator[StatsPods]:
    """Run the pods on a node for the time of a block."""
    pods = StatsPods(node, namespace, node.instance.data_dir.parent / unique("local"))
    try:
        pods.create()
        pods.wait_running()
        yield pods
    finally:
        pods.remove()
