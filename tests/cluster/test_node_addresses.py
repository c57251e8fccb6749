"""The addresses of a node in a cloud, as its pods are told of them."""

from collections.abc import Callable

import pytest

from tests.support.cluster_node import ClusterNode

pytestmark = pytest.mark.machine

GIVEN = ["10.7.0.9", "fd07::9"]


def test_node_addresses_external_cloud_provider_override_pod_host_ips(
    make_node: Callable[..., ClusterNode], namespace: str
) -> None:
    node = make_node(flags=["--cloud-provider=external"])
    node.start()
    hostname = {"type": "Hostname", "address": node.name}
    assert node.wait_registered()["status"]["addresses"] == [hostname]
    early = node.wait_pod_ready(node.create_pod(namespace))
    assert early["status"].get("hostIP") != GIVEN[0], "the machine's own until then"
    node.plane.request(
        "PATCH",
        f"/api/v1/nodes/{node.name}/status",
        {"status": {"addresses": [{"type": "InternalIP", "address": ip} for ip in GIVEN] + [hostname]}},
        content_type="application/merge-patch+json",
    )
    told = [{"ip": ip} for ip in GIVEN]
    node.wait_api_pod(early, "to be told", lambda found: found["status"].get("hostIPs") == told)
    fields = {"HOST": "status.hostIPs", "OWN": "status.podIPs"}
    hosted = node.pod_document("hosted", namespace, hostNetwork=True)
    hosted["spec"]["containers"][0]["env"] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    status = node.wait_pod_ready(node.plane.create(hosted))["status"]
    assert (status["hostIPs"], status["podIPs"]) == (told, told)
    assert (status["hostIP"], status["podIP"]) == (GIVEN[0], GIVEN[0])
    assert node.shell("hosted", "echo $HOST $OWN").split() == [",".join(GIVEN)] * 2
