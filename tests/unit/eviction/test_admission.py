"""Admission while the node is under pressure."""

import pytest

from pykubelet.admission.handler import AdmitRejection
from pykubelet.eviction.admission import PressureAdmission, PressureConditions
from pykubelet.eviction.signals import NodeConditionType
from tests.support.admission import attempt
from tests.support.admission import pod as make
from tests.support.eviction import pod

MEMORY_TOLERATION = [
    {"key": "node.kubernetes.io/memory-pressure", "operator": "Exists", "effect": "NoSchedule"}
]
DISK_TOLERATION = [{"key": "node.kubernetes.io/disk-pressure", "operator": "Exists", "effect": "NoSchedule"}]
BEST_EFFORT = pod("best-effort")
BURSTABLE = pod("burstable", requests={"memory": "1Mi"})
TOLERANT = make("tolerant", tolerations=MEMORY_TOLERATION)
DISK_TOLERANT = make("disk-tolerant", tolerations=DISK_TOLERATION)
CRITICAL = pod("critical", priority=2_000_000_000)
STATIC = make("static", source="file")


@pytest.mark.parametrize(
    ("conditions", "rejected"),
    [
        ((), set()),
        (("MemoryPressure",), {"best-effort", "disk-tolerant"}),
        (("DiskPressure",), {"best-effort", "burstable", "tolerant", "disk-tolerant"}),
        (("PIDPressure",), {"best-effort", "burstable", "tolerant", "disk-tolerant"}),
        (("MemoryPressure", "DiskPressure"), {"best-effort", "burstable", "tolerant", "disk-tolerant"}),
    ],
)
def test_admit_pressure_rejects_as_upstream(
    conditions: tuple[NodeConditionType, ...], rejected: set[str]
) -> None:
    current = PressureConditions()
    current.set(conditions)
    handler = PressureAdmission(current, comparing=False, pod_level=True)
    found = {}
    for one in (BEST_EFFORT, BURSTABLE, TOLERANT, DISK_TOLERANT, CRITICAL, STATIC):
        if (result := handler.admit(attempt(one))) is not None:
            found[one.metadata.name] = result
    message = f"The node had condition: [{' '.join(conditions)}]. "
    assert found == {name: AdmitRejection("Evicted", message) for name in rejected}


def test_set_conditions_only_change_notifies() -> None:
    current, calls = PressureConditions(), list[tuple[str, ...]]()
    current.add_listener(lambda: calls.append(current.current))
    current.set(())
    current.set(("DiskPressure",))
    current.set(("DiskPressure",))
    current.set(())
    assert calls == [("DiskPressure",), ()]
