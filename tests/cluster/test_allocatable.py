"""What a node keeps for its daemons: told to the cluster, and enforced on cgroups of the tests' own."""

from collections.abc import Callable
from typing import Any

import pytest

from pykubelet.api.quantity import Quantity
from pykubelet.cm.capacity import read_capacity
from pykubelet.cm.cgroups.driver import CgroupFiles
from pykubelet.cm.cgroups.values import CgroupValues, parse_path
from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.cluster_node import ClusterNode
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

MI = 1 << 20
RESERVED = {
    "systemReserved": {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "1Gi", "pid": "1000"},
    "kubeReserved": {"cpu": "50m", "memory": "128Mi"},
}
Make = Callable[..., ClusterNode]


def settings(root: str) -> dict[str, Any]:
    return {
        **RESERVED,
        "evictionHard": {"memory.available": "5%", "nodefs.available": "10%"},
        "enforceNodeAllocatable": ["pods", "system-reserved", "kube-reserved-compressible"],
        "systemReservedCgroup": f"{root}/sys",
        "kubeReservedCgroup": f"{root}/kube",
    }


def value(controller: str, cgroup: str, file: str) -> str:
    return (detect_cgroups().path(controller, cgroup) / file).read_text().strip()


def node_events(node: ClusterNode) -> set[tuple[str, str, str]]:
    found = node.plane.events("default", node.name)
    return {(event["type"], event["reason"], event["message"]) for event in found}


@pytest.mark.skipif(detect_cgroups().unified, reason="looks at the files of cgroup v1")
def test_node_allocatable_reservations_reported_and_enforced(
    make_node: Make, runtime: RunningRuntime
) -> None:
    root = runtime.instance.cgroup_root
    for name in ("sys", "kube"):
        CgroupFiles(detect_cgroups()).make(parse_path(f"{root}/{name}"), CgroupValues())
    node = make_node(settings=settings(root))
    node.start()
    status = node.wait_registered()["status"]
    has, gives = (
        {name: Quantity.parse(text) for name, text in status[kind].items()}
        for kind in ("capacity", "allocatable")
    )
    assert "pid" not in has
    assert has["cpu"].milli - gives["cpu"].milli == 150
    kept = int(has["memory"]) - int(gives["memory"])
    assert kept == pytest.approx(384 * MI + int(has["memory"]) * 0.05, abs=4096)
    kept = int(has["ephemeral-storage"]) - int(gives["ephemeral-storage"])
    assert kept == pytest.approx(1024 * MI + int(has["ephemeral-storage"]) * 0.1, rel=1e-6)
    assert gives["pods"] == has["pods"]
    # What hard eviction keeps free is not taken from the pods by their cgroup.
    pods, machine = f"{root}/kubepods", read_capacity()
    assert value("memory", pods, "memory.limit_in_bytes") == str(int(machine["memory"]) - 384 * MI)
    assert value("cpu", pods, "cpu.shares") == str((machine["cpu"].milli - 150) * 1024 // 1000)
    assert value("pids", pods, "pids.max") == str(int(machine["pid"]) - 1000)
    assert value("memory", f"{root}/sys", "memory.limit_in_bytes") == str(256 * MI)
    assert value("cpu", f"{root}/sys", "cpu.shares") == "102"
    assert value("pids", f"{root}/sys", "pids.max") == "1000"
    # Of Kubernetes' daemons only what can be given back by being slow.
    assert value("cpu", f"{root}/kube", "cpu.shares") == "51"
    assert int(value("memory", f"{root}/kube", "memory.limit_in_bytes")) > 1 << 60
    enforced = {
        ("Normal", "NodeAllocatableEnforced", "Updated Node Allocatable limit across pods"),
        ("Normal", "NodeAllocatableEnforced", f"Updated limits on system reserved cgroup {root}/sys"),
        ("Normal", "NodeAllocatableEnforced", f"Updated limits on kube reserved cgroup {root}/kube"),
    }
    node.wait("events about what is enforced", lambda: node_events(node) >= enforced)
    node.wait("an event about cgroups", lambda: "CgroupV1" in {reason for _, reason, _ in node_events(node)})


def test_node_allocatable_reserved_cgroup_missing_exits_1_with_event(
    make_node: Make, runtime: RunningRuntime
) -> None:
    root = f"{runtime.instance.cgroup_root}/none"
    node = make_node(settings=settings(root))
    problem = f"system-reserved but there is no cgroup {root}/sys: make it in every hierarchy"
    # An agent that ends does not wait long for its events to be taken: where an API server is too busy for
    # that, the next one tells the same.
    for _ in range(5):
        node.start(wait=False)
        assert node.process is not None
        code, node.process = node.process.wait(60), None
        assert code == 1
        assert problem in node.log_text().splitlines()[-1]
        if "KubeletSetupFailed" in {reason for _, reason, _ in node_events(node)}:
            break
    (found,) = (one for one in node_events(node) if one[1] == "FailedNodeAllocatableEnforcement")
    assert found[2].startswith(f'Failed to enforce System Reserved Cgroup Limits on "{root}/sys": ')
    (found,) = (one for one in node_events(node) if one[1] == "KubeletSetupFailed")
    assert problem in found[2]
