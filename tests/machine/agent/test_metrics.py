"""The agent's numbers on a real node: each is in the table, and says what has really happened."""

import time

import pytest

from tests.support.manifests import container, forever, pod
from tests.support.metrics_page import Page, differences
from tests.support.node import Node

pytestmark = pytest.mark.machine


def scrape(node: Node, path: str = "/metrics") -> Page:
    return Page(node.page(path))


def wait_for(node: Node, name: str, value: float, /, **labels: str) -> Page:
    """Wait until a series has a value: a metric follows what it counts, it does not come before it."""

    def look() -> Page | None:
        page = scrape(node)
        return page if page.total(name, **labels) == value else None

    return node.wait(f"{name} {labels} to be {value:g}", look, 60)


def wait_runtime(node: Node, pods: int, running: int, exited: int, /, **working: str) -> Page:
    """Wait until one pod is at work in this way, or none in any, and all of the runtime was seen."""
    at_work = 1 if working else 0

    def look() -> Page | None:
        page = scrape(node)
        seen = (
            page.total("kubelet_working_pods", **working),
            page.total("kubelet_running_pods"),
            page.total("kubelet_running_containers", container_state="running"),
            page.total("kubelet_running_containers", container_state="exited"),
        )
        return page if seen == (at_work, pods, running, exited) else None

    return node.wait(f"{pods} pods, {running} running and {exited} exited containers", look, 60)


def test_metrics_pod_lifecycle_counts_match(node: Node) -> None:
    began = time.time()
    before = scrape(node)
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 1}
    good = pod(
        "good",
        container(readinessProbe=probe),
        container("second", lifecycle={"preStop": {"sleep": {"seconds": 1}}}),
        initContainers=[container("first", ["sh", "-c", "sleep 0.2"])],
    )
    uid = node.start_pod(good)["metadata"]["uid"]
    node.write(pod("bad", container(image="localhost/no/such:1", imagePullPolicy="Never")))
    node.write(pod("over", container(command=["sh", "-c", "exit 3"]), restartPolicy="Never"))
    node.wait_phase("over-n1", "Failed")
    creates = before.total("kubelet_pod_worker_duration_seconds_count", operation_type="create")
    wait_for(node, "kubelet_pod_worker_duration_seconds_count", creates + 3, operation_type="create")
    # What the runtime has is listed a moment later.
    page = wait_runtime(node, 2, 2, 2, lifecycle="terminated", config="desired", static="true")

    def grown(name: str, /, **labels: str) -> float:
        return page.total(name, **labels) - before.total(name, **labels)

    assert page.value("kubelet_desired_pods", static="true") == 3
    assert page.value("kubelet_desired_pods", static="") == 0
    assert page.value("kubelet_active_pods", static="true") == 2
    assert page.value("kubelet_working_pods", lifecycle="sync", config="desired", static="true") == 2
    assert page.value("kubelet_mirror_pods") == 0
    assert page.value("kubelet_managed_ephemeral_containers") == 0
    assert page.value("kubelet_running_pods") == 2
    assert page.value("kubelet_running_containers", container_state="running") == 2
    assert page.value("kubelet_running_containers", container_state="exited") == 2
    assert page.value("kubelet_node_name", node="n1") == 1
    assert page.value("kubelet_cgroup_version") in (1, 2)
    assert page.value("kubernetes_build_info", major="1", minor="36") == 1
    assert page.value("kubernetes_feature_enabled", name="AllAlpha", stage="ALPHA") == 0
    assert 0 < page.value("process_resident_memory_bytes") < page.value("process_virtual_memory_max_bytes")

    assert grown("kubelet_started_pods_total") == 3
    assert grown("kubelet_started_pods_errors_total") == 0
    assert grown("kubelet_run_podsandbox_duration_seconds_count") == 3
    assert grown("kubelet_started_containers_total", container_type="init_container") == 1
    assert grown("kubelet_started_containers_total", container_type="container") >= 4
    assert grown("kubelet_started_containers_errors_total", code="ErrImageNeverPull") >= 1
    assert grown("kubelet_terminated_containers_total", container_type="container", exit_code="3") == 1
    assert grown("kubelet_terminated_containers_total", container_type="init_container", exit_code="0") == 1
    assert grown("kubelet_containers_per_pod_count_count") == 3
    assert grown("kubelet_containers_per_pod_count_sum") == 4
    assert grown("kubelet_pod_worker_start_duration_seconds_count") == 3
    starts = grown("kubelet_pod_start_duration_seconds_count")
    assert starts in (1, 2)  # the short one may be over before anybody has seen it run
    assert 0.2 < grown("kubelet_pod_start_duration_seconds_sum") < starts * (time.time() - began)
    assert grown("kubelet_cgroup_manager_duration_seconds_count", operation_type="create") >= 3
    assert grown("kubelet_runtime_operations_total", operation_type="run_podsandbox") == 3
    assert page.total("kubelet_pleg_relist_duration_seconds_count") >= 1
    assert abs(page.value("kubelet_pleg_last_seen_seconds") - time.time()) < 120
    assert page.total("kubelet_http_requests_total", path="metrics", server_type="readonly") >= 1

    probes = scrape(node, "/metrics/probes")
    assert probes.total("prober_probe_total", probe_type="Readiness", pod="good-n1", result="successful") >= 1
    assert list(differences(probes, "/metrics/probes", "always", "event")) == []

    node.remove("good", "bad", "over")
    node.wait_gone("good-n1", uid)
    page = wait_runtime(node, 0, 0, 0)
    assert list(differences(page, "/metrics", "always")) == []
    assert page.value("kubelet_running_pods") == 0
    assert page.total("kubelet_running_containers") == 0
    assert page.total("kubelet_desired_pods") == 0
    # Once more for the one that had ended by itself: there was still something to clear away. And perhaps
    # once for one whose cgroup was busy a moment longer, or that was in a list made before it was gone.
    assert grown("kubelet_pod_worker_duration_seconds_count", operation_type="terminated") in (4, 5)
    assert grown("kubelet_pod_worker_duration_seconds_count", operation_type="kill") >= 3
    assert grown("kubelet_cgroup_manager_duration_seconds_count", operation_type="destroy") >= 3
    assert grown("kubelet_terminated_containers_total", container_type="container") == 3
    assert page.total("kubelet_orphaned_runtime_pods_total") == 0


def test_metrics_pod_removed_while_kubelet_down_counts_as_orphan(node: Node) -> None:
    uid = node.start_pod(pod("left", container(command=forever())))["metadata"]["uid"]
    node.kill()
    node.remove("left")
    node.start()
    node.wait_gone("left-n1", uid)
    page = wait_for(node, "kubelet_orphaned_runtime_pods_total", 1)
    assert page.total("kubelet_pod_start_duration_seconds_count") == 0


def test_metrics_histogram_buckets_match_upstream(node: Node) -> None:
    """Bounds are texts to a scraper: they must be those of the reference, to the letter."""
    page = scrape(node)
    seconds = "0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 +Inf"
    for name in ("pleg_relist_duration", "pod_worker_start_duration", "http_requests_duration"):
        assert page.bounds(f"kubelet_{name}_seconds") == seconds
    starts = "0.5 1 2 3 4 5 6 8 10 20 30 45 60 120 180 240 300 360 480 600 900 1200 1800 2700 3600 +Inf"
    assert page.bounds("kubelet_pod_start_duration_seconds") == starts
    assert page.bounds("kubelet_pod_start_sli_duration_seconds") == starts
    assert page.bounds("kubelet_containers_per_pod_count") == "1 2 4 8 16 +Inf"
    statuses = "0.01 0.05 0.1 0.5 1 5 10 20 30 45 60 +Inf"
    assert page.bounds("kubelet_pod_status_sync_duration_seconds") == statuses
