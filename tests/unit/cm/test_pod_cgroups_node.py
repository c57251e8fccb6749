"""What a node as a whole keeps and enforces: amounts as pure functions, limits on real cgroups of v1."""

import asyncio
import errno
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.quantity import Quantity
from pykubelet.cm.capacity import allocatable, overcommitment, reserved_amounts
from pykubelet.cm.cgroups import node_cgroups, pod_cgroups
from pykubelet.cm.cgroups.driver import CgroupWriteError
from pykubelet.cm.cgroups.node_cgroups import NodeAllocatableEnforcer
from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.cgroups import CAPACITY, NO_LIMIT, needs_v1, root, value
from tests.support.pod_resources import amounts, pod_of

__all__ = ["root"]

MI = 1 << 20
Told = list[tuple[str, str, str]]


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({}, {}),
        ({"kube_reserved": {"cpu": "0", "memory": "0"}}, {}),
        (
            {"kube_reserved": {"cpu": "100m", "memory": "1Gi"}, "system_reserved": {"cpu": "250m"}},
            {"cpu": "350m", "memory": "1Gi"},
        ),
        (
            {"system_reserved": {"memory": "1Gi"}, "eviction_hard": {"memory.available": "512Mi"}},
            {"memory": "1536Mi"},
        ),
        ({"eviction_hard": {"memory.available": "50%", "nodefs.available": "25%"}}, {"memory": "8Gi"}),
        ({"eviction_hard": {"memory.available": "0%"}}, {}),
        ({"eviction_hard": {"memory.available": "100%"}}, {}),
        # Named CPUs are all that is kept of them.
        ({"reserved_system_cpus": "0,2-3", "kube_reserved": {"cpu": "7"}}, {"cpu": "3"}),
        # The machine does not say how much of it there is.
        ({"kube_reserved": {"ephemeral-storage": "1Gi"}}, {}),
    ],
)
def test_reserved_amounts_config_returns_sum(config: dict[str, Any], kept: dict[str, str]) -> None:
    settings = KubeletConfiguration(**{"eviction_hard": {}, **config})
    found = reserved_amounts(amounts(cpu="8", memory="16Gi"), settings)
    assert {name: str(amount) for name, amount in found.items()} == kept


mebibytes = st.integers(0, 4096).map(lambda number: f"{number}Mi")


@given(
    kube=mebibytes,
    system=mebibytes,
    # A threshold of 0 is rejected with the configuration.
    eviction=st.one_of(mebibytes.filter(lambda text: text != "0Mi"), st.sampled_from(["5%", "12.5%", "0%"])),
)
def test_allocatable_plus_reserved_equals_capacity(kube: str, system: str, eviction: str) -> None:
    capacity = amounts(cpu="8", memory="8Gi")
    config = KubeletConfiguration(
        kube_reserved={"memory": kube},
        system_reserved={"memory": system},
        eviction_hard={"memory.available": eviction},
    )
    kept = int(reserved_amounts(capacity, config).get("memory", Quantity.from_units(0)))
    given_away = int(allocatable(capacity, config)["memory"])
    if overcommitment(capacity, config) is None:
        assert given_away + kept == 8 << 30
    else:
        assert given_away == 0
        assert kept > 8 << 30


@asynccontextmanager
async def eater(parent: str, mebibytes: int) -> AsyncIterator[None]:
    """A process that holds memory in a pod's cgroup."""
    script = f"input(); data = bytearray({mebibytes} << 20); print('full', flush=True); input()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        (detect_cgroups().path("memory", parent) / "cgroup.procs").write_text(str(process.pid))
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        assert await process.stdout.readline() == b"full\n"
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.mark.looptime
async def test_node_allocatable_enforcer_limit_busy_retried_every_60_seconds() -> None:
    """The kernel takes their caches from them with each try."""
    loop, tried, told = asyncio.get_running_loop(), list[float](), list[str]()

    async def write(*_: object) -> None:
        tried.append(loop.time())
        if len(tried) < 3:
            raise CgroupWriteError(errno.EBUSY, "more is in use")

    groups: Any = SimpleNamespace(write=write)
    limits = NodeAllocatableEnforcer(
        KubeletConfiguration(), groups, CAPACITY, (), lambda *event: told.append(event[1])
    )
    await limits.limit_pods(("kubepods",))
    for _ in range(100):
        await limits.retry(("kubepods",))
        await asyncio.sleep(2)
    assert tried == [0, 60, 120]
    assert told == ["FailedNodeAllocatableEnforcement", "NodeAllocatableEnforced"]


@pytest.mark.machine
@needs_v1
class TestV1:
    @staticmethod
    def pods(root: str, told: Told, gates: FeatureGates | None = None, **config: Any) -> PodCgroups:
        settings = KubeletConfiguration(cgroup_root=root, **config)

        def record(kind: str, reason: str, message: str) -> None:
            told.append((kind, reason, message))

        return PodCgroups(settings, gates or FeatureGates(), detect_cgroups(), CAPACITY, record=record)

    async def test_update_qos_node_limit_below_usage_records_event_once(
        self, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(node_cgroups, "RETRY_SECONDS", 0.0)
        told: Told = []
        pod, before = pod_of({}), self.pods(root, [])
        await before.setup()
        async with eater(await before.ensure(pod), 64):
            reserved = {"memory": str(int(CAPACITY["memory"]) - 8 * MI)}
            cgroups = self.pods(root, told, kube_reserved=reserved)
            await cgroups.setup()
            await cgroups.update_qos([pod])
            await cgroups.update_qos([pod])
            assert value("memory", f"{root}/kubepods", "memory.limit_in_bytes") == str(
                int(CAPACITY["memory"])
            )
        await cgroups.update_qos([pod])
        await cgroups.update_qos([pod])
        assert value("memory", f"{root}/kubepods", "memory.limit_in_bytes") == str(8 * MI)
        assert [(kind, reason) for kind, reason, _ in told] == [
            ("Warning", "FailedNodeAllocatableEnforcement"),
            ("Normal", "NodeAllocatableEnforced"),
        ]
        assert told[0][2].startswith(f"Failed to update Node Allocatable Limits {root}/kubepods: cannot set ")
        assert told[1][2] == "Updated Node Allocatable limit across pods"

    async def test_update_qos_qos_reserved_limits_memory_of_lower_classes(
        self, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`qosReserved`, as pods come and go, and where more is in use already."""
        monkeypatch.setattr(pod_cgroups, "REWRITE_SECONDS", 0.0)
        gates = FeatureGates().with_overrides({"QOSReserved": True})
        cgroups = self.pods(root, [], gates, qos_reserved={"memory": "50%"})
        whole = int(CAPACITY["memory"])
        guaranteed = pod_of({"limits": {"cpu": "1", "memory": "1Gi"}})
        burstable = pod_of({"requests": {"memory": "512Mi"}})
        best_effort = pod_of({})

        def limits() -> list[int]:
            tiers = (f"{root}/kubepods/burstable", f"{root}/kubepods/besteffort")
            return [int(value("memory", tier, "memory.limit_in_bytes")) for tier in tiers]

        await cgroups.setup()
        await cgroups.update_qos([])
        assert limits() == [whole, whole]
        await cgroups.update_qos([guaranteed, burstable])
        assert limits() == [whole - 512 * MI, whole - 768 * MI]
        await cgroups.update_qos([burstable])
        assert limits() == [whole, whole - 256 * MI]
        parent = await cgroups.ensure(best_effort)
        async with eater(parent, 64):
            greedy = pod_of({"requests": {"memory": str(2 * (whole - 8 * MI))}})
            await cgroups.update_qos([greedy, best_effort])
            # Not below what is in use, and no more than that.
            assert 64 * MI < limits()[1] < 256 * MI
        await cgroups.update_qos([greedy, best_effort])
        assert limits()[1] == 8 * MI

    async def test_exists_pod_cgroup_missing_in_one_hierarchy_is_false(self, root: str) -> None:
        cgroups, pod = self.pods(root, []), pod_of({"limits": {"cpu": "1", "memory": "1Gi"}})
        await cgroups.setup()
        assert not cgroups.exists(pod)
        parent = await cgroups.ensure(pod)
        assert cgroups.exists(pod)
        detect_cgroups().path("pids", parent).rmdir()
        assert not cgroups.exists(pod)
        assert value("memory", parent, "memory.limit_in_bytes") not in (NO_LIMIT, "0")
        await cgroups.ensure(pod)
        assert cgroups.exists(pod)
        await cgroups.remove(pod.uid)
        assert not cgroups.exists(pod)
        settings = KubeletConfiguration(cgroups_per_qos=False)
        assert PodCgroups(settings, FeatureGates(), detect_cgroups(), CAPACITY).exists(pod)
