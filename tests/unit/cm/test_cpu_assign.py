"""Which CPUs are taken: the reference's own answers, and what must hold on any machine."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api import cpuset
from pykubelet.cm.cpu.policy import CpuOptions, take, take_packed
from pykubelet.cm.cpu.topology import Cpu, CpuTopology
from pykubelet.cm.topology.hints import AllocationError
from tests.support.cpu_machines import machine, machine_of

# What the reference v1.36 took: the examples of its tests, and others.
TABLE = Path(__file__).parents[2] / "data/cpu-assignments.tsv"
OPTIONS = {
    "-": CpuOptions(),
    "spread": CpuOptions(spread=True),
    "cache": CpuOptions(by_cache=True),
    "across": CpuOptions(across_nodes=True),
    "across whole": CpuOptions(across_nodes=True, full_cores=True),
}


def test_take_equals_upstream_assignments() -> None:
    with TABLE.open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert len(rows) > 100
    for row in rows:
        available = cpuset.parse(row["available"])
        taken = take(machine_of(row["machine"]), available, int(row["count"]), OPTIONS[row["options"]])
        assert cpuset.format(taken) == row["taken"], row


def test_take_not_enough_cpus_raises_allocation_error() -> None:
    with pytest.raises(AllocationError) as err:
        take_packed(machine(), frozenset({1, 2}), 3)
    assert str(err.value) == "not enough cpus available to satisfy request: requested=3, available=2"
    assert err.value.reason is None
    with pytest.raises(AllocationError):
        take(machine(), frozenset({1, 2}), 3, OPTIONS["across"])
    assert take(machine(), frozenset(), 0, OPTIONS["across"]) == frozenset()


def test_take_packed_hybrid_cores_partly_used_core_is_not_free() -> None:
    """Big cores have two threads, small ones one: a core with one thread in use is not a free one."""
    big, small = Cpu(core=0, cache=0, node=0, socket=0), Cpu(core=2, cache=0, node=0, socket=0)
    topology = CpuTopology({0: big, 1: big, 2: small, 3: Cpu(core=3, cache=0, node=0, socket=0)})
    assert take_packed(topology, frozenset({1, 2, 3}), 2) == {2, 3}
    assert take_packed(topology, frozenset({1, 2}), 2) == {1, 2}
    assert take_packed(topology, frozenset({0, 1, 3}), 3) == {0, 1, 3}


def test_take_across_nodes_broken_cores_still_takes_requested_count() -> None:
    """Two nodes with a broken core each cannot give three whole ones: it is said or done otherwise."""
    topology = machine(sockets=2, cores=2)
    available = topology.all - {4, 6}
    assert len(take(topology, available, 6, OPTIONS["across whole"])) == 6


def test_take_across_nodes_distributes_evenly() -> None:
    """The lowest of several sets of nodes that are as good, also where there are many."""
    topology = machine(sockets=2, nodes=4, cores=1, threads=1)
    taken = take(topology, topology.all - {7}, 4, OPTIONS["across"])
    assert len({topology.cpus[cpu].node for cpu in taken}) == 4


machines = st.builds(
    machine,
    sockets=st.sampled_from([1, 2, 4]),
    nodes=st.sampled_from([1, 2]),
    caches=st.integers(1, 3),
    cores=st.integers(1, 4),
    threads=st.integers(1, 2),
    interleaved=st.booleans(),
)


@given(topology=machines, options=st.sampled_from(list(OPTIONS.values())), data=st.data())
def test_take_any_topology_returns_requested_count_of_available(
    topology: CpuTopology, options: CpuOptions, data: st.DataObject
) -> None:
    # Some CPUs may be missing, so that cores, nodes and sockets differ in size.
    there = data.draw(st.sets(st.sampled_from(sorted(topology.all)), min_size=1))
    if data.draw(st.booleans()):
        topology = CpuTopology({number: topology.cpus[number] for number in there})
    available = frozenset(data.draw(st.sets(st.sampled_from(sorted(topology.all)))))
    count = data.draw(st.integers(0, len(available)))
    taken = take(topology, available, count, options)
    assert len(taken) == count
    assert taken <= available
    assert take(topology, available, count, options) == taken


@given(topology=machines, data=st.data())
def test_take_from_full_cores_returns_full_cores(topology: CpuTopology, data: st.DataObject) -> None:
    """From whole cores, whole cores are taken, whatever else is wanted."""
    cores = topology.groups("core")
    chosen = data.draw(st.sets(st.sampled_from(sorted(cores)), min_size=1))
    available = frozenset().union(*(cores[core] for core in chosen))
    count = data.draw(st.integers(1, len(chosen))) * topology.cpus_per_core
    for options in (CpuOptions(), CpuOptions(by_cache=True), OPTIONS["across whole"]):
        taken = take(topology, available, count, options)
        assert topology.cores_of(taken) == taken


@given(topology=machines, data=st.data())
def test_take_fits_one_node_uses_one_node(topology: CpuTopology, data: st.DataObject) -> None:
    """An empty machine gives from one node, when one node has enough."""
    smallest = min(len(cpus) for cpus in topology.groups("node").values())
    count = data.draw(st.integers(1, smallest))
    assert len(topology.groups("node", take(topology, topology.all, count, CpuOptions()))) == 1
