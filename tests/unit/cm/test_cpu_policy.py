"""The static policy: who gets CPUs for itself, which, and what it tells the topology manager."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api import cpuset
from pykubelet.api.pod import Container, Pod
from pykubelet.cm.cpu.policy import CpuOptions, StaticPolicy, check_machine, read_options, reserve
from pykubelet.cm.cpu.state import CpuState
from pykubelet.cm.cpu.topology import CpuTopology
from pykubelet.cm.topology.hints import ANYWHERE, AllocationError, PolicyError, TopologyHint
from pykubelet.config.types import KubeletConfiguration
from tests.support.cpu_machines import machine
from tests.support.pod_resources import pod_of

DUAL = machine(sockets=2, cores=3, interleaved=True)
"""Twelve CPUs: the even ones on socket and node 0, the odd ones on 1; 0 and 6 share a core, and so on."""


def ask(cpu: str, memory: str = "1Gi") -> dict[str, Any]:
    """Resources of a guaranteed container."""
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}}


def policy(topology: CpuTopology = DUAL, reserved: str = "0,6", **options: bool) -> StaticPolicy:
    return StaticPolicy(topology, cpuset.parse(reserved), CpuOptions(**options))


def containers(pod: Pod) -> list[Container]:
    return [*pod.spec.init_containers, *pod.spec.containers]


def admit(policy: StaticPolicy, state: CpuState, pod: Pod, chosen: TopologyHint = ANYWHERE) -> CpuState:
    """Give all of a pod's containers what they ask for."""
    for container in containers(pod):
        state = policy.allocate(state, pod, container, chosen)
    return state


def near(*nodes: int, preferred: bool = True) -> TopologyHint:
    return TopologyHint(frozenset(nodes), preferred=preferred)


@pytest.mark.parametrize(
    ("resources", "spec", "count"),
    [
        (ask("2"), {}, 2),
        (ask("2000m"), {}, 2),
        (ask("1.5"), {}, 0),
        (ask("500m"), {}, 0),
        ({"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "3", "memory": "1Gi"}}, {}, 0),
        ({"requests": {"cpu": "2"}}, {}, 0),
        ({}, {}, 0),
        # CPUs of pods as a whole are the alpha gate PodLevelResourceManagers.
        (ask("2"), {"resources": ask("2")}, 0),
    ],
)
def test_static_policy_only_guaranteed_integer_requests_get_exclusive_cpus(
    resources: dict[str, Any], spec: dict[str, Any], count: int
) -> None:
    pod = pod_of(resources, **spec)
    assert policy().exclusive_count(pod, pod.spec.containers[0]) == count
    state = admit(policy(), CpuState(DUAL.all), pod)
    assert len(state.exclusive) == count
    assert len(state.shared) == 12 - count


def test_static_policy_fractional_container_in_guaranteed_pod_is_shared() -> None:
    pod = pod_of(ask("2"), ask("1500m"))
    state = admit(policy(), policy().start(None), pod)
    assert state.cpus_of(pod.uid, "c0") == frozenset({2, 8})
    assert state.cpus_of(pod.uid, "c1") is None


def test_static_policy_reserved_cpus_are_shared_but_not_allocated() -> None:
    own = policy()
    state = own.start(None)
    assert state.shared == DUAL.all
    pod = pod_of(ask("10"))
    state = admit(own, state, pod)
    assert state.shared == {0, 6}
    with pytest.raises(AllocationError, match="requested=1, available=0") as err:
        admit(own, state, pod_of(ask("1")))
    assert err.value.reason is None


def test_static_policy_strict_reservation_excludes_reserved_from_shared() -> None:
    own = policy(strict_reservation=True)
    state = own.start(None)
    assert state.shared == DUAL.all - {0, 6}
    full = admit(own, state, pod_of(ask("10")))
    assert full.shared == frozenset()
    # With nobody's pool left over, a restart must work all the same.
    assert own.start(full) == full


def test_static_policy_allocate_twice_returns_same_state() -> None:
    pod = pod_of(ask("2"))
    state = admit(policy(), CpuState(DUAL.all), pod)
    assert admit(policy(), state, pod) is state


def test_static_policy_allocates_from_hinted_nodes_first() -> None:
    pod = pod_of(ask("2"))
    assert admit(policy(), CpuState(DUAL.all), pod, near(1)).exclusive == {1, 7}
    pod = pod_of(ask("8"))
    taken = admit(policy(), CpuState(DUAL.all), pod, near(1)).exclusive
    assert taken == {1, 3, 5, 7, 9, 11, 2, 8}


def test_static_policy_by_socket_allocates_from_hinted_socket_first() -> None:
    topology = machine(sockets=2, nodes=2, cores=2)
    pod = pod_of(ask("6"))
    state = CpuState(topology.all).with_assigned("other", "c", frozenset({1, 2, 9, 10}))
    by_node = admit(policy(topology, "0"), state, pod, near(2)).cpus_of(pod.uid, "c0") or frozenset()
    by_socket = (
        admit(policy(topology, "0", by_socket=True), state, pod, near(2)).cpus_of(pod.uid, "c0")
        or frozenset()
    )
    assert topology.sockets_of(topology.groups("node", by_socket)) == {1}
    assert by_node >= topology.groups("node")[2]
    assert topology.sockets_of(topology.groups("node", by_node)) == {0, 1}


class TestWholeCores:
    """The option full-pcpus-only."""

    def test_full_cores_odd_request_raises_smt_alignment_error(self) -> None:
        with pytest.raises(AllocationError) as err:
            admit(policy(full_cores=True), CpuState(DUAL.all), pod_of(ask("3")))
        assert err.value.reason == "SMTAlignmentError"
        assert str(err.value) == "SMT Alignment Error: requested 3 cpus not multiple cpus per core = 2"

    def test_full_cores_siblings_of_reserved_cpus_are_not_available(self) -> None:
        own = policy(reserved="0,1", full_cores=True)
        with pytest.raises(AllocationError) as err:
            admit(own, CpuState(DUAL.all), pod_of(ask("10")))
        assert err.value.reason == "SMTAlignmentError"
        assert str(err.value) == (
            "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = 8, "
            "requested CPUs = 10, CPUs per core = 2"
        )
        taken = admit(own, CpuState(DUAL.all), pod_of(ask("8"))).exclusive
        assert DUAL.cores_of(taken) == taken

    def test_full_cores_single_free_thread_on_hinted_node_is_not_used(self) -> None:
        """The chosen node has three CPUs left, one of them next to a reserved one."""
        own = policy(reserved="0", full_cores=True)
        state = CpuState(DUAL.all).with_assigned("other", "c", frozenset({4, 10}))
        taken = admit(own, state, pod := pod_of(ask("4")), near(0)).cpus_of(pod.uid, "c0") or frozenset()
        assert taken == {2, 8, 1, 7}

    def test_full_cores_full_node_readmits_pod_after_restart(self) -> None:
        pod = pod_of(ask("10"), init=[ask("10")])
        own = policy(full_cores=True)
        state = admit(own, CpuState(DUAL.all), pod)
        assert admit(own, state, pod) is state


class TestInitContainers:
    """What ends before others start."""

    def test_init_containers_cpus_are_reused(self) -> None:
        topology = machine(cores=4)
        pod = pod_of(ask("4"), ask("2"), init=[ask("2"), ask("6")])
        state = admit(policy(topology, "0,4"), CpuState(topology.all), pod)
        given = {c.name: state.cpus_of(pod.uid, c.name) or frozenset() for c in containers(pod)}
        assert len(state.exclusive) == 6
        assert given["i0"] < given["i1"]
        assert given["c0"] | given["c1"] == given["i1"]
        assert not given["c0"] & given["c1"]
        assert policy().peak_exclusive_count(pod) == 6

    def test_sidecar_cpus_are_not_reused(self) -> None:
        pod = pod_of(ask("2"), init=[ask("2"), ask("2"), ask("4")])
        pod.spec.init_containers[1].restart_policy = "Always"
        state = admit(policy(), CpuState(DUAL.all), pod)
        given = {c.name: state.cpus_of(pod.uid, c.name) or frozenset() for c in containers(pod)}
        assert given["i1"] == given["i0"]
        assert not given["i2"] & given["i1"]
        assert not given["c0"] & given["i1"]
        assert given["c0"] < given["i2"]
        assert policy().peak_exclusive_count(pod) == 6
        assert len(state.exclusive) == 6


class TestHints:
    """What the topology manager hears."""

    def test_fractional_request_has_no_hints(self) -> None:
        pod = pod_of(ask("1500m"))
        assert policy().hints(CpuState(DUAL.all), pod, pod.spec.containers[0]) == {}
        assert policy().pod_hints(CpuState(DUAL.all), pod) == {}

    @pytest.mark.parametrize(
        ("count", "used", "hints"),
        [
            ("2", "", [near(0), near(1), near(0, 1, preferred=False)]),
            ("5", "", [near(1), near(0, 1, preferred=False)]),
            ("7", "", [near(0, 1)]),
            ("4", "2,8,1,3,7", [near(0, 1, preferred=False)]),
            ("11", "", []),
        ],
    )
    def test_hints_contain_nodes_with_enough_free_cpus(
        self, count: str, used: str, hints: list[TopologyHint]
    ) -> None:
        state = CpuState(DUAL.all)
        if used:
            state = state.with_assigned("other", "c", cpuset.parse(used))
        pod = pod_of(ask(count))
        assert policy().hints(state, pod, pod.spec.containers[0]) == {"cpu": hints}
        assert policy().pod_hints(state, pod) == {"cpu": hints}

    def test_allocated_container_hints_its_nodes(self) -> None:
        pod = pod_of(ask("2"))
        state = CpuState(DUAL.all).with_assigned(pod.uid, "c0", frozenset({1, 7}))
        hints = [near(1), near(0, 1, preferred=False)]
        assert policy().hints(state, pod, pod.spec.containers[0]) == {"cpu": hints}
        assert policy().pod_hints(state, pod) == {"cpu": hints}

    def test_changed_request_returns_empty_hints(self) -> None:
        pod = pod_of(ask("4"))
        state = CpuState(DUAL.all).with_assigned(pod.uid, "c0", frozenset({1, 7}))
        assert policy().hints(state, pod, pod.spec.containers[0]) == {"cpu": []}
        assert policy().pod_hints(state, pod) == {"cpu": []}

    def test_init_container_cpus_determine_hints(self) -> None:
        pod = pod_of(ask("2"), init=[ask("2")])
        state = CpuState(DUAL.all).with_assigned(pod.uid, "i0", frozenset({1, 7}))
        hints = [near(1), near(0, 1, preferred=False)]
        assert policy().hints(state, pod, pod.spec.containers[0]) == {"cpu": hints}
        assert policy().pod_hints(state, pod) == {"cpu": hints}

    def test_by_socket_prefers_nodes_of_one_socket(self) -> None:
        topology = machine(sockets=2, nodes=2, cores=2)
        pod = pod_of(ask("2"))
        hints = policy(topology, "0", by_socket=True).hints(
            CpuState(topology.all), pod, pod.spec.containers[0]
        )["cpu"]
        assert hints is not None
        preferred = {hint.nodes for hint in hints if hint.preferred}
        assert preferred == {frozenset(n) for n in ({0}, {1}, {2}, {3}, {0, 1}, {2, 3})}

    def test_offline_cpus_are_excluded(self) -> None:
        pod = pod_of(ask("5"))
        own, state = policy(), CpuState(DUAL.all)
        assert own.hints(state, pod, pod.spec.containers[0], frozenset({1, 3})) == {
            "cpu": [near(0, 1, preferred=False)]
        }
        assert not own.allocate(state, pod, pod.spec.containers[0], near(1), frozenset({1, 3})).exclusive & {
            1,
            3,
        }


class TestReserve:
    """Which CPUs are kept from containers."""

    @pytest.mark.parametrize(
        ("kube", "system", "named", "kept"),
        [
            ("1", "", "", "0"),
            ("500m", "", "", "0"),
            ("1", "1", "", "0,6"),
            ("1500m", "600m", "", "0,2,6"),
            ("4", "", "3,9", "3,9"),
        ],
    )
    def test_reserve_selects_cpus_of_configuration(
        self, kube: str, system: str, named: str, kept: str
    ) -> None:
        config = KubeletConfiguration(reserved_system_cpus=named)
        config.kube_reserved = {"cpu": kube}
        config.system_reserved = {"cpu": system} if system else {}
        assert cpuset.format(reserve(DUAL, config, CpuOptions())) == kept

    @pytest.mark.parametrize(
        ("kube", "named", "words"),
        [
            ("0", "", "set reservedSystemCPUs"),
            ("13", "", "13 CPUs are reserved"),
            ("1", "0,12", "names CPUs 12"),
        ],
    )
    def test_reserve_impossible_raises_policy_error(self, kube: str, named: str, words: str) -> None:
        config = KubeletConfiguration(reserved_system_cpus=named)
        config.kube_reserved = {"cpu": kube}
        with pytest.raises(PolicyError, match=words):
            reserve(DUAL, config, CpuOptions())


@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        (CpuState(DUAL.all - {0}), {}, "not all reserved CPUs 0,6 are in the shared pool"),
        (CpuState(DUAL.all), {"strict_reservation": True}, "against strict-cpu-reservation"),
        (
            CpuState(DUAL.all, {"u": {"c": frozenset({1})}}),
            {},
            "CPUs 1 of the pod u are also given to others",
        ),
        (
            CpuState(DUAL.all - {1}, {"u": {"c": frozenset({1})}, "v": {"c": frozenset({1})}}),
            {},
            "CPUs 1 of the pod v are also given to others",
        ),
        (CpuState(DUAL.all - {11}), {}, "about CPUs 0-10, but pods may have 0-11"),
        (CpuState(DUAL.all | {12}), {}, "about CPUs 0-12, but pods may have 0-11"),
    ],
)
def test_static_policy_start_invalid_state_raises_policy_error(
    state: CpuState, options: dict[str, bool], words: str
) -> None:
    with pytest.raises(PolicyError, match=words) as err:
        StaticPolicy(DUAL, frozenset({0, 6}), CpuOptions(**options)).start(state)
    assert "drain the node, delete the file" in str(err.value)


def test_read_options_parses_boolean_options() -> None:
    assert read_options({"full-pcpus-only": "true", "align-by-socket": "0"}) == CpuOptions(full_cores=True)
    every = {
        "distribute-cpus-across-numa": "1",
        "align-by-socket": "t",
        "distribute-cpus-across-cores": "True",
        "strict-cpu-reservation": "TRUE",
        "prefer-align-cpus-by-uncorecache": "T",
    }
    assert read_options(every) == CpuOptions(
        across_nodes=True, by_socket=True, spread=True, strict_reservation=True, by_cache=True
    )


def test_check_machine_by_socket_sockets_share_node_raises_policy_error() -> None:
    with pytest.raises(PolicyError, match="2 sockets but only 1 NUMA nodes"):
        check_machine(machine(sockets=2, joined=True), CpuOptions(by_socket=True))
    check_machine(machine(sockets=2), CpuOptions(by_socket=True))
    check_machine(machine(sockets=2, joined=True), CpuOptions())


OPTIONS = [
    {},
    {"full_cores": True},
    {"across_nodes": True},
    {"spread": True},
    {"strict_reservation": True},
    {"by_cache": True},
    {"by_socket": True},
    {"across_nodes": True, "full_cores": True},
]
MACHINES = [
    DUAL,
    machine(sockets=2, nodes=2, caches=2, cores=2),
    machine(cores=6, threads=1),
    machine(caches=3),
]


@given(data=st.data(), topology=st.sampled_from(MACHINES), options=st.sampled_from(OPTIONS))
def test_static_policy_any_sequence_preserves_invariants(
    data: st.DataObject, topology: CpuTopology, options: dict[str, bool]
) -> None:
    """No CPU is given twice, reserved ones never, none is lost, and in the end all is as it was."""
    own = StaticPolicy(
        topology,
        frozenset(data.draw(st.sets(st.sampled_from(sorted(topology.all)), min_size=1, max_size=3))),
        CpuOptions(**options),
    )
    state = start = own.start(None)
    pods: list[Pod] = []
    nodes = st.one_of(st.none(), st.frozensets(st.sampled_from(sorted(topology.nodes)), min_size=1))
    for _ in range(data.draw(st.integers(1, 6))):
        leave: bool = data.draw(st.booleans())
        if pods and leave:
            gone = pods.pop(data.draw(st.integers(0, len(pods) - 1)))
            for container in containers(gone):
                state = state.without(gone.uid, container.name)
        else:
            sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
            before = data.draw(st.lists(st.integers(1, 4), max_size=3))
            pod = pod_of(*(ask(str(size)) for size in sizes), init=[ask(str(size)) for size in before])
            for container in pod.spec.init_containers:
                if data.draw(st.booleans()):
                    container.restart_policy = "Always"
            pods.append(pod)
            try:
                state = admit(own, state, pod, TopologyHint(data.draw(nodes), preferred=True))
            except AllocationError:
                pods.pop()
        check(own, state, start, pods)
    for pod in pods:
        for container in containers(pod):
            state = state.without(pod.uid, container.name)
    assert state == start


def check(own: StaticPolicy, state: CpuState, start: CpuState, pods: list[Pod]) -> None:
    assert state.assigned.keys() == {pod.uid for pod in pods}
    assert own.start(state) is state
    assert not state.exclusive & own.reserved
    assert state.shared | state.exclusive == start.shared
    for pod in pods:
        given = {c.name: state.cpus_of(pod.uid, c.name) or frozenset() for c in containers(pod)}
        assert all(len(given[c.name]) == own.exclusive_count(pod, c) for c in containers(pod))
        together = [given[c.name] for c in pod.spec.containers]
        for container in reversed(pod.spec.init_containers):
            assert all(not given[container.name] & other for other in together if container.restart_policy)
            if container.restart_policy:
                together.append(given[container.name])
        if own.options.full_cores:
            assert all(own.topology.cores_of(cpus) == cpus for cpus in given.values())
