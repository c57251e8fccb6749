import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cm import capacity as huge_pages
from pykubelet.cm.capacity import allocatable, enforced, overcommitment, read_capacity
from pykubelet.cm.cgroups.pod_cgroups import Demands, QosDemand, QosPolicy, tier_values
from pykubelet.cm.cgroups.values import (
    CgroupValues,
    PodPolicy,
    Write,
    cgroupfs_path,
    last_part,
    memory_limit,
    node_values,
    parse_path,
    parse_systemd_path,
    pod_part,
    pod_values,
    runtime_parent,
    systemd_path,
    uid_of_part,
    v1_writes,
    v2_writes,
    weight_of_shares,
)
from pykubelet.cm.qos import MAX_SHARES, MIN_SHARES, QOSClass, shares_of
from pykubelet.config.types import KubeletConfiguration
from tests.support.pod_resources import amounts, pod_of

MIB = 1 << 20
GIB = 1 << 30
SIZES = ("2MB", "1GB")


class TestNames:
    @pytest.mark.parametrize(
        ("name", "path", "slices"),
        [
            ((), "/", "/"),
            (("kubepods",), "/kubepods", "/kubepods.slice"),
            (("kubepods", "burstable"), "/kubepods/burstable", "/kubepods.slice/kubepods-burstable.slice"),
            (
                ("kubepods", "burstable", "pod1234-abcd"),
                "/kubepods/burstable/pod1234-abcd",
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1234_abcd.slice",
            ),
            (
                ("pykubelet-1f", "kubepods", "podx"),
                "/pykubelet-1f/kubepods/podx",
                "/pykubelet_1f.slice/pykubelet_1f-kubepods.slice/pykubelet_1f-kubepods-podx.slice",
            ),
        ],
    )
    def test_cgroup_name_converts_to_and_from_cgroupfs_and_systemd_path(
        self, name: tuple[str, ...], path: str, slices: str
    ) -> None:
        assert cgroupfs_path(name) == path
        assert systemd_path(name) == slices
        assert parse_path(path) == name
        assert parse_systemd_path(slices) == name

    @given(st.lists(st.text("ab-1", min_size=1), min_size=1).map(tuple))
    def test_systemd_path_any_name_round_trips(self, name: tuple[str, ...]) -> None:
        assert parse_systemd_path(systemd_path(name)) == name

    @pytest.mark.parametrize("part", ["", "a_b", "a/b"])
    def test_systemd_path_ambiguous_part_raises_value_error(self, part: str) -> None:
        with pytest.raises(ValueError, match="slice"):
            systemd_path(("kubepods", part))

    def test_runtime_parent_is_path_for_cgroupfs_and_slice_for_systemd(self) -> None:
        name = ("kubepods", "besteffort", "pod4-2")
        assert runtime_parent(name, "cgroupfs") == "/kubepods/besteffort/pod4-2"
        assert runtime_parent(name, "systemd") == "kubepods-besteffort-pod4_2.slice"

    def test_uid_of_part_only_for_pod_cgroups(self) -> None:
        assert uid_of_part(pod_part("4f-2")) == "4f-2"
        assert uid_of_part(last_part("pod4f-2", "cgroupfs")) == "4f-2"
        assert uid_of_part(last_part("kubepods-burstable-pod4f_2.slice", "systemd")) == "4f-2"
        assert uid_of_part(last_part("kubepods-burstable.slice", "systemd")) is None
        assert [uid_of_part(part) for part in ("burstable", "pod", "", "system.slice")] == [None] * 4

    @pytest.mark.parametrize("uid", ["", "../../init", "a/b", "a\0", "a\nb"])
    def test_pod_part_hostile_uid_raises_value_error(self, uid: str) -> None:
        with pytest.raises(ValueError, match="uid"):
            pod_part(uid)


class TestPodValues:
    @pytest.mark.parametrize(
        ("pod", "expected"),
        [
            pytest.param(pod_of({}), (2, None, None), id="best effort"),
            pytest.param(pod_of({"requests": {"cpu": "100m"}}), (102, None, None), id="requests only"),
            pytest.param(pod_of({"requests": {"cpu": "1m"}}), (2, None, None), id="tiny request"),
            pytest.param(
                pod_of({"requests": {"memory": "1Gi"}}), (2, None, None), id="burstable without cpu request"
            ),
            pytest.param(
                pod_of({"limits": {"cpu": "250m", "memory": "48Mi"}}), (256, 25000, 48 * MIB), id="guaranteed"
            ),
            pytest.param(
                pod_of({"limits": {"cpu": "1", "memory": "1Gi"}}, {"limits": {"cpu": "1", "memory": "1Gi"}}),
                (2048, 200000, 2 * GIB),
                id="sum of containers",
            ),
            pytest.param(
                pod_of({"limits": {"cpu": "1", "memory": "1Gi"}}, {"requests": {"cpu": "1"}}),
                (2048, None, None),
                id="one container without limits",
            ),
            pytest.param(
                pod_of({"limits": {"cpu": "1", "memory": "1Gi"}}, {"limits": {"memory": "1Gi"}}),
                (1024, None, 2 * GIB),
                id="one container without a cpu limit",
            ),
            pytest.param(
                pod_of({"limits": {"cpu": "1", "memory": "1Gi"}}, init=[{"requests": {"cpu": "2"}}]),
                (2048, None, None),
                id="init container without limits",
            ),
            pytest.param(
                pod_of(
                    {"limits": {"cpu": "1", "memory": "1Gi"}},
                    init=[{"limits": {"cpu": "3", "memory": "1Mi"}}],
                ),
                (3072, 300000, GIB),
                id="larger init container",
            ),
            pytest.param(pod_of({"limits": {"cpu": "5m"}}), (5, 1000, None), id="quota of a millisecond"),
            pytest.param(
                pod_of({"requests": {"cpu": "1"}}, resources={"limits": {"cpu": "4", "memory": "2Gi"}}),
                (1024, 400000, 2 * GIB),
                id="limits of the whole pod",
            ),
            pytest.param(
                pod_of(
                    {"limits": {"cpu": "1", "memory": "1Gi"}}, overhead={"cpu": "500m", "memory": "512Mi"}
                ),
                (1536, 150000, GIB + 512 * MIB),
                id="overhead",
            ),
        ],
    )
    def test_shares_quota_and_memory_follow_resources(
        self, pod: Pod, expected: tuple[int, int | None, int | None]
    ) -> None:
        values = pod_values(pod, PodPolicy())
        assert (values.shares, values.quota, values.memory) == expected
        assert memory_limit(pod) == expected[2]
        assert values.period == 100_000

    def test_pod_policy_sets_quota_period_and_pids(self) -> None:
        pod = pod_of({"limits": {"cpu": "500m", "memory": "64Mi"}})
        assert pod_values(pod, PodPolicy(quota=False)).quota == -1
        slow = pod_values(pod, PodPolicy(period=50_000, pids=100))
        assert (slow.quota, slow.period, slow.pids) == (25_000, 50_000, 100)
        assert pod_values(pod, PodPolicy(pids=0)).pids is None

    def test_pod_level_resources_require_gate(self) -> None:
        pod = pod_of({"requests": {"cpu": "1"}}, resources={"requests": {"cpu": "2"}, "limits": {"cpu": "4"}})
        assert pod_values(pod, PodPolicy()).shares == 2048
        off = pod_values(pod, PodPolicy(pod_level=False))
        assert (off.shares, off.quota) == (1024, None)

    def test_unrequested_huge_page_sizes_are_zero(self) -> None:
        pod = pod_of(
            {"requests": {"cpu": "1", "hugepages-2Mi": "64Mi"}},
            {"requests": {"hugepages-2Mi": "64Mi", "hugepages-2048Ki": "2Mi", "hugepages-64Ki": "1Mi"}},
        )
        assert pod_values(pod, PodPolicy(page_sizes=SIZES)).huge_pages == {"2MB": 130 * MIB, "1GB": 0}

    @pytest.mark.parametrize(
        ("pod", "unified"),
        [
            (pod_of({"limits": {"cpu": "1", "memory": "4Mi"}}), {"memory.min": str(4 * MIB)}),
            (pod_of({"requests": {"memory": "4Mi"}}), {"memory.low": str(4 * MIB)}),
            (pod_of({}), {}),
        ],
    )
    def test_memory_protection_follows_qos_class(self, pod: Pod, unified: dict[str, str]) -> None:
        assert pod_values(pod, PodPolicy(protect_memory=True)).unified == unified
        assert pod_values(pod, PodPolicy()).unified == {}


class TestWrites:
    FULL = CgroupValues(
        shares=102,
        quota=50_000,
        memory=64 * MIB,
        pids=100,
        huge_pages={"2MB": 4 * MIB},
        unified={"memory.min": "1"},
    )

    def test_v1_writes_cover_all_values(self) -> None:
        assert list(v1_writes(self.FULL)) == [
            Write("cpu", "cpu.shares", "102"),
            Write("cpu", "cpu.cfs_period_us", "100000"),
            Write("cpu", "cpu.cfs_quota_us", "50000"),
            Write("memory", "memory.limit_in_bytes", "67108864"),
            Write("pids", "pids.max", "100"),
            Write("hugetlb", "hugetlb.2MB.limit_in_bytes", "4194304"),
            Write("hugetlb", "hugetlb.2MB.rsvd.limit_in_bytes", "4194304", optional=True),
        ]

    def test_v2_writes_cover_all_values(self) -> None:
        assert list(v2_writes(self.FULL)) == [
            Write("cpu", "cpu.weight", "4"),
            Write("cpu", "cpu.max", "50000 100000"),
            Write("memory", "memory.max", "67108864"),
            Write("pids", "pids.max", "100"),
            Write("hugetlb", "hugetlb.2MB.max", "4194304"),
            Write("hugetlb", "hugetlb.2MB.rsvd.max", "4194304", optional=True),
            Write("memory", "memory.min", "1"),
        ]

    def test_writes_of_empty_values_are_empty(self) -> None:
        assert list(v1_writes(CgroupValues())) == list(v2_writes(CgroupValues())) == []

    def test_writes_unlimited_quota_as_no_limit(self) -> None:
        values = CgroupValues(quota=-1)
        assert ("cpu.cfs_quota_us", "-1") in [(w.file, w.text) for w in v1_writes(values)]
        assert [(w.file, w.text) for w in v2_writes(values)] == [("cpu.max", "max 100000")]

    @pytest.mark.parametrize(
        ("shares", "weight"),
        [(0, 1), (2, 1), (102, 4), (1024, 39), (2048, 79), (262144, 10000), (10**9, 10000)],
    )
    def test_weight_of_shares_converts_known_values(self, shares: int, weight: int) -> None:
        assert weight_of_shares(shares) == weight

    @given(st.integers(MIN_SHARES, MAX_SHARES), st.integers(MIN_SHARES, MAX_SHARES))
    def test_weight_of_shares_is_monotonic(self, one: int, other: int) -> None:
        low, high = sorted((one, other))
        assert 1 <= weight_of_shares(low) <= weight_of_shares(high) <= 10000


def together(demands: list[QosDemand]) -> Demands:
    return Demands({str(number): demand for number, demand in enumerate(demands)})


class TestTiers:
    def test_tier_values_burstable_shares_are_sum_of_pods(self) -> None:
        demands = [
            QosDemand("Burstable", 100, 1),
            QosDemand("Burstable", 10, 1),
            QosDemand("Guaranteed", 4000, 1),
            QosDemand("BestEffort", 0, 0),
        ]
        values = tier_values(together(demands), QosPolicy(page_sizes=SIZES))
        unbounded = {"2MB": 1 << 62, "1GB": 1 << 62}
        assert values == {
            "Guaranteed": CgroupValues(huge_pages=unbounded),
            "Burstable": CgroupValues(shares=112, huge_pages=unbounded),
            "BestEffort": CgroupValues(shares=2, huge_pages=unbounded),
        }

    def test_tier_values_reserved_memory_limits_lower_tiers(self) -> None:
        demands = [QosDemand("Guaranteed", 0, 4 * GIB), QosDemand("Burstable", 0, 2 * GIB)]
        policy = QosPolicy(memory_reserved=50, allocatable_memory=10 * GIB)
        values = tier_values(together(demands), policy)
        assert values["Guaranteed"].memory is None
        assert values["Burstable"].memory == 8 * GIB
        assert values["BestEffort"].memory == 7 * GIB

    @pytest.mark.parametrize("burstable", [6 * GIB, 7 * GIB])
    def test_tier_values_all_memory_reserved_best_effort_gets_one_page(self, burstable: int) -> None:
        demands = [QosDemand("Guaranteed", 0, 4 * GIB), QosDemand("Burstable", 0, burstable)]
        values = tier_values(together(demands), QosPolicy(memory_reserved=100, allocatable_memory=10 * GIB))
        assert values["Burstable"].memory == 6 * GIB
        (limit,) = (one.text for one in v1_writes(values["BestEffort"]) if one.controller == "memory")
        assert limit == "4096"

    def test_tier_values_protect_memory_sets_memory_min_and_low(self) -> None:
        demands = [
            QosDemand("Guaranteed", 0, 40),
            QosDemand("Burstable", 0, 2),
            QosDemand("BestEffort", 0, 0),
        ]
        on = tier_values(together(demands), QosPolicy(protect_memory=True))
        assert on["Guaranteed"].unified == {"memory.min": "42"}
        assert on["Burstable"].unified == {"memory.low": "2"}
        off = tier_values(together(demands), QosPolicy(protect_memory=False))
        assert off["Guaranteed"].unified == {"memory.min": "0"}

    @given(
        st.lists(
            st.builds(
                QosDemand,
                st.sampled_from(["Guaranteed", "Burstable", "BestEffort"]),
                st.integers(0, 10**6),
                st.integers(0, 10**12),
            )
        )
    )
    def test_tier_values_any_demands_only_burstable_pods_add_shares(self, demands: list[QosDemand]) -> None:
        total = sum(demand.milli_cpu for demand in demands if demand.qos == "Burstable")
        tiers: dict[QOSClass, CgroupValues] = tier_values(together(demands), QosPolicy())
        assert tiers["Burstable"].shares == shares_of(total)
        assert tiers["BestEffort"].shares == MIN_SHARES

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["a", "b", "c"]),
                st.none()
                | st.builds(
                    QosDemand,
                    st.sampled_from(["Guaranteed", "Burstable", "BestEffort"]),
                    st.integers(0, 10**6),
                    st.integers(0, 10**12),
                ),
            )
        )
    )
    def test_demands_put_any_sequence_sums_equal_full_sums(
        self, puts: list[tuple[str, QosDemand | None]]
    ) -> None:
        demands, model = Demands(), dict[str, QosDemand]()
        for uid, demand in puts:
            assert demands.put(uid, demand) == model.pop(uid, None)
            if demand is not None:
                model[uid] = demand
            assert demands.equals(model)
            for qos in ("Guaranteed", "Burstable", "BestEffort"):
                of_class = [one for one in model.values() if one.qos == qos]
                assert demands.milli_cpu[qos] == sum(one.milli_cpu for one in of_class)
                assert demands.memory[qos] == sum(one.memory for one in of_class)


class TestCapacity:
    GOLDEN = amounts(
        cpu="2", memory="24682416Ki", ephemeral_storage="264212084Ki", hugepages_1Gi="0", hugepages_2Mi="0"
    )

    @staticmethod
    def texts(resources: Resources) -> dict[str, str]:
        return {name: str(amount) for name, amount in resources.items()}

    def test_allocatable_and_enforced_equal_upstream(self) -> None:
        """The node of the recordings."""
        config = KubeletConfiguration(eviction_hard={"memory.available": "100Mi", "nodefs.available": "1%"})
        assert self.texts(enforced(self.GOLDEN, config)) == self.texts(self.GOLDEN)
        given = allocatable(self.GOLDEN, config)
        assert str(given["memory"]) == "24580016Ki"
        assert int(given["ephemeral-storage"]) == 267847642337

    def test_allocatable_and_enforced_subtract_reservations(self) -> None:
        config = KubeletConfiguration(
            kube_reserved={"cpu": "500m", "memory": "1Gi", "pid": "100"},
            system_reserved={"cpu": "500m", "memory": "1Gi"},
            eviction_hard={"memory.available": "10%", "nodefs.available": "0%"},
        )
        capacity = amounts(cpu="4", memory="10Gi", pid="1000")
        assert self.texts(enforced(capacity, config)) == {"cpu": "3", "memory": "8Gi", "pid": "900"}
        assert int(allocatable(capacity, config)["memory"]) == pytest.approx(7 * GIB, abs=100)
        config.enforce_node_allocatable = ["none"]
        assert self.texts(enforced(capacity, config)) == self.texts(capacity)

    def test_overcommitment_reserved_exceeds_capacity_returns_message(self) -> None:
        config = KubeletConfiguration(
            kube_reserved={"memory": "1Gi"}, eviction_hard={"memory.available": "100Mi"}
        )
        assert overcommitment(amounts(memory="2Gi"), config) is None
        assert overcommitment(amounts(memory="1Gi"), config) == (
            "1124Mi of memory is reserved but the machine has only 1Gi: "
            "lower kubeReserved, systemReserved or evictionHard"
        )
        assert int(allocatable(amounts(memory="1Gi"), config)["memory"]) == 0

    def test_read_capacity_of_real_host_is_plausible(self) -> None:
        capacity = read_capacity()
        assert int(capacity["cpu"]) >= 1
        assert int(capacity["memory"]) > 64 * MIB
        assert 0 < int(capacity["pid"]) <= 2**22
        values = node_values(capacity, huge_pages.read_page_sizes())
        assert values.shares == shares_of(capacity["cpu"].milli)
        assert values.memory == int(capacity["memory"])

    def test_node_values_only_cpu_sets_only_shares(self) -> None:
        assert node_values(amounts(cpu="1", memory="1Gi"), (), only_cpu=True) == CgroupValues(shares=1024)


class TestHugePages:
    @pytest.mark.parametrize(
        ("size", "name"),
        [
            (2 * MIB, "2MB"),
            (GIB, "1GB"),
            (64 << 10, "64KB"),
            (16 * GIB, "16GB"),
            (0, None),
            (-1, None),
            (2000, None),
        ],
    )
    def test_kernel_size_returns_name_of_page_size(self, size: int, name: str | None) -> None:
        assert huge_pages.kernel_size(size) == name

    def test_read_huge_pages_counts_pages_in_sysfs(self, tmp_path: Path) -> None:
        self._folders(tmp_path, [("hugepages-1048576kB", "0"), ("hugepages-2048kB", "3"), ("other", "1")])
        assert huge_pages.read_page_sizes(tmp_path) == ("2MB", "1GB")
        found = huge_pages.read_huge_pages(tmp_path)
        assert {name: str(amount) for name, amount in found.items()} == {
            "hugepages-2Mi": "6Mi",
            "hugepages-1Gi": "0",
        }
        assert huge_pages.read_page_sizes(tmp_path / "none") == ()

    @staticmethod
    def _folders(root: Path, sizes: Iterable[tuple[str, str]]) -> None:
        for name, pages in sizes:
            (root / name).mkdir()
            (root / name / "nr_hugepages").write_text(f"{pages}\n")

    @given(st.dictionaries(st.sampled_from(["hugepages-2Mi", "hugepages-1Gi", "cpu"]), st.integers(0, 2**40)))
    def test_page_limits_cover_every_page_size(self, wanted: dict[str, Any]) -> None:
        limits = huge_pages.page_limits({name: Quantity.from_units(n) for name, n in wanted.items()}, SIZES)
        assert set(limits) == set(SIZES)
        assert math.isclose(limits["2MB"], wanted.get("hugepages-2Mi", 0))
