"""Memory of NUMA nodes is given out as the reference does it, never twice, and comes back whole."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.cm.memory.manager import MemoryManager
from pykubelet.cm.memory.numa_memory import copied, same
from pykubelet.cm.memory.numa_nodes import MemoryNode
from pykubelet.cm.memory.state import MemoryState, read_state
from pykubelet.cm.topology.hints import ANYWHERE, AllocationError, Hints, TopologyHint
from pykubelet.config.types import MemoryReservation
from pykubelet.podconfig.defaults import apply_defaults
from tests.support.pod_resources import amounts, pod_of
from tests.unit.cm.numa_machines import GIB, GOLDEN, hint, hints

SCENARIOS = [json.loads(line) for line in (GOLDEN / "memory-manager.jsonl").read_text().splitlines()]

Described = tuple[str, int, int, bool]
"""A container: name, GiB of memory and of huge pages, whether it is a sidecar."""


def pod_from(uid: str, init: list[Any], app: list[Any]) -> Pod:
    def document(name: str, memory: int, pages: int, sidecar: bool) -> dict[str, Any]:
        limits = {"cpu": "1", "memory": f"{memory}Gi"} | ({"hugepages-1Gi": f"{pages}Gi"} if pages else {})
        more = {"restartPolicy": "Always"} if sidecar else {}
        return {"name": name, "image": "i", "resources": {"limits": limits, "requests": limits}} | more

    spec = {
        "containers": [document(*each) for each in app],
        "initContainers": [document(*each) for each in init],
    }
    pod = from_document(Pod, {"metadata": {"name": uid, "namespace": "default", "uid": uid}, "spec": spec})
    apply_defaults(pod)
    return pod


def static(file: Path, sizes: list[Any]) -> MemoryManager:
    """A manager of nodes of (GiB of memory, GiB of huge pages), 1 GiB of each node reserved."""
    nodes = [
        MemoryNode(i, memory * GIB, {"hugepages-1Gi": pages * GIB}) for i, (memory, pages) in enumerate(sizes)
    ]
    reserved = [MemoryReservation(numa_node=node.number, limits={"memory": "1Gi"}) for node in nodes]
    return MemoryManager("Static", file, nodes, reserved, amounts(memory=f"{len(nodes)}Gi"))


@pytest.fixture
def file() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder) / "memory_manager_state"


def state_of(file: Path) -> MemoryState:
    state = read_state(file, "Static")
    assert state is not None
    return state


def parsed(recorded: dict[str, str]) -> Hints:
    return {name: hints(text) for name, text in recorded.items()}


def test_memory_manager_recorded_scenarios_equals_upstream(file: Path) -> None:
    for scenario in SCENARIOS:
        file.unlink(missing_ok=True)
        manager = static(file, scenario["machine"])
        pods: dict[str, Pod] = {}
        for step in scenario["steps"]:
            if gone := step.get("remove"):
                del pods[gone]
                manager.retain({pod.uid for pod in pods.values()})
            else:
                pod = pods[step["add"]] = pod_from(step["add"], step["init"], step["app"])
                assert manager.pod_hints(pod) == parsed(step["pod_hints"])
                for container, expected in zip(
                    [*pod.spec.init_containers, *pod.spec.containers], step["given"], strict=False
                ):
                    assert manager.hints(pod, container) == parsed(expected["hints"])
                    error = ""
                    try:
                        manager.allocate(pod, container, hint(expected["chosen"]))
                    except AllocationError as err:
                        error = str(err)
                    assert error == expected["error"], (scenario, step)
            state = state_of(file)
            assert outline(state) == [tuple(map(str, node)) for node in step["nodes"]]
            assert {
                uid: {
                    name: [[list(block.numa_affinity), block.type, block.size // GIB] for block in blocks]
                    for name, blocks in containers.items()
                }
                for uid, containers in state.entries.items()
            } == step["entries"]


def outline(state: MemoryState) -> list[tuple[str, ...]]:
    return [
        (
            str(node.number_of_assignments),
            str(sorted(node.cells)),
            str(node.memory_map["memory"].reserved // GIB),
            str(node.memory_map["hugepages-1Gi"].reserved // GIB),
        )
        for _, node in sorted(state.machine_state.items())
    ]


_CONTAINER = st.tuples(st.integers(1, 9), st.integers(0, 2), st.booleans())
_POD = st.tuples(st.lists(_CONTAINER, max_size=2), st.lists(_CONTAINER, min_size=1, max_size=2))
_CHOSEN = st.one_of(
    st.just(ANYWHERE),
    st.builds(TopologyHint, st.frozensets(st.integers(0, 2), min_size=1), st.booleans()),
)
_STEP = st.tuples(
    st.sampled_from(["add", "add", "remove", "start", "restart"]), _POD, _CHOSEN, st.integers(0, 9)
)


@settings(deadline=None, max_examples=60)
@given(st.lists(_STEP, max_size=8))
def test_memory_manager_any_operations_never_overcommits_and_frees_all(steps: list[Any]) -> None:
    sizes = [(10, 2), (12, 2), (8, 0)]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "memory_manager_state"
        manager = static(file, sizes)
        start = copied(state_of(file).machine_state)
        pods: list[Pod] = []
        for number, (what, (init, app), chosen, which) in enumerate(steps):
            if what == "add":
                apps = [(f"c{i}", memory, pages, False) for i, (memory, pages, _) in enumerate(app)]
                pods.append(pod_from(f"u{number}", [(f"i{i}", *each) for i, each in enumerate(init)], apps))
                for container in (*pods[-1].spec.init_containers, *pods[-1].spec.containers):
                    try:
                        manager.allocate(pods[-1], container, chosen)
                    except AllocationError:
                        break
            elif what == "remove" and pods:
                pods.pop(which % len(pods))
                manager.retain({pod.uid for pod in pods})
            elif what == "start" and pods:
                pod = pods[which % len(pods)]
                manager.container_starts(pod, pod.spec.containers[0])
            elif what == "restart":
                manager = static(file, sizes)
            check_account(state_of(file))
        manager.retain(set())
        ended = state_of(file)
        assert ended.entries == {}
        assert ended.machine_state == start
        assert same(ended.machine_state, start)


def check_account(state: MemoryState) -> None:
    held: dict[tuple[frozenset[int], str], int] = {}
    for containers in state.entries.values():
        for blocks in containers.values():
            for block in blocks:
                key = frozenset(block.numa_affinity), block.type
                held[key] = held.get(key, 0) + block.size
    for number, node in state.machine_state.items():
        for name, table in node.memory_map.items():
            assert 0 <= table.reserved <= table.allocatable
            assert table.free == table.allocatable - table.reserved
            group = frozenset(node.cells)
            given_out = sum(state.machine_state[cell].memory_map[name].reserved for cell in group)
            assert given_out == held.get((group, name), 0), (number, name)
    for group, _ in held:
        assert all(frozenset(state.machine_state[cell].cells) == group for cell in group), (
            "groups never overlap"
        )


@pytest.mark.parametrize(
    "pod",
    [
        pod_of({"requests": {"memory": "1Gi"}}),
        pod_of({}),
        pod_of({}, resources={"limits": {"cpu": "1", "memory": "1Gi"}}),
    ],
    ids=["burstable", "best effort", "resources of the whole pod"],
)
def test_memory_manager_not_guaranteed_pod_allocates_nothing(file: Path, pod: Pod) -> None:
    manager = static(file, [(8, 0), (8, 0)])
    (container,) = pod.spec.containers
    assert manager.hints(pod, container) == manager.pod_hints(pod) == {}
    manager.allocate(pod, container, hint("0!"))
    assert manager.blocks(pod.uid, "c0") == ()
    assert manager.memory_nodes(pod.uid, "c0") == frozenset()


def test_memory_manager_policy_none_allocates_nothing(file: Path) -> None:
    manager = MemoryManager("None", file)
    pod = pod_from("u", [], [("c", 2, 0, False)])
    assert manager.hints(pod, pod.spec.containers[0]) == {}
    manager.allocate(pod, pod.spec.containers[0], ANYWHERE)
    manager.container_starts(pod, pod.spec.containers[0])
    manager.retain(set())
    assert manager.allocatable() == ()


def test_memory_manager_multi_node_allocation_groups_nodes(file: Path) -> None:
    manager = static(file, [(10, 0), (10, 0)])
    big, small = pod_from("big", [], [("c", 12, 0, False)]), pod_from("small", [], [("c", 2, 0, False)])
    assert manager.hints(big, big.spec.containers[0]) == {"memory": hints("0.1!")}
    manager.allocate(big, big.spec.containers[0], hint("0.1!"))
    assert manager.memory_nodes("big", "c") == {0, 1}
    assert manager.hints(small, small.spec.containers[0]) == {"memory": hints("0.1")}
    # A single node of a group is not given to anybody alone, also when that is asked for.
    manager.allocate(small, small.spec.containers[0], hint("1"))
    assert manager.memory_nodes("small", "c") == {0, 1}
    manager.retain(set())
    assert manager.hints(small, small.spec.containers[0]) == {"memory": hints("0! 1! 0.1")}


def test_memory_manager_init_container_memory_reused_and_released(file: Path) -> None:
    manager = static(file, [(11, 0)])
    pod = pod_from("u", [("i", 8, 0, False), ("s", 1, 0, True)], [("c", 5, 0, False)])
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        manager.allocate(pod, container, ANYWHERE)
    assert state_of(file).machine_state[0].memory_map["memory"].reserved == 8 * GIB
    manager.container_starts(pod, pod.spec.init_containers[1])
    assert manager.blocks("u", "i") == ()
    assert state_of(file).machine_state[0].memory_map["memory"].reserved == 6 * GIB

    again = static(file, [(11, 0)])
    for container in (*pod.spec.init_containers, *pod.spec.containers):
        again.allocate(pod, container, ANYWHERE)
    assert again.blocks("u", "i") == (), "what is over gets no memory after a restart of the agent"
    assert again.memory_nodes("u", "s") == again.memory_nodes("u", "c") == {0}


def test_memory_manager_restart_hints_allocated_nodes(file: Path) -> None:
    manager = static(file, [(8, 2), (8, 2)])
    pod = pod_from("u", [], [("c", 2, 1, False)])
    manager.allocate(pod, pod.spec.containers[0], hint("1!"))
    again = static(file, [(8, 2), (8, 2)])
    assert again.hints(pod, pod.spec.containers[0]) == {"memory": hints("1!"), "hugepages-1Gi": hints("1!")}
    assert again.pod_hints(pod) == again.hints(pod, pod.spec.containers[0])
    assert [(block.type, block.size) for block in again.allocatable() if block.numa_affinity == (0,)] == [
        ("hugepages-1Gi", 2 * GIB),
        ("memory", 5 * GIB),
    ]


def test_memory_manager_missing_huge_pages_raises_allocation_error(file: Path) -> None:
    manager = static(file, [(8, 0)])
    wanted = {"cpu": "1", "memory": "1Gi", "hugepages-2Mi": "2Mi"}
    pod = pod_of({"limits": wanted}, {"limits": wanted | {"hugepages-2Mi": "0"}})
    assert manager.hints(pod, pod.spec.containers[0]) == {}
    with pytest.raises(AllocationError, match="no NUMA nodes with enough memory"):
        manager.allocate(pod, pod.spec.containers[0], ANYWHERE)
    manager.allocate(pod, pod.spec.containers[1], ANYWHERE)
    assert [block.type for block in manager.blocks(pod.uid, "c1")] == ["memory"]


def test_memory_manager_state_write_fails_allocation_retained_and_retried(file: Path) -> None:
    manager = static(file, [(8, 0)])
    one, other = (pod_from(uid, [], [("c", 4, 0, False)]) for uid in ("one", "other"))
    file.parent.rename(moved := file.parent.with_name(f"{file.parent.name}-moved"))
    try:
        manager.allocate(one, one.spec.containers[0], ANYWHERE)
    finally:
        moved.rename(file.parent)
    assert state_of(file).entries == {}
    with pytest.raises(AllocationError):
        manager.allocate(other, other.spec.containers[0], ANYWHERE)
    manager.catch_up()
    assert set(state_of(file).entries) == {"one"}
    file.unlink()
    manager.catch_up()
    assert not file.exists(), "once is enough"
    manager.retain(set())
    manager.allocate(other, other.spec.containers[0], ANYWHERE)
    assert set(state_of(file).entries) == {"other"}
