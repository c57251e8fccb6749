"""Resizes that cannot be done, and agents that go away in the middle of one."""

import json
from collections.abc import Iterator
from functools import partial

import pytest

from pykubelet.devcluster.reference_kubelet import undo_host_changes
from tests.cluster.resizing import (
    BOOKS,
    FILL,
    LARGE,
    MI,
    SETTLED,
    SMALL,
    USED,
    assert_untouched,
    cgroup,
    container_id,
    is_settled,
    main_of,
    make_node,
    resize,
    shell,
    start,
    told,
    v1_only,
    wait_condition,
    wait_event,
    wait_known,
    wait_settled,
)
from tests.support.cluster_node import ClusterNode
from tests.support.metrics_page import Page
from tests.support.plane import Plane, unique
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine


@pytest.fixture
def own(plane: Plane, runtime: RunningRuntime) -> Iterator[ClusterNode]:
    """A node of ours, whose agent may be killed."""
    made, stack = make_node(plane, runtime, "ours")
    with stack:
        yield made
        for pod in plane.items("pod", query=f"fieldSelector=spec.nodeName%3D{made.name}"):
            made.delete_pod(pod)


@pytest.mark.parametrize("kind", ["ours", "reference"])
def test_pod_resize_static_cpu_policy_infeasible_for_cpu_but_not_memory(
    plane: Plane, runtime: RunningRuntime, namespace: str, kind: str
) -> None:
    policy = {"cpuManagerPolicy": "static", "kubeReserved": {"cpu": "100m"}}
    root = runtime.instance.data_dir / unique("root")  # nobody else's state of the CPU manager
    root.mkdir()
    made, stack = make_node(plane, runtime, kind, root=root, **policy)
    with stack:
        same = {"cpu": "200m", "memory": "64Mi"}
        pod = start(made, namespace, {"requests": same, "limits": same})
        more = {"cpu": "300m", "memory": "64Mi"}
        wished = resize(made, pod, {"requests": more, "limits": more})
        refused = wait_condition(made, pod, "Pending", "Infeasible")
        message = 'Resize is infeasible for Guaranteed Pods alongside CPU Manager policy "static"'
        assert refused["message"] == message
        assert refused["observedGeneration"] == wished["metadata"]["generation"]
        assert wait_event(made, pod, "ResizeInfeasible").startswith("Pod resize Infeasible: {")
        detail = "guaranteed_pod_cpu_manager_static_policy"
        page = Page(made.page("/metrics"))
        assert page.total("kubelet_pod_infeasible_resizes_total", reason_detail=detail) >= 1
        # Memory is another matter: of that nobody has his own.
        less = {"cpu": "200m", "memory": "32Mi"}
        resize(made, pod, {"requests": less, "limits": less})
        assert_untouched(pod, wait_settled(made, pod))
        # More than the node has is refused by the API server.
        change = {"spec": {"containers": [{"name": "main", "resources": {"requests": {"memory": "9Ti"}}}]}}
        where = ("-n", namespace, "pod", pod["metadata"]["name"])
        answer = plane.kubectl(
            "patch", *where, "--subresource", "resize", "-p", json.dumps(change), check=False
        )
        assert "enough allocatable resources" in answer or "must be less than or equal" in answer, answer
        made.delete_pod(pod)


@v1_only
def test_pod_resize_requested_while_kubelet_down_applied_after_start(
    namespace: str, own: ClusterNode
) -> None:
    pod = start(own, namespace, SMALL)
    fresh = start(own, namespace, SMALL, policy="RestartContainer")
    again = start(own, namespace, SMALL, policy="RestartContainer")
    resize(own, again, LARGE)
    again = own.wait_api_pod(
        again, "to be restarted", lambda found: is_settled(found) and main_of(found)["restartCount"] == 1
    )
    own.kill()
    resize(own, pod, LARGE)
    own.start()
    assert_untouched(pod, wait_settled(own, pod))
    larger = {"shares": 256, "quota": 50_000, "memory": 128 * MI}
    assert cgroup(own, pod) == cgroup(own, pod, container_id(main_of(pod))) == larger
    # The books of a pod that began just before were not written yet: nothing is restarted on a guess.
    for one in (fresh, again):
        assert_untouched(one, told(own, one))


@v1_only
def test_pod_resize_kubelet_killed_in_progress_completed_after_start(
    namespace: str, own: ClusterNode
) -> None:
    pod = start(own, namespace, {"limits": {"memory": "96Mi"}, "requests": {"memory": "16Mi"}}, script=FILL)
    own.wait("the memory to be used", lambda: "40.0M" in shell(own, pod, USED), SETTLED)
    resize(own, pod, {"limits": {"memory": "32Mi"}, "requests": {"memory": "16Mi"}})
    wait_condition(own, pod, "InProgress", "Error")
    own.kill()
    own.start()
    again = wait_condition(own, pod, "InProgress", "Error")
    assert "cannot decrease memory limits" in again["message"]
    assert cgroup(own, pod)["memory"] == 96 * MI
    own.kill()
    own.start(wait=False)
    own.wait("the agent to be healthy", own.is_healthy, 60)
    wait_known(own, pod)
    shell(own, pod, "rm /dev/shm/x")
    done = wait_settled(own, pod, 120)
    assert_untouched(pod, done)
    assert cgroup(own, pod)["memory"] == cgroup(own, pod, container_id(main_of(pod)))["memory"] == 32 * MI


def test_pod_resize_deferred_stays_deferred_after_kubelet_restart(namespace: str, own: ClusterNode) -> None:
    known = own.node_object()
    assert known is not None
    cpus = int(known["status"]["allocatable"]["cpu"]) * 1000
    other = start(own, namespace, {"requests": {"cpu": f"{cpus - 500}m"}})
    pod = start(own, namespace, {"requests": {"cpu": "100m"}})
    resize(own, pod, {"requests": {"cpu": "900m"}})
    first = wait_condition(own, pod, "Pending", "Deferred")
    own.restart()
    found = wait_condition(own, pod, "Pending", "Deferred")
    assert found["lastTransitionTime"] == first["lastTransitionTime"]
    now = told(own, pod)
    assert main_of(now)["allocatedResources"] == {"cpu": "100m"}
    assert_untouched(pod, now)
    # What waits takes no room from others.
    small = start(own, namespace, {"requests": {"cpu": "300m"}})
    own.delete_pod(small)
    own.delete_pod(other)
    assert_untouched(pod, wait_settled(own, pod))
    uid = pod["metadata"]["uid"]

    def written(name: str) -> bool:
        book = json.loads((own.root / name).read_text())
        entry = json.loads(book["data"])["entries"].get(uid, {})
        return bool(entry.get("ContainerResources") == {"main": {"requests": {"cpu": "900m"}}})

    # They are written some moments later, for many pods together.
    for name in BOOKS:
        own.wait(f"{name} to say so", partial(written, name))


@v1_only
def test_pod_resize_handover_to_upstream_kubelet_and_back_continues(
    plane: Plane, namespace: str, own: ClusterNode
) -> None:
    """The reference and ours read each other's books: what was promised, and how far it got."""
    if plane.reference_kubelet is None:
        pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
    with undo_host_changes():
        pod = start(own, namespace, SMALL, policy="RestartContainer")
        busy = start(
            own, namespace, {"limits": {"memory": "96Mi"}, "requests": {"memory": "16Mi"}}, script=FILL
        )
        own.wait("the memory to be used", lambda: "40.0M" in shell(own, busy, USED), SETTLED)
        resize(own, busy, {"limits": {"memory": "32Mi"}, "requests": {"memory": "16Mi"}})
        wait_condition(own, busy, "InProgress", "Error")
        for program in (plane.reference_kubelet, None):
            assert own.stop() == 0
            own.hand_to(program)
            own.start()
            own.wait_registered()
            own.wait("the agent to have seen the pods", lambda: len(own.pods()) == 2, SETTLED)
            found = wait_condition(own, busy, "InProgress", "Error")
            assert "cannot decrease memory limits" in found["message"]
            assert_untouched(pod, told(own, pod))
        shell(own, busy, "rm /dev/shm/x")
        assert_untouched(busy, wait_settled(own, busy, 120))
        assert cgroup(own, busy)["memory"] == 32 * MI
