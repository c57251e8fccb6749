import os
from pathlib import Path

import pytest

from pykubelet.api.meta import Resources
from pykubelet.api.names import is_extended_resource
from pykubelet.cm.capacity import allocatable, node_capacity, pod_capacity
from pykubelet.config.types import KubeletConfiguration
from pykubelet.node.status import DeviceCapacity, next_resources
from tests.support.node_status import amounts, settings


def texts(resources: Resources) -> dict[str, str]:
    return {name: str(amount) for name, amount in resources.items()}


DONGLE = "example.com/dongle"
MACHINE = amounts(cpu="4", memory="8Gi", pods="110")


def one(name: str, text: str) -> Resources:
    return {name: amounts(x=text)["x"]}


@pytest.mark.parametrize(
    ("resource", "extended"),
    [
        (DONGLE, True),
        ("nvidia.com/gpu", True),
        ("cpu", False),
        ("hugepages-2Mi", False),
        ("kubernetes.io/batch-cpu", False),
        ("pod.alpha.kubernetes.io/opaque", False),
        ("requests.example.com/x", False),
        ("example.com/", False),
    ],
)
def test_is_extended_resource_only_for_foreign_domain_names(resource: str, extended: bool) -> None:
    assert is_extended_resource(resource) == extended


class TestNext:
    def test_next_resources_device_plugin_resources_are_added(self) -> None:
        devices = DeviceCapacity(one(DONGLE, "4"), one(DONGLE, "3"), ["example.com/gone"])
        capacity, left = next_resources({}, {}, MACHINE, devices, settings(config=KubeletConfiguration()))
        assert texts(capacity) == {**texts(MACHINE), DONGLE: "4", "example.com/gone": "0"}
        assert texts(left) == {**texts(MACHINE), DONGLE: "3", "example.com/gone": "0"}

    def test_next_resources_foreign_extended_resource_follows_capacity(self) -> None:
        config = settings(config=KubeletConfiguration())
        capacity, left = next_resources(one(DONGLE, "4"), one(DONGLE, "1"), MACHINE, DeviceCapacity(), config)
        assert (str(capacity[DONGLE]), str(left[DONGLE])) == ("4", "4")
        capacity, left = next_resources({}, one(DONGLE, "1"), MACHINE, DeviceCapacity(), config)
        assert DONGLE not in capacity
        assert DONGLE not in left

    def test_next_resources_allocatable_subtracts_reservations(self) -> None:
        config = KubeletConfiguration(
            kube_reserved={"cpu": "500m", "memory": "1Gi", "example.com/dongle": "9"},
            system_reserved={"ephemeral-storage": "1Gi"},
            eviction_hard={"memory.available": "100Mi", "nodefs.available": "10%"},
        )
        machine = MACHINE | amounts(hugepages_2Mi="1Gi", ephemeral_storage="10Gi") | one(DONGLE, "2")
        _, left = next_resources({}, {}, machine, DeviceCapacity(), settings(config=config))
        assert texts(left) == {
            "cpu": "3500m",
            "memory": "6044Mi",
            "pods": "110",
            "hugepages-2Mi": "1Gi",
            # A tenth in single precision is a little more.
            "ephemeral-storage": "8589934576",
            DONGLE: "0",
        }
        ignoring = settings(config=config, ignore_eviction=True)
        _, left = next_resources({}, {}, machine, DeviceCapacity(), ignoring)
        assert (str(left["memory"]), str(left["ephemeral-storage"])) == ("6Gi", "9Gi")


def test_allocatable_reserved_system_cpus_override_kube_reserved() -> None:
    config = KubeletConfiguration(reserved_system_cpus="0-1", kube_reserved={"cpu": "3"})
    assert str(allocatable(amounts(cpu="4"), config)["cpu"]) == "2"


def test_allocatable_huge_pages_exceed_memory_is_zero() -> None:
    left = allocatable(amounts(memory="1Gi", hugepages_2Mi="2Gi"), KubeletConfiguration())
    assert str(left["memory"]) == "0"


@pytest.mark.parametrize(("per_core", "pods"), [(0, 110), (10, 20), (100, 110)])
def test_pod_capacity_limited_by_pods_per_core(per_core: int, pods: int) -> None:
    found = pod_capacity(2, KubeletConfiguration(pods_per_core=per_core))
    assert int(found["pods"]) == pods


def test_node_capacity_of_real_host_contains_cpu_memory_and_storage(tmp_path: Path) -> None:
    config = KubeletConfiguration()
    found = node_capacity(config, tmp_path)
    stat = os.statvfs(tmp_path)
    assert int(found["ephemeral-storage"]) == stat.f_blocks * stat.f_frsize
    assert {"cpu", "memory", "pods"} <= set(found)
    assert "pid" not in found
    config.local_storage_capacity_isolation = False
    assert "ephemeral-storage" not in node_capacity(config, tmp_path)
