"""The arrangement of CPUs, read from the files of machines that do not exist, and from this one's."""

import os
from pathlib import Path

import pytest

from pykubelet.api import cpuset
from pykubelet.cm.cpu.topology import CpuTopology, read_online, read_topology
from pykubelet.cm.topology.hints import PolicyError
from tests.support.cpu_machines import machine, write, write_system


@pytest.mark.parametrize(
    "topology",
    [
        machine(),
        machine(cores=1, threads=1),
        machine(sockets=2, cores=3, interleaved=True),
        machine(sockets=2, nodes=2, cores=5),
        machine(caches=4, cores=2),
        machine(sockets=2, nodes=2, caches=2, cores=3, threads=1),
    ],
)
def test_read_topology_sysfs_layouts_are_decoded(tmp_path: Path, topology: CpuTopology) -> None:
    assert read_topology(write_system(tmp_path, topology)) == topology


def test_cpu_topology_counts_nodes_sockets_and_threads() -> None:
    topology = machine(sockets=2, nodes=2, caches=2, cores=3)
    assert len(topology.all) == 48
    assert topology.nodes == {0, 1, 2, 3}
    assert topology.sockets == {0, 1}
    assert (topology.cpus_per_core, topology.cpus_per_cache) == (2, 6)
    assert topology.sockets_of([2, 3]) == {1}
    assert topology.cores_of([0, 25]) == {0, 24, 1, 25}
    assert topology.share_cache([0, 24, 2])
    assert not topology.share_cache([0, 3])


def test_read_topology_offline_cpus_are_excluded(tmp_path: Path) -> None:
    topology = machine(sockets=2, cores=2)
    offline = frozenset({1, 6})
    found = read_topology(write_system(tmp_path, topology, offline=offline))
    assert found.all == topology.all - offline
    # A core is called by its lowest thread that is there.
    assert found.cpus[5].core == 5
    assert found.cpus[2].core == 2
    assert read_online(tmp_path) == found.all


def test_read_topology_without_numa_uses_socket_as_node(tmp_path: Path) -> None:
    write_system(tmp_path, machine(sockets=2, cores=2))
    for node in (0, 1):
        (tmp_path / f"node/node{node}/cpulist").unlink()
        (tmp_path / f"node/node{node}").rmdir()
    assert {cpu.node == cpu.socket for cpu in read_topology(tmp_path).cpus.values()} == {True}


def test_read_topology_nodes_without_cpus_are_ignored(tmp_path: Path) -> None:
    write_system(tmp_path, machine(sockets=2, cores=2))
    write(tmp_path / "node/node2/cpulist", "")
    assert read_topology(tmp_path).nodes == {0, 1}


def test_read_topology_without_cache_ids_uses_socket_as_cache(tmp_path: Path) -> None:
    write_system(tmp_path, machine(sockets=2, caches=2, cores=2))
    for file in tmp_path.glob("cpu/cpu*/cache/index3/id"):
        file.unlink()
    assert {cpu.cache == cpu.socket for cpu in read_topology(tmp_path).cpus.values()} == {True}


def test_read_topology_missing_sysfs_raises_policy_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cpuManagerPolicy: none"):
        read_topology(tmp_path)
    assert read_online(tmp_path) == frozenset()
    write(tmp_path / "cpu/online", "0-x")
    assert read_online(tmp_path) == frozenset()


def test_read_topology_of_real_host_equals_online_cpus() -> None:
    online = Path("/sys/devices/system/cpu/online")
    if not online.exists():
        pytest.skip("no /sys here")
    assert read_topology().all == cpuset.parse(online.read_text().strip())
    assert len(read_topology().all) >= len(os.sched_getaffinity(0))
