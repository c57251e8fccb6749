"""The agent's root: mounts in it are shared with containers, and nothing in it outlives its pod."""

import signal

import pytest

from pykubelet.linux.mounts import mount, unmount
from tests.support.manifests import container, pod
from tests.support.node import Node

pytestmark = pytest.mark.machine


def test_root_dir_host_mount_propagates_to_running_container(node: Node) -> None:
    mounts = [{"name": "v", "mountPath": "/v", "mountPropagation": "HostToContainer"}]
    document = pod("shares", container(volumeMounts=mounts), volumes=[{"name": "v", "emptyDir": {}}])
    started = node.start_pod(document)
    uid = started["metadata"]["uid"]
    inner = node.root / "pods" / uid / "volumes/kubernetes.io~empty-dir/v/inner"
    node.shell("shares-n1", "mkdir /v/inner")
    mount("tmpfs", inner, "tmpfs")
    try:
        (inner / "file").touch()
        node.shell("shares-n1", "test -e /v/inner/file")
        # Neither an agent that comes back nor one that was killed takes that away.
        for end in (node.stop, node.kill):
            end()
            node.start()
            node.wait_ready("shares-n1")
            assert (inner / "file").exists()
            node.shell("shares-n1", "test -e /v/inner/file")
    finally:
        # The agent may be measuring it.
        unmount(inner, detach=True)
    node.wait("its end to be seen", lambda: not node.shell("shares-n1", "ls /v/inner"))
    node.remove("shares-n1")
    node.wait_gone("shares-n1", uid)


def test_root_dir_pod_unknown_to_runtime_directories_are_removed(node: Node) -> None:
    """As an agent leaves them that is killed between a pod's folders and its sandbox."""
    uid = "31a8e8de91d60d63a42e8a30bb786643"
    assert node.process is not None
    # The agent tidies up every other second, perhaps right now.
    node.process.send_signal(signal.SIGSTOP)
    try:
        (node.root / "pods" / uid / "volumes").mkdir(parents=True)
        (node.instance.pod_logs / f"default_brief-n1_{uid}" / "main").mkdir(parents=True)
        assert len(node.left_of(uid)) == 2
    finally:
        node.process.send_signal(signal.SIGCONT)
    node.wait("nothing to be left", lambda: not node.left_of(uid))
