"""Reservations that this machine cannot keep: one line that names the remedy, and no start."""

import re
from typing import Any

import pytest

from tests.support.node import kubelet_node
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

LOWER = "lower kubeReserved, systemReserved or evictionHard"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kubeReserved": {"memory": "99Ti"}}, f"of memory is reserved but the machine has only .*: {LOWER}"),
        ({"systemReserved": {"cpu": "999"}}, f"of cpu is reserved but the machine has only .*: {LOWER}"),
        (
            {"kubeReserved": {"ephemeral-storage": "9999Ti"}},
            f"of ephemeral-storage is reserved but .*: {LOWER}",
        ),
        ({"kubeReserved": {"pid": "99999999"}}, f"of pid is reserved but the machine has only .*: {LOWER}"),
        ({"evictionHard": {"memory.available": "99Ti"}}, f"99Ti of memory is reserved but .*: {LOWER}"),
        (
            {
                "cgroupsPerQOS": False,
                "enforceNodeAllocatable": ["none"],
                "kubeReserved": {"memory": "99Ti"},
            },
            f"of memory is reserved but the machine has only .*: {LOWER}",
        ),
        ({"reservedSystemCPUs": "0-8191"}, "reservedSystemCPUs"),
    ],
)
def test_kubelet_reserved_above_capacity_refuses_to_start(
    runtime: RunningRuntime, settings: dict[str, Any], problem: str
) -> None:
    node = kubelet_node(runtime, **settings)
    try:
        node.start(wait=False)
        assert node.process is not None
        code, node.process = node.process.wait(60), None
    finally:
        node.kill()
        node.truth.close()
    said = node.log_text()
    assert code == 1, said
    last = said.splitlines()[-1]
    assert re.search(problem, last), said
    assert "Traceback" not in said
    assert node.pod_cgroups() == []
