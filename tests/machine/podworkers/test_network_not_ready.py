"""Pods that need the pods' network wait for it, and say so; those on the machine's own do not."""

import pytest

from tests.support.manifests import pod
from tests.support.node import Node

pytestmark = pytest.mark.machine

MESSAGE = "network is not ready: container runtime network not ready: NetworkReady=false reason:"


def test_network_not_ready_only_pod_network_pods_wait(node: Node) -> None:
    before = node.start_pod(pod("before"))
    (config,) = node.instance.cni_conf.iterdir()
    text, said = config.read_text(), len(node.log_text())
    config.unlink()
    try:
        node.wait("the agent to notice", lambda: "NetworkReady=false" in node.log_text()[said:])
        node.write(pod("waits"))
        node.start_pod(pod("hosted", hostNetwork=True))
        assert node.wait_event("waits-n1", "NetworkNotReady").startswith(MESSAGE)
        waits = node.pod("waits-n1")
        assert waits is not None
        assert waits["status"]["phase"] == "Pending"
        assert not node.truth.sandboxes("waits-n1")
        # What has its network already goes on.
        assert (
            node.wait_ready("before-n1")["status"]["containerStatuses"]
            == before["status"]["containerStatuses"]
        )
    finally:
        # The runtime takes no notice of a file that is moved there.
        config.write_text(text)
    node.wait_ready("waits-n1")
    node.clear()
