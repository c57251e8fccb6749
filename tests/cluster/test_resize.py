"""Pods get other resources while they run: wished for through the API server, seen in cgroups and status.

Ours and the reference kubelet are asked the same.
"""

import json
from collections.abc import Iterator

import pytest

from tests.cluster.resizing import (
    FILL,
    LARGE,
    MI,
    SETTLED,
    SMALL,
    USED,
    assert_untouched,
    cgroup,
    condition,
    container_id,
    events,
    is_settled,
    main_of,
    make_node,
    patch,
    resize,
    shell,
    start,
    tier_shares,
    told,
    v1_only,
    wait_condition,
    wait_event,
    wait_settled,
)
from tests.support.cluster_node import END, UNTIL_TOLD, ClusterNode
from tests.support.metrics_page import Page
from tests.support.node import all_statuses
from tests.support.plane import Document, Plane, unique
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module", params=["ours", "reference"])
def node(plane: Plane, runtime: RunningRuntime, request: pytest.FixtureRequest) -> Iterator[ClusterNode]:
    """A node of either kind."""
    made, stack = make_node(plane, runtime, request.param)
    with stack:
        yield made


@pytest.fixture(autouse=True)
def tidy(node: ClusterNode) -> Iterator[None]:
    """End the test's pods: they take room from each other."""
    yield
    for pod in node.plane.items("pod", query=f"fieldSelector=spec.nodeName%3D{node.name}"):
        node.delete_pod(pod)


@v1_only
def test_pod_resize_up_and_down_applied_without_restart(namespace: str, node: ClusterNode) -> None:
    pod = start(node, namespace, SMALL)
    main = container_id(main_of(pod))
    first = {"shares": 102, "quota": 20_000, "memory": 64 * MI}
    assert (cgroup(node, pod), cgroup(node, pod, main)) == (first, first)
    wished = resize(node, pod, LARGE)
    up = wait_settled(node, pod)
    assert_untouched(pod, up)
    larger = {"shares": 256, "quota": 50_000, "memory": 128 * MI}
    assert (cgroup(node, pod), cgroup(node, pod, main)) == (larger, larger)
    if not node.reference:  # it weighs the classes once a minute
        node.wait("the class to weigh as much", lambda: tier_shares(node) == 256, SETTLED)
    generation = wished["metadata"]["generation"]
    assert up["status"]["observedGeneration"] == generation == pod["metadata"]["generation"] + 1
    assert up["status"]["allocatedResources"] == LARGE["requests"]
    summary = {"containers": [{"name": "main", "resources": LARGE}], "generation": generation}
    for reason, words in (("ResizeStarted", "started"), ("ResizeCompleted", "completed")):
        prefix, _, facts = wait_event(node, pod, reason).partition(": ")
        assert (prefix, json.loads(facts)) == (f"Pod resize {words}", summary)

    resize(node, pod, SMALL)
    down = wait_settled(node, pod)
    assert_untouched(pod, down)
    assert (cgroup(node, pod), cgroup(node, pod, main)) == (first, first)
    assert down["status"]["allocatedResources"] == SMALL["requests"]


@v1_only
def test_pod_resize_sidecar_updates_container_and_pod_cgroup(namespace: str, node: ClusterNode) -> None:
    beside = node.pod_document("x", namespace)["spec"]["containers"][0] | {
        "name": "beside",
        "restartPolicy": "Always",
        "resources": SMALL,
    }
    pod = start(node, namespace, SMALL, initContainers=[beside])
    resize(node, pod, LARGE, "beside")
    done = wait_settled(node, pod)
    assert_untouched(pod, done)
    beside_id = container_id(next(one for one in all_statuses(done) if one["name"] == "beside"))
    assert cgroup(node, pod, beside_id)["memory"] == 128 * MI
    assert cgroup(node, pod, container_id(main_of(done)))["memory"] == 64 * MI
    assert cgroup(node, pod)["memory"] == 192 * MI


@v1_only
def test_pod_resize_pod_level_resources_applied_without_restart(namespace: str, node: ClusterNode) -> None:
    whole = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "300m", "memory": "128Mi"}}
    document = node.pod_document(unique("p"), namespace, resources=whole)
    pod = node.wait_pod_ready(node.plane.create(document))
    assert cgroup(node, pod) == {"shares": 102, "quota": 30_000, "memory": 128 * MI}
    more = {"requests": {"cpu": "200m", "memory": "96Mi"}, "limits": {"cpu": "400m", "memory": "160Mi"}}
    patch(node, pod, {"spec": {"resources": more}})

    def fits(found: Document) -> bool:
        return not condition(found, "InProgress") and found["status"]["resources"]["limits"] == more["limits"]

    done = node.wait_api_pod(pod, "to be larger as a whole", fits, SETTLED)
    assert_untouched(pod, done)
    larger = {"shares": 204, "quota": 40_000, "memory": 160 * MI}
    assert cgroup(node, pod) == larger
    # A container without limits of its own has those of the pod.
    inside = cgroup(node, pod, container_id(main_of(done)))
    assert (inside["quota"], inside["memory"]) == (40_000, 160 * MI)
    assert done["status"]["allocatedResources"] == more["requests"]


@v1_only
def test_pod_resize_restart_policy_restarts_container(namespace: str, node: ClusterNode) -> None:
    pod = start(node, namespace, SMALL, policy="RestartContainer")
    resize(node, pod, LARGE)
    done = node.wait_api_pod(
        pod,
        "to be restarted with what it wishes for",
        lambda found: is_settled(found) and main_of(found)["restartCount"] == 1,
        SETTLED,
    )
    assert main_of(done)["containerID"] != main_of(pod)["containerID"]
    larger = {"shares": 256, "quota": 50_000, "memory": 128 * MI}
    assert (cgroup(node, pod), cgroup(node, pod, container_id(main_of(done)))) == (larger, larger)
    meta = pod["metadata"]

    def is_told() -> bool:
        said = [event["message"] for event in node.plane.events(meta["namespace"], meta["name"])]
        return any("Container main resize requires restart" in text for text in said)

    node.wait("an event about the restart", is_told)


@v1_only
def test_pod_resize_container_not_started_grows_pod_cgroup_first(namespace: str, node: ClusterNode) -> None:
    """Its pod's cgroup grows at once: it will be started there."""
    if node.reference:
        pytest.skip("it leaves the pod's cgroup as it is, and the container cannot be started in it")
    document = node.pod_document(unique("p"), namespace)
    main = document["spec"]["containers"][0] | {"resources": SMALL}
    wait = {"name": "first", "command": ["sh", "-c", UNTIL_TOLD]}
    document["spec"] |= {"containers": [main], "initContainers": [main | wait]}
    pod = node.plane.create(document)
    node.wait_api_pod(
        pod,
        "to be initialized",
        lambda found: any(one["state"].get("running") for one in all_statuses(found)),
        SETTLED,
    )
    larger = {"shares": 256, "quota": 50_000, "memory": 128 * MI}
    resize(node, pod, LARGE)
    node.wait("the pod's cgroup to grow", lambda: cgroup(node, pod) == larger, SETTLED)
    wait_event(node, pod, "ResizeCompleted")
    where = ("-n", namespace, pod["metadata"]["name"], "-c", "first")
    node.plane.kubectl("exec", *where, "--", "sh", "-c", END)
    node.wait_pod_ready(pod)
    done = wait_settled(node, pod)
    assert cgroup(node, pod) == cgroup(node, pod, container_id(main_of(done))) == larger


def test_pod_resize_insufficient_cpu_deferred_until_capacity_freed(namespace: str, node: ClusterNode) -> None:
    known = node.node_object()
    assert known is not None
    cpus = int(known["status"]["allocatable"]["cpu"]) * 1000
    other = start(node, namespace, {"requests": {"cpu": f"{cpus - 500}m"}})
    pod = start(node, namespace, {"requests": {"cpu": "100m"}})
    wished = resize(node, pod, {"requests": {"cpu": "900m"}})
    waits = wait_condition(node, pod, "Pending", "Deferred")
    numbers = f"cpu, requested: 900, used: {cpus - 500}, capacity: {cpus}"
    assert waits["message"] == f"Node didn't have enough resource: {numbers}"
    assert waits["observedGeneration"] == wished["metadata"]["generation"]
    text = wait_event(node, pod, "ResizeDeferred")
    assert text.startswith('Pod resize OutOfcpu: {"containers":[{"name":"main",')
    assert json.loads(text.partition(": ")[2])["error"] == waits["message"]
    assert main_of(wished)["allocatedResources"] == {"cpu": "100m"}
    page = Page(node.page("/metrics"))
    assert page.value("kubelet_pod_pending_resizes", reason="deferred") == 1
    node.delete_pod(other)
    done = wait_settled(node, pod)
    assert_untouched(pod, done)
    page = Page(node.page("/metrics"))
    assert page.total("kubelet_pod_deferred_accepted_resizes_total") == 1
    assert page.total("kubelet_pod_pending_resizes") == 0


def test_pod_resize_deferred_request_reverted_is_cleared(namespace: str, node: ClusterNode) -> None:
    known = node.node_object()
    assert known is not None
    cpus = int(known["status"]["allocatable"]["cpu"]) * 1000
    start(node, namespace, {"requests": {"cpu": f"{cpus - 500}m"}})
    pod = start(node, namespace, {"requests": {"cpu": "100m"}})
    resize(node, pod, {"requests": {"cpu": "900m"}})
    wait_condition(node, pod, "Pending", "Deferred")
    resize(node, pod, {"requests": {"cpu": "100m"}})
    assert_untouched(pod, wait_settled(node, pod))
    assert "ResizeStarted" not in events(node, pod)


def test_pod_resize_memory_limit_below_usage_fails_until_freed(namespace: str, node: ClusterNode) -> None:
    pod = start(node, namespace, {"limits": {"memory": "96Mi"}, "requests": {"memory": "16Mi"}}, script=FILL)
    less = {"limits": {"memory": "32Mi"}, "requests": {"memory": "16Mi"}}
    node.wait("the memory to be used", lambda: "40.0M" in shell(node, pod, USED), SETTLED)
    resize(node, pod, less)
    failed = wait_condition(node, pod, "InProgress", "Error")
    assert failed["message"].startswith("cannot decrease memory limits: ")
    if not node.reference:  # it has not measured the pod by then
        assert f"attempting to set pod memory limit ({32 * MI}) below current usage (" in failed["message"]
    assert f'attempting to set container "main" memory limit ({32 * MI})' in failed["message"]
    assert wait_event(node, pod, "ResizeError").startswith("Pod resize error: {")
    found = told(node, pod)
    assert main_of(found)["resources"]["limits"] == {"memory": "96Mi"}
    assert_untouched(pod, found)
    shell(node, pod, "rm /dev/shm/x")
    assert_untouched(pod, wait_settled(node, pod, 120))
