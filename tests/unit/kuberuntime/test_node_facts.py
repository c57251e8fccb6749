"""The machine as requests see it: the same numbers as the node's status tells."""

from pathlib import Path

import pytest

from pykubelet.cm.capacity import allocatable, node_capacity
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions, gather_node_options

CONFIG = KubeletConfiguration(
    eviction_hard={"memory.available": "100Mi", "nodefs.available": "1%"},
    kube_reserved={"memory": "64Mi", "cpu": "100m"},
)


def facts(
    tmp_path: Path,
    config: KubeletConfiguration = CONFIG,
    *,
    cgroup_v2: bool = False,
    ignore_eviction: bool = False,
) -> RuntimeNodeOptions:
    return gather_node_options(
        config,
        FeatureGates(),
        tmp_path,
        ["192.0.2.2"],
        cgroup_v2=cgroup_v2,
        ignore_eviction=ignore_eviction,
    )


@pytest.mark.parametrize("ignore", [False, True])
def test_gather_node_options_allocatable_equals_node_status(tmp_path: Path, ignore: bool) -> None:
    amounts = node_capacity(CONFIG, tmp_path)
    node = facts(tmp_path, ignore_eviction=ignore)
    assert node.allocatable == allocatable(amounts, CONFIG, ignore_eviction=ignore)
    assert {"cpu", "memory", "pods", "ephemeral-storage"} <= node.allocatable.keys()
    assert "pid" not in node.allocatable


def test_gather_node_options_unreserved_memory_includes_eviction_threshold(tmp_path: Path) -> None:
    """The ceiling of memory for containers without a limit has room for what eviction keeps free."""
    node = facts(tmp_path)
    assert node.unreserved_memory == node.memory_capacity - (64 << 20)
    assert node.unreserved_memory - int(node.allocatable["memory"]) >= 100 << 20


@pytest.mark.parametrize(
    ("said", "cgroup_v2", "single"),
    [(None, False, True), (None, True, False), (True, True, True), (False, True, False)],
)
def test_gather_node_options_oom_kill_default_depends_on_cgroup_version(
    tmp_path: Path, said: bool | None, cgroup_v2: bool, single: bool
) -> None:
    """By default all its processes are, where the kernel can do that."""
    config = KubeletConfiguration(single_process_oom_kill=said)
    assert facts(tmp_path, config, cgroup_v2=cgroup_v2).single_process_oom_kill is single


@pytest.mark.parametrize("there", [False, True])
def test_gather_node_options_selinux_detected_by_selinuxfs(tmp_path: Path, there: bool) -> None:
    """Where there is SELinux, containers could read none of their volumes without one."""
    if there:
        (tmp_path / "enforce").write_text("1")
    node = gather_node_options(CONFIG, FeatureGates(), tmp_path, [], cgroup_v2=False, selinux_fs=tmp_path)
    assert node.selinux is there
