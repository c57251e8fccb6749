"""The reference kubelet as a node of the test cluster: what our tests expect of ours is possible there."""

from collections.abc import Iterator

import pytest

from pykubelet.devcluster.reference_kubelet import undo_host_changes
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.plane import Plane
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine


@pytest.fixture
def node(plane: Plane, runtime: RunningRuntime) -> Iterator[ClusterNode]:
    if plane.reference_kubelet is None:
        pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
    made = cluster_node(plane, runtime, program=plane.reference_kubelet)
    with undo_host_changes(), in_cluster(made) as started:
        yield started


def test_upstream_kubelet_pod_runs_and_logs_are_served(
    plane: Plane, namespace: str, node: ClusterNode
) -> None:
    pod = node.create_pod(namespace, script="echo hello; trap 'exit 0' TERM; sleep 3600 & wait $!")
    running = node.wait_pod_ready(pod)
    assert running["status"]["hostIP"] == plane.cluster.settings.address
    # The API server asks the kubelet, which asks the API server who that is and whether it may.
    name = pod["metadata"]["name"]
    plane.wait("its log", lambda: plane.kubectl("logs", name, "-n", namespace, check=False) == "hello\n")
    node.delete_pod(pod)
