"""CPUs that are somebody's own: refused to the next pod, with the words of either agent."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.linux.mounts import unshare_mounts
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.plane import Document, Plane
from tests.support.runtime import RunningRuntime

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(os.cpu_count() != 2, reason="one CPU is reserved and one is given away"),
]

MISALIGNED = "Resources cannot be allocated with Topology locality"
TAKEN = (
    "Allocate failed due to not enough cpus available to satisfy request: requested=1, available=0, "
    "which is unexpected"
)
RESOURCES = {"limits": {"cpu": "1", "memory": "32Mi"}}


@dataclass(frozen=True)
class Case:
    """A policy, and how it refuses."""

    policy: str
    reason: str
    message: str


CASES = [
    Case("single-numa-node", "TopologyAffinityError", MISALIGNED),
    Case("none", "UnexpectedAdmissionError", TAKEN),
]


@contextmanager
def own_root() -> Iterator[Path]:
    """A root directory of our own: what is remembered of CPUs must not meet another policy."""
    root = Path(tempfile.mkdtemp(prefix="pykr-", dir="/tmp"))
    try:
        yield root
    finally:
        unshare_mounts(root)
        shutil.rmtree(root)


def wants_a_cpu(node: ClusterNode, name: str, namespace: str) -> Document:
    document = node.pod_document(name, namespace)
    document["spec"]["containers"][0]["resources"] = RESOURCES
    return node.plane.create(document)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.policy)
@pytest.mark.parametrize("agent", ["ours", "reference"])
def test_cpu_manager_static_policy_no_free_cpu_pod_rejected(
    plane: Plane, runtime: RunningRuntime, namespace: str, agent: str, case: Case
) -> None:
    program = plane.reference_kubelet if agent == "reference" else None
    if agent == "reference" and program is None:
        pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
    settings = {
        "cpuManagerPolicy": "static",
        "reservedSystemCPUs": "0",
        "topologyManagerPolicy": case.policy,
    }
    with ExitStack() as stack:
        if program is not None:
            stack.enter_context(undo_host_changes())
        root = stack.enter_context(own_root())
        made = cluster_node(plane, runtime, program=program, root=root, settings=settings)
        node = stack.enter_context(in_cluster(made))
        first = wants_a_cpu(node, "first", namespace)
        node.wait_pod_ready(first, 60)
        second = wants_a_cpu(node, "second", namespace)
        refused = node.wait_pod_phase(second, "Failed", 60)
        assert refused["status"]["reason"] == case.reason
        assert refused["status"]["message"] == f"Pod was rejected: {case.message}"
        for pod in (first, second):
            node.delete_pod(pod, 60)
