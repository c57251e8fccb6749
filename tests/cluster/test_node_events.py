"""Events about the node, and the flags page, of a running kubelet."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pykubelet.config.flags.flag_table import FLAGS
from tests.cluster.kubectl_program import Kubectl
from tests.support.cluster_node import ClusterNode

pytestmark = pytest.mark.machine

DOMAINS = " ".join(f"d{number}.example.com" for number in range(30))


def test_kubelet_dns_problems_recorded_on_node_and_all_flags_shown(
    make_node: Callable[..., ClusterNode], namespace: str, tmp_path: Path
) -> None:
    resolv_conf = tmp_path / "resolv.conf"
    resolv_conf.write_text(f"nameserver 192.0.2.1\nsearch {DOMAINS}\n")
    node = make_node(settings={"resolvConf": str(resolv_conf), "clusterDNS": []})
    node.start()
    node.wait_registered()
    pod = node.wait_pod_ready(node.create_pod(namespace, dnsPolicy="ClusterFirst"))

    def messages() -> dict[str, str]:
        return {one["reason"]: one["message"] for one in node.plane.events("default", node.name)}

    expected = {"CheckLimitsForResolvConf", "MissingClusterDNS"}
    node.wait("the events about the node", lambda: expected <= messages().keys(), 60)
    assert "more than 29 domains" in messages()["CheckLimitsForResolvConf"]
    assert messages()["MissingClusterDNS"].startswith("kubelet does not have ClusterDNS IP configured")
    of_pod = {one["reason"] for one in node.plane.events(namespace, pod["metadata"]["name"])}
    assert "MissingClusterDNS" in of_pod
    page = Kubectl(node.plane).ok("get", "--raw", f"/api/v1/nodes/{node.name}/proxy/flagz").decode()
    shown = {line.partition("=")[0] for line in page.splitlines() if "=" in line}
    assert shown == {flag.name for flag in FLAGS}
