"""What a newer runtime adds to a node of a cluster: features in its status, handlers, pulls for a handler."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.image_registry import running_registry
from tests.support.newer_runtime import needs_containerd
from tests.support.plane import Plane, unique
from tests.support.runtime import RunningRuntime

pytestmark = [pytest.mark.machine, needs_containerd(2, 1)]
FEATURES = {"recursiveReadOnlyMounts": True, "userNamespaces": True}
GATES = {"RuntimeClassInImageCriApi": True, "CRIListStreaming": True}


@pytest.fixture(scope="module")
def node(plane: Plane, runtime: RunningRuntime) -> Iterator[ClusterNode]:
    with in_cluster(cluster_node(plane, runtime, settings={"featureGates": GATES})) as started:
        yield started


@pytest.fixture
def runtime_class(plane: Plane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A RuntimeClass with the handler of the test's parameter."""
    name = unique("rc")
    plane.create(
        {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": name},
            "handler": request.param,
        }
    )
    yield name
    plane.delete("runtimeclass", name)


def test_node_status_has_features_of_runtime_and_its_handlers(node: ClusterNode) -> None:
    status = (node.node_object() or {})["status"]
    assert status["runtimeHandlers"] == [
        {"name": "", "features": FEATURES},
        {"name": "runc", "features": FEATURES},
    ]
    assert status["features"] == {"supplementalGroupsPolicy": True}
    assert status["nodeInfo"]["containerRuntimeVersion"].startswith("containerd://2.")


@pytest.mark.parametrize("runtime_class", ["runc"], indirect=True)
def test_pod_of_runtime_class_image_pulled_for_handler_with_user_namespace(
    node: ClusterNode, namespace: str, runtime_class: str, tmp_path: Path
) -> None:
    with running_registry(tmp_path / "registry") as registry:
        registry.push_busybox("handled", "1")
        pod = node.pod_document("handled", namespace, runtimeClassName=runtime_class, hostUsers=False)
        image = {"image": f"{registry.host}/handled:1", "imagePullPolicy": "Always"}
        pod["spec"]["containers"][0] |= {**image, "command": ["sleep", "3600"]}
        made = node.plane.create(pod)
        node.wait_pod_ready(made)
        assert node.shell("handled", "cat /proc/self/uid_map").split()[1] != "0"
        [box] = node.truth.ready("handled")
        assert box.runtime_handler == "runc"
        node.delete_pod(made)


@pytest.mark.parametrize("runtime_class", ["absent"], indirect=True)
def test_pod_user_namespace_with_handler_that_runtime_lacks_event_says_so(
    node: ClusterNode, namespace: str, runtime_class: str
) -> None:
    pod = node.create_pod(namespace, "unhandled", runtimeClassName=runtime_class, hostUsers=False)
    message = 'RuntimeClass handler "absent" does not support user namespaces'
    node.wait(
        "the event",
        lambda: [
            event
            for event in node.plane.events(namespace, "unhandled")
            if event["reason"] == "FailedCreatePodSandBox" and message in event["message"]
        ],
    )
    node.delete_pod(pod)
