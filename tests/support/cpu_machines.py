"""Machines that do not exist: how their CPUs are arranged, and the files by which a kernel would tell it."""

from __future__ import annotations

from pathlib import Path

from pykubelet.api import cpuset
from pykubelet.cm.cpu.topology import Cpu, CpuTopology


def machine(
    sockets: int = 1,
    nodes: int = 1,
    caches: int = 1,
    cores: int = 4,
    threads: int = 2,
    *,
    interleaved: bool = False,
    joined: bool = False,
) -> CpuTopology:
    """Sockets of `nodes` NUMA nodes of `caches` caches of `cores` cores of `threads` threads each.

    CPUs are numbered as most machines do: all first threads, then all second ones. `interleaved`: in turn
    on each socket. `joined`: two sockets are one NUMA node.
    """
    places = []
    for number in range(sockets * nodes * caches):
        socket = number // (nodes * caches)
        node = socket // 2 if joined else number // caches
        places += [(socket, node, number if caches > 1 else socket)] * cores
    if interleaved:
        each = len(places) // sockets
        places = [places[i % sockets * each + i // sockets] for i in range(len(places))]
    return CpuTopology(
        {
            core + thread * len(places): Cpu(core=core, cache=cache, node=node, socket=socket)
            for thread in range(threads)
            for core, (socket, node, cache) in enumerate(places)
        }
    )


def machine_of(text: str) -> CpuTopology:
    """Read a machine from a table: `2,2,1,10,2`, with words for the rest."""
    words = text.split(",")
    numbers = [int(word) for word in words if word.isdigit()]
    return machine(*numbers, interleaved="interleaved" in words, joined="joined" in words)


def write_system(folder: Path, topology: CpuTopology, *, offline: frozenset[int] = frozenset()) -> Path:
    """Write the files of a machine below a directory that stands for /sys/devices/system."""
    for level in ("node", "cache", "core"):
        for number, cpus in topology.groups(level).items():
            online = sorted(cpus - offline)
            if level == "node":
                write(folder / f"node/node{number}/cpulist", cpuset.format(online))
            for cpu in online:
                here = folder / f"cpu/cpu{cpu}"
                if level == "core":
                    # The kernel counts cores again in each socket.
                    peers = sorted(
                        topology.groups("core", topology.groups("socket")[topology.cpus[cpu].socket])
                    )
                    write(here / "topology/core_id", str(peers.index(number)))
                    write(here / "topology/physical_package_id", str(topology.cpus[cpu].socket))
                    write(here / "cache/index0/level", "1")
                    write(here / "cache/index0/id", str(number))
                    write(here / "cache/index0/shared_cpu_list", cpuset.format(online))
                elif level == "cache":
                    write(here / "cache/index3/level", "3")
                    write(here / "cache/index3/id", str(number))
                    write(here / "cache/index3/shared_cpu_list", cpuset.format(online))
    for cpu in offline:
        (folder / f"cpu/cpu{cpu}").mkdir(parents=True, exist_ok=True)
    write(folder / "cpu/online", cpuset.format(topology.all - offline))
    return folder


def write(file: Path, text: str) -> None:
    """Write a file as the kernel shows it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")
