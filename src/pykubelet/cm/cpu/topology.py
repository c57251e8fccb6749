"""CPU topology of the host: cores, caches, NUMA nodes and sockets.

The data comes only from files below /sys/devices/system, so that tests can define any host. A *CPU* is a
logical CPU of the kernel, one thread of a core. Only online CPUs count: the others cannot run anything.

The number of a core is its lowest CPU, because the kernel's core IDs repeat in each socket. The relevant
cache is the last one (level 3 or higher) if a NUMA node has several of them; if all CPUs of a node share one,
or nothing is reported, the number of the socket is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from pykubelet.api import cpuset
from pykubelet.cm.topology.hints import PolicyError

SYSTEM = Path("/sys/devices/system")
Level = Literal["core", "cache", "node", "socket"]
_FIRST_SHARED_CACHE = 3


@dataclass(frozen=True, slots=True)
class Cpu:
    """Location of a CPU."""

    core: int
    cache: int
    node: int
    socket: int


@dataclass(frozen=True)
class CpuTopology:
    """Topology of all CPUs of a host; it contains only groups with at least one of them."""

    cpus: dict[int, Cpu]

    @cached_property
    def all(self) -> frozenset[int]:
        """All CPUs."""
        return frozenset(self.cpus)

    @cached_property
    def nodes(self) -> frozenset[int]:
        """NUMA nodes with CPUs."""
        return frozenset(cpu.node for cpu in self.cpus.values())

    @cached_property
    def sockets(self) -> frozenset[int]:
        """Sockets with CPUs."""
        return frozenset(cpu.socket for cpu in self.cpus.values())

    @cached_property
    def cpus_per_core(self) -> int:
        """Threads per core, rounded down if cores differ."""
        return len(self.cpus) // len({cpu.core for cpu in self.cpus.values()})

    @cached_property
    def cpus_per_cache(self) -> int:
        """CPUs per cache, rounded down if caches differ."""
        return len(self.cpus) // len({cpu.cache for cpu in self.cpus.values()})

    def groups(self, level: Level, cpus: Iterable[int] | None = None) -> dict[int, frozenset[int]]:
        """Return these CPUs, or all, grouped by level; CPUs that the host does not have are omitted."""
        found: dict[int, set[int]] = {}
        for cpu in self.cpus if cpus is None else cpus:
            if cpu in self.cpus:
                found.setdefault(getattr(self.cpus[cpu], level), set()).add(cpu)
        return {group: frozenset(members) for group, members in found.items()}

    def sockets_of(self, nodes: Iterable[int]) -> frozenset[int]:
        """Return the sockets of these NUMA nodes."""
        node_set = frozenset(nodes)
        return frozenset(cpu.socket for cpu in self.cpus.values() if cpu.node in node_set)

    def cores_of(self, cpus: Iterable[int]) -> frozenset[int]:
        """Return these CPUs and all that share a core with one of them."""
        cores = {self.cpus[cpu].core for cpu in cpus}
        return frozenset(number for number, cpu in self.cpus.items() if cpu.core in cores)

    def share_cache(self, cpus: Iterable[int]) -> bool:
        """Return whether all these CPUs share one cache."""
        return len({self.cpus[cpu].cache for cpu in cpus}) <= 1


def read_topology(system: Path = SYSTEM) -> CpuTopology:
    """Read the topology of the host's online CPUs. Raises PolicyError."""
    online = read_online(system)
    members = _node_members(system)
    placed: dict[int, tuple[int, int, int]] = {}
    for number in _numbered(system / "cpu", "cpu"):
        topology = system / f"cpu/cpu{number}/topology"
        core, socket = _number(topology / "core_id"), _number(topology / "physical_package_id")
        if core is None or socket is None or (online and number not in online):
            continue
        # A kernel without NUMA has no directory of nodes; each socket then counts as a node.
        node = members.get(number) if members else socket
        if node is not None:
            placed[number] = (node, socket, core)
    if not placed:
        raise PolicyError(
            f"{system}: no CPU tells its core and socket there, so CPUs cannot be given out: "
            "mount sysfs, or use cpuManagerPolicy: none"
        )
    cores: dict[tuple[int, int, int], list[int]] = {}
    for number in sorted(placed):
        cores.setdefault(placed[number], []).append(number)
    cpus: dict[int, Cpu] = {}
    for (node, socket, _), threads in cores.items():
        in_node = sum(position[0] == node for position in cores) * len(threads)
        cache = _shared_cache(system / f"cpu/cpu{threads[0]}/cache", in_node)
        location = Cpu(core=threads[0], cache=socket if cache is None else cache, node=node, socket=socket)
        cpus.update(dict.fromkeys(threads, location))
    return CpuTopology(cpus)


def read_online(system: Path = SYSTEM) -> frozenset[int]:
    """Return the online CPUs; empty if the kernel does not list them, because they never change then."""
    with suppress(OSError, ValueError):
        return cpuset.parse((system / "cpu/online").read_text().strip())
    return frozenset()


def _node_members(system: Path) -> dict[int, int]:
    members: dict[int, int] = {}
    for node in _numbered(system / "node", "node"):
        with suppress(OSError, ValueError):
            listed = cpuset.parse((system / f"node/node{node}/cpulist").read_text().strip())
            members.update(dict.fromkeys(listed, node))
    return members


def _shared_cache(directory: Path, cpus_of_node: int) -> int | None:
    """Return the ID of the last cache, or None if all CPUs of the node share it or it is unknown."""
    for index in _numbered(directory, "index"):
        cache = directory / f"index{index}"
        if (_number(cache / "level") or 0) < _FIRST_SHARED_CACHE:
            continue
        with suppress(OSError, ValueError):
            if len(cpuset.parse((cache / "shared_cpu_list").read_text().strip())) != cpus_of_node:
                return _number(cache / "id")
    return None


def _numbered(directory: Path, prefix: str) -> Iterator[int]:
    pattern = re.compile(rf"{prefix}([0-9]+)", re.ASCII)
    with suppress(OSError):
        yield from sorted(
            int(match[1]) for path in directory.iterdir() if (match := pattern.fullmatch(path.name))
        )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
