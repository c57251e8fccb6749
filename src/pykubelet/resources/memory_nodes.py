"""The machine's NUMA nodes: their memory, huge pages, and how far they are from each other.

Read from a tree of the form of /sys, so that tests can have any machine. What one node has is what the
memory manager gives out; the distances decide between sets of nodes that are otherwise alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pykubelet.api.quantity import Quantity
from pykubelet.resources.qos import HUGE_PAGES_PREFIX

_MEMORY = re.compile(r"MemTotal:\s*(\d+) kB")


@dataclass(frozen=True)
class MemoryNode:
    """A NUMA node: bytes of all its memory and, by resource, of its huge pages; distances by node."""

    number: int
    memory: int
    huge_pages: Mapping[str, int] = field(default_factory=dict)
    distances: Mapping[int, int] = field(default_factory=dict)


def read_memory_nodes(root: Path = Path("/")) -> list[MemoryNode]:
    """Read the NUMA nodes of the machine, lowest number first.

    A kernel without NUMA is one node with everything. Raises OSError when /sys or /proc cannot be read.
    """
    folder = root / "sys/devices/system/node"
    numbers = sorted(
        int(path.name.removeprefix("node"))
        for path in folder.glob("node[0-9]*")
        if path.name.removeprefix("node").isdigit()
    )
    if not numbers:
        pages = _huge_pages(root / "sys/kernel/mm/hugepages")
        return [MemoryNode(0, _memory((root / "proc/meminfo").read_text()), pages)]
    return [_read(folder / f"node{number}", number, numbers) for number in numbers]


def _read(folder: Path, number: int, numbers: list[int]) -> MemoryNode:
    try:
        words = (folder / "distance").read_text().split()
    except FileNotFoundError:
        words = []
    # The kernel writes one column per node that is there, and numbers may have gaps.
    distances = dict(zip(numbers, map(int, words), strict=True)) if len(words) == len(numbers) else {}
    memory = _memory((folder / "meminfo").read_text())
    return MemoryNode(number, memory, _huge_pages(folder / "hugepages"), distances)


def _memory(meminfo: str) -> int:
    found = _MEMORY.search(meminfo)
    return int(found[1]) * 1024 if found else 0


def _huge_pages(folder: Path) -> dict[str, int]:
    found = {}
    for path in folder.glob("hugepages-*kB"):
        size = int(path.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        pages = int((path / "nr_hugepages").read_text())
        found[f"{HUGE_PAGES_PREFIX}{Quantity.of(size, 'binary')}"] = size * pages
    return found
