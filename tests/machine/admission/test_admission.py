"""Static pods are judged, too, on a node without a cluster: by its own labels, and by what it has."""

import pytest

from tests.support.manifests import container, pod
from tests.support.node import Node

pytestmark = pytest.mark.machine

SYSCTL = {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "65536"}]}}


def wait_refused(node: Node, name: str, reason: str) -> None:
    found = node.wait_pod(name, "to be refused", lambda pod: pod["status"].get("reason") == reason)
    assert found["status"]["phase"] == "Failed"
    assert found["status"]["message"].startswith("Pod was rejected: ")
    assert "containerStatuses" not in found["status"]
    assert not node.truth.containers(name)


def test_admission_static_pod_rejected_again_after_restart_until_fixed(node: Node) -> None:
    running = node.wait_ready(node.write(pod("belongs", nodeSelector={"kubernetes.io/os": "linux"})))
    names = {
        node.write(pod("tuned", **SYSCTL)): "SysctlForbidden",
        node.write(pod("elsewhere", nodeSelector={"zone": "moon"})): "NodeAffinity",
        # A static pod is critical, and there is nobody who could make room.
        node.write(
            pod("huge", container(resources={"requests": {"cpu": "999"}}))
        ): "UnexpectedAdmissionError",
        node.write(pod("other-os", os={"name": "windows"})): "PodOSNotSupported",
    }
    for name, reason in names.items():
        wait_refused(node, name, reason)
        assert [event[0] for event in node.events(name)] == [reason]
    node.kill()
    node.start()
    for name, reason in names.items():
        wait_refused(node, name, reason)
    again = node.wait_ready(running["metadata"]["name"])
    assert again["status"]["containerStatuses"] == running["status"]["containerStatuses"]
    mended = pod("tuned", securityContext={"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}]})
    node.wait_ready(node.write(mended))
    node.clear()
