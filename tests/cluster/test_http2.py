"""Go's clients speak HTTP/2 to a node where the API allows it: the API server for everybody, and kubectl."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.cluster.kubectl_program import Kubectl
from tests.support.cluster_node import ClusterNode
from tests.support.manifests import forever
from tests.support.plane import Plane

pytestmark = pytest.mark.machine


def connected(node: ClusterNode) -> Counter[str]:
    """How many clients have connected, by what they speak."""
    return Counter(re.findall(r'"Client connected" protocol="?([^ "]*)', node.log_text()))


def test_kubelet_server_api_server_proxy_uses_http2(cluster_member: ClusterNode, namespace: str) -> None:
    node, kubectl = cluster_member, Kubectl(cluster_member.plane)
    pod = node.wait_pod_ready(
        node.create_pod(
            namespace, containers=[{"name": "main", "image": node.image, "command": forever("seq 1 200000")}]
        )
    )
    name = pod["metadata"]["name"]
    expected = "".join(f"{number}\n" for number in range(1, 200001)).encode()
    raw = f"/api/v1/nodes/{node.name}/proxy"
    # The first request makes the API server connect.
    kubectl.ok("get", "--raw", f"{raw}/healthz")
    before = connected(node)
    assert before["h2"] >= 1
    node.wait("the pod's last word", lambda: kubectl.ok("logs", "-n", namespace, name) == expected)
    assert b"kubelet_http_requests_total{" in kubectl.ok("get", "--raw", f"{raw}/metrics")
    assert kubectl.ok("get", "--raw", f"{raw}/healthz") == b"ok"
    with kubectl.running("logs", "-f", "-n", namespace, name, "--tail=1") as following:
        following.wait_said("200000")
        assert kubectl.ok("get", "--raw", f"{raw}/configz").startswith(b'{"kubeletconfig"')
    # All of that went over what the API server had already, or more of the same.
    assert connected(node)["http/1.1"] == before["http/1.1"]
    # What needs another protocol on the connection still gets it.
    assert kubectl.ok("exec", "-n", namespace, name, "--", "echo", "there") == b"there\n"
    assert connected(node)["http/1.1"] > before["http/1.1"]


def test_kubelet_server_kubectl_direct_connection_uses_http2(
    cluster_member: ClusterNode, plane: Plane, tmp_path: Path
) -> None:
    node = cluster_member
    found = node.node_object()
    assert found is not None
    port = found["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    config = yaml.safe_load(plane.admin.read_text())
    cluster = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    config["clusters"] = [{"name": known["name"], "cluster": cluster} for known in config["clusters"]]
    path = tmp_path / "node.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    before = connected(node)
    said = Kubectl(plane, kubeconfig=path).ok("get", "--raw", "/metrics")
    assert b"kubelet_http_requests_total{" in said
    after = connected(node)
    assert (after["h2"] - before["h2"], after["http/1.1"] - before["http/1.1"]) == (1, 0)
