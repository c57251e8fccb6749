"""`--keep-terminated-pod-volumes`: volumes of a pod that has ended stay mounted until the pod is deleted."""

from pathlib import Path

import pytest

from pykubelet.linux.mounts import read_mounts
from tests.support.manifests import container, pod
from tests.support.node import kubelet_node, running
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine


def test_keep_terminated_pod_volumes_stay_mounted_until_pod_is_removed(runtime: RunningRuntime) -> None:
    node = kubelet_node(runtime)
    node.command = [*node.command, "--keep-terminated-pod-volumes"]
    with running(node):
        writing = container(command=["sh", "-c", "echo kept > /v/file"])
        writing["volumeMounts"] = [{"name": "v", "mountPath": "/v"}]
        volume = {"name": "v", "emptyDir": {"medium": "Memory"}}
        name = node.write(pod("ended", writing, restartPolicy="Never", volumes=[volume]))
        found = node.wait_phase(name, "Succeeded")
        uid = found["metadata"]["uid"]
        file = node.root / "pods" / uid / "volumes/kubernetes.io~empty-dir/v/file"
        # Noted by the clean-up, after which the volumes would be gone.
        journal = f"/pods/{uid}/journal"
        node.wait("the clean-up", lambda: "clean-up" in str(node.control("GET", journal)))
        assert file.read_text() == "kept\n"
        assert any(mount.point == Path(file.parent).resolve() for mount in read_mounts())
        node.restart()
        node.wait_phase(name, "Succeeded")
        assert file.read_text() == "kept\n", "a new process keeps them, too"
        node.remove("ended")
        node.wait_none("the volume to be gone", lambda: node.left_of(uid))
