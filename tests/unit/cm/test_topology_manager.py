"""A pod gets everything from NUMA nodes that suit all providers, or is refused in the reference's words."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest

from pykubelet.api.pod import Container, Pod
from pykubelet.cm.memory.manager import MemoryManager
from pykubelet.cm.memory.numa_nodes import MemoryNode
from pykubelet.cm.topology.hints import (
    AllocationError,
    HintProvider,
    Hints,
    Policy,
    PolicyError,
    TopologyHint,
)
from pykubelet.cm.topology.manager import Scope, TopologyManager, TopologyRejection
from pykubelet.config.types import MemoryReservation
from tests.support.pod_resources import amounts, pod_of
from tests.unit.cm.numa_machines import hint, hints, machine

GUARANTEED = {"limits": {"cpu": "1", "memory": "4Gi"}}
MISALIGNED = TopologyRejection(
    "TopologyAffinityError", "Resources cannot be allocated with Topology locality"
)


class Recording:
    """A provider that hints the same for each container, and remembers what it was told to give."""

    def __init__(self, text: str, error: AllocationError | None = None) -> None:
        self.offered: Hints = {"example.com/gpu": hints(text)}
        self.error = error
        self.given: list[tuple[str, TopologyHint]] = []
        self.asked: list[str] = []

    def hints(self, pod: Pod, container: Container) -> Hints:
        self.asked.append(container.name)
        return self.offered

    def pod_hints(self, pod: Pod) -> Hints:
        self.asked.append("pod")
        return self.offered

    def allocate(self, pod: Pod, container: Container, chosen: TopologyHint) -> Awaitable[None] | None:
        self.give(container, chosen)
        return None

    def give(self, container: Container, chosen: TopologyHint) -> None:
        if self.error is not None and container.name == "c1":
            raise self.error
        self.given.append((container.name, chosen))


def topology(policy: Policy, *providers: HintProvider, scope: Scope = "container") -> TopologyManager:
    return TopologyManager(policy, scope, {}, machine(8, 8), providers)


@pytest.mark.parametrize(
    ("policy", "one", "other", "chosen"),
    [
        ("none", "0!", "1!", "any"),
        ("best-effort", "0!", "1!", "0.1"),
        ("best-effort", "0! 1!", "1!", "1!"),
        ("restricted", "0! 1!", "1!", "1!"),
        ("restricted", "0.1!", "0.1!", "0.1!"),
        ("restricted", "0!", "1!", None),
        ("single-numa-node", "0! 1!", "1!", "1!"),
        ("single-numa-node", "0.1!", "0.1!", None),
    ],
)
async def test_topology_manager_policy_decides_admission_and_hint(
    policy: Policy, one: str, other: str, chosen: str | None
) -> None:
    first, second = Recording(one), Recording(other)
    refused = await topology(policy, first, second).admit(pod_of(GUARANTEED, init=[GUARANTEED]))
    if chosen is None:
        assert (refused, first.given, second.given) == (MISALIGNED, [], [])
    else:
        assert refused is None
        assert first.given == second.given == [("i0", hint(chosen)), ("c0", hint(chosen))]


async def test_topology_manager_scope_selects_pod_or_container_hints() -> None:
    each, whole, nobody = Recording("1!"), Recording("1!"), Recording("1!")
    pod = pod_of(GUARANTEED, GUARANTEED)
    assert await topology("restricted", each).admit(pod) is None
    assert await topology("restricted", whole, scope="pod").admit(pod) is None
    assert await topology("none", nobody, scope="pod").admit(pod) is None
    assert (each.asked, whole.asked, nobody.asked) == (["c0", "c1"], ["pod"], [])
    assert each.given == whole.given == [("c0", hint("1!")), ("c1", hint("1!"))]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            AllocationError("not enough cpus available to satisfy request"),
            TopologyRejection(
                "UnexpectedAdmissionError",
                "Allocate failed due to not enough cpus available to satisfy request, which is unexpected",
            ),
        ),
        (
            AllocationError("SMT Alignment Error: no", "SMTAlignmentError"),
            TopologyRejection("SMTAlignmentError", "SMT Alignment Error: no"),
        ),
    ],
)
@pytest.mark.parametrize("policy", ["none", "best-effort"])
async def test_topology_manager_allocation_error_rejects_pod(
    policy: Policy, error: AllocationError, expected: TopologyRejection
) -> None:
    failing = Recording("0!", error)
    assert await topology(policy, failing).admit(pod_of(GUARANTEED, GUARANTEED)) == expected
    assert [name for name, _ in failing.given] == ["c0"]


async def test_topology_manager_device_hint_aligns_memory(tmp_path: Path) -> None:
    reserved = [MemoryReservation(numa_node=0, limits={"memory": "1Gi"})]
    memory = MemoryManager("Static", tmp_path / "state", machine(8, 8), reserved, amounts(memory="1Gi"))
    manager = topology("single-numa-node", Recording("1!"), memory)
    first, second = pod_of(GUARANTEED), pod_of(GUARANTEED)
    assert await manager.admit(first) is None
    assert await manager.admit(second) is None
    assert memory.memory_nodes(first.uid, "c0") == memory.memory_nodes(second.uid, "c0") == {1}
    assert await manager.admit(pod_of(GUARANTEED)) == MISALIGNED
    assert await manager.admit(first) is None, "a pod that has its memory is admitted again"


@pytest.mark.parametrize("policy", ["best-effort", "restricted", "single-numa-node"])
def test_topology_manager_too_many_numa_nodes_raises_unless_allowed(policy: Policy) -> None:
    many = machine(*[4] * 9)
    with pytest.raises(PolicyError, match=r"9 NUMA nodes.*max-allowable-numa-nodes"):
        TopologyManager(policy, "container", {}, many, ())
    assert TopologyManager(policy, "container", {"max-allowable-numa-nodes": "9"}, many, ()).policy == policy
    assert not TopologyManager("none", "container", {}, many, ()).aligns


async def test_topology_manager_prefer_closest_numa_nodes_selects_closest() -> None:
    rows = [[10, 30, 12], [30, 10, 30], [12, 30, 10]]
    nodes = [MemoryNode(i, 1, {}, dict(enumerate(row))) for i, row in enumerate(rows)]
    pod = pod_of(GUARANTEED)
    for options, expected in (({}, "0.1!"), ({"prefer-closest-numa-nodes": "true"}, "0.2!")):
        provider = Recording("0.1! 0.2! 1.2!")
        assert await TopologyManager("restricted", "container", options, nodes, [provider]).admit(pod) is None
        assert provider.given == [("c0", hint(expected))]


class Slow(Recording):
    """One that has to ask somebody before it can give."""

    async def _later(self, container: Container, chosen: TopologyHint) -> None:
        await asyncio.sleep(5)
        self.give(container, chosen)

    def allocate(self, pod: Pod, container: Container, chosen: TopologyHint) -> Awaitable[None]:
        return self._later(container, chosen)


@pytest.mark.looptime
async def test_topology_manager_concurrent_admit_is_serialized() -> None:
    slow = Slow("0!")
    manager = topology("best-effort", slow)
    one, other = pod_of(GUARANTEED), pod_of(GUARANTEED)
    async with asyncio.TaskGroup() as group:
        group.create_task(manager.admit(one))
        group.create_task(manager.admit(other))
        await asyncio.sleep(1)
        assert slow.asked == ["c0"]
    assert slow.asked == ["c0", "c0"]
    assert len(slow.given) == 2
    failing = topology("none", Slow("0!", AllocationError("the plugin is gone")))
    refused = await failing.admit(pod_of(GUARANTEED, GUARANTEED))
    assert refused is not None
    assert refused.message == "Allocate failed due to the plugin is gone, which is unexpected"


def test_topology_manager_prefer_closest_without_distances_raises() -> None:
    with pytest.raises(PolicyError, match=r"prefer-closest-numa-nodes.*distance"):
        TopologyManager("restricted", "pod", {"prefer-closest-numa-nodes": "true"}, machine(4, 4), ())
