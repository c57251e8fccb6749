"""Which CPUs of the machine share a core, a cache, a NUMA node, a socket.

Giving out CPUs well means knowing who their neighbours are. The facts come from files below
/sys/devices/system and nothing else, so that a test can make up any machine. A *CPU* is what the kernel
counts, one thread of a core. Only CPUs that are online count: the others cannot run anything.

Numbers of cores are their lowest CPU, because the kernel's own repeat from socket to socket. The cache
that matters is the last one (beyond level 2) where a NUMA node has several of them; where all CPUs of a
node share one, or nothing is told, the socket stands for it.
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
    """Where a CPU is."""

    core: int
    cache: int
    node: int
    socket: int


@dataclass(frozen=True)
class CpuTopology:
    """All CPUs of a machine; the counts are of what has at least one of them."""

    cpus: dict[int, Cpu]

    @cached_property
    def all(self) -> frozenset[int]:
        """Every CPU there is."""
        return frozenset(self.cpus)

    @cached_property
    def nodes(self) -> frozenset[int]:
        """The NUMA nodes that have CPUs."""
        return frozenset(cpu.node for cpu in self.cpus.values())

    @cached_property
    def sockets(self) -> frozenset[int]:
        """The sockets that have CPUs."""
        return frozenset(cpu.socket for cpu in self.cpus.values())

    @cached_property
    def cpus_per_core(self) -> int:
        """How many threads a core has; rounded down where cores differ."""
        return len(self.cpus) // len({cpu.core for cpu in self.cpus.values()})

    @cached_property
    def cpus_per_cache(self) -> int:
        """How many CPUs share a cache; rounded down where caches differ."""
        return len(self.cpus) // len({cpu.cache for cpu in self.cpus.values()})

    def groups(self, level: Level, cpus: Iterable[int] | None = None) -> dict[int, frozenset[int]]:
        """Sort these CPUs, or all, by what they share; CPUs that the machine does not have are left out."""
        found: dict[int, set[int]] = {}
        for cpu in self.cpus if cpus is None else cpus:
            if cpu in self.cpus:
                found.setdefault(getattr(self.cpus[cpu], level), set()).add(cpu)
        return {group: frozenset(members) for group, members in found.items()}

    def sockets_of(self, nodes: Iterable[int]) -> frozenset[int]:
        """Give the sockets that these NUMA nodes lie in."""
        wanted = frozenset(nodes)
        return frozenset(cpu.socket for cpu in self.cpus.values() if cpu.node in wanted)

    def cores_of(self, cpus: Iterable[int]) -> frozenset[int]:
        """Give these CPUs and all that share a core with one of them."""
        cores = {self.cpus[cpu].core for cpu in cpus}
        return frozenset(number for number, cpu in self.cpus.items() if cpu.core in cores)

    def share_cache(self, cpus: Iterable[int]) -> bool:
        """Whether all these CPUs are behind one cache."""
        return len({self.cpus[cpu].cache for cpu in cpus}) <= 1


def read_topology(system: Path = SYSTEM) -> CpuTopology:
    """Read how the machine's online CPUs are arranged; raises PolicyError."""
    online = read_online(system)
    members = _node_members(system)
    placed: dict[int, tuple[int, int, int]] = {}
    for number in _numbered(system / "cpu", "cpu"):
        topology = system / f"cpu/cpu{number}/topology"
        core, socket = _number(topology / "core_id"), _number(topology / "physical_package_id")
        if core is None or socket is None or (online and number not in online):
            continue
        # A kernel without NUMA has no folder of nodes; then each socket is taken for one.
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
        in_node = sum(place[0] == node for place in cores) * len(threads)
        cache = _shared_cache(system / f"cpu/cpu{threads[0]}/cache", in_node)
        here = Cpu(core=threads[0], cache=socket if cache is None else cache, node=node, socket=socket)
        cpus.update(dict.fromkeys(threads, here))
    return CpuTopology(cpus)


def read_online(system: Path = SYSTEM) -> frozenset[int]:
    """Give the CPUs that are online now; none where the kernel does not tell, because it never changes."""
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


def _shared_cache(folder: Path, cpus_of_node: int) -> int | None:
    """Give the last cache's number, unless all CPUs of the node share it or it is not told."""
    for index in _numbered(folder, "index"):
        cache = folder / f"index{index}"
        if (_number(cache / "level") or 0) < _FIRST_SHARED_CACHE:
            continue
        with suppress(OSError, ValueError):
            if len(cpuset.parse((cache / "shared_cpu_list").read_text().strip())) != cpus_of_node:
                return _number(cache / "id")
    return None


def _numbered(folder: Path, prefix: str) -> Iterator[int]:
    pattern = re.compile(rf"{prefix}([0-9]+)", re.ASCII)
    with suppress(OSError):
        yield from sorted(
            int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))
        )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
