"""The agent's numbers on a node of a real cluster: what it counts of the API server and its pods."""

import time

import pytest

from tests.support.cluster_node import ClusterNode
from tests.support.metrics_page import Page, differences

pytestmark = pytest.mark.machine


def test_kubelet_metrics_pod_lifecycle_counted(cluster_member: ClusterNode, namespace: str) -> None:
    node, began = cluster_member, time.time()
    before = Page(node.page("/metrics"))
    first = {"name": "first", "image": node.image, "command": ["sh", "-c", "sleep 1.5"]}
    pod = node.create_pod(namespace, initContainers=[{**first, "imagePullPolicy": "Never"}])
    node.wait_pod_ready(pod)
    host = node.create_pod(namespace, hostNetwork=True, volumes=[{"name": "h", "hostPath": {"path": "/tmp"}}])
    node.wait_pod_ready(host)

    def started() -> Page | None:
        page = Page(node.page("/metrics"))
        count = "kubelet_pod_start_total_duration_seconds_count"
        return page if page.value(count) - before.value(count) == 2 else None

    page = node.wait("the starts to be counted", started, 60)

    def grown(name: str, /, **labels: str) -> float:
        return page.total(name, **labels) - before.total(name, **labels)

    # The API server writes whole seconds of a pod's creation.
    assert grown("kubelet_pod_start_sli_duration_seconds_count") == 1, "a pod with a hostPath has state"
    own = grown("kubelet_pod_start_sli_duration_seconds_sum")
    assert grown("kubelet_pod_start_total_duration_seconds_sum") > own + 1
    assert 0 <= own < time.time() - began + 1
    assert page.value("kubelet_first_network_pod_start_sli_duration_seconds") >= 0
    assert grown("kubelet_pod_start_duration_seconds_count") == 2
    assert page.value("kubelet_desired_pods", static="") == 2
    assert page.value("kubelet_active_pods", static="") == 2
    assert page.value("kubelet_working_pods", lifecycle="sync", config="desired", static="") == 2
    assert grown("kubelet_pod_status_sync_duration_seconds_count") >= 2
    assert grown("rest_client_requests_total", code="200", method="PATCH") >= 2
    up = page.value("kubelet_node_startup_duration_seconds")
    parts = ("pre_kubelet", "pre_registration", "registration", "post_registration")
    times = [page.value(f"kubelet_node_startup_{part}_duration_seconds") for part in parts]
    assert min(times) > 0
    assert sum(times) == pytest.approx(up, abs=0.01)
    node.delete_pod(pod)
    node.delete_pod(host)
    page = Page(node.page("/metrics"))
    assert list(differences(page, "/metrics", "always", "cluster")) == []
    assert page.value("kubelet_desired_pods", static="") == 0
