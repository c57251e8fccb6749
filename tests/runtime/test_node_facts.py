"""The machine as requests see it: the same numbers as the node's status tells."""

from pathlib import Path

import pytest

from pykubelet.config.gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.resources.capacity import allocatable, machine_amounts
from pykubelet.runtime.facts import NodeFacts
from pykubelet.runtime.node_facts import gather_node_facts

CONFIG = KubeletConfiguration(
    eviction_hard={"memory.available": "100Mi", "nodefs.available": "1%"},
    kube_reserved={"memory": "64Mi", "cpu": "100m"},
)


def facts(tmp_path: Path, *, ignore_eviction: bool = False) -> NodeFacts:
    return gather_node_facts(
        CONFIG, FeatureGates(), tmp_path, ["192.0.2.2"], cgroup_v2=False, ignore_eviction=ignore_eviction
    )


@pytest.mark.parametrize("ignore", [False, True])
def test_allocatable(tmp_path: Path, ignore: bool) -> None:
    amounts = machine_amounts(CONFIG, tmp_path)
    node = facts(tmp_path, ignore_eviction=ignore)
    assert node.allocatable == allocatable(amounts, CONFIG, ignore_eviction=ignore)
    assert {"cpu", "memory", "pods", "ephemeral-storage"} <= node.allocatable.keys()
    assert "pid" not in node.allocatable


def test_what_the_system_leaves(tmp_path: Path) -> None:
    """The ceiling of memory for containers without a limit has room for what eviction keeps free."""
    node = facts(tmp_path)
    assert node.unreserved_memory == node.memory_capacity - (64 << 20)
    assert node.unreserved_memory - int(node.allocatable["memory"]) >= 100 << 20
