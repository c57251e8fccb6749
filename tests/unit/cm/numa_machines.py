"""Machines with NUMA nodes, and hints in the short form of the tables: `0.1!` is both nodes, preferred."""

from pathlib import Path

from pykubelet.cm.memory.numa_nodes import MemoryNode
from pykubelet.cm.topology.hints import TopologyHint

GIB = 1 << 30
GOLDEN = Path(__file__).parents[2] / "data/golden"


def hint(text: str) -> TopologyHint:
    """Read a hint."""
    nodes = text.removesuffix("!")
    return TopologyHint(None if nodes == "any" else frozenset(map(int, nodes.split("."))), text.endswith("!"))


def hints(text: str) -> list[TopologyHint]:
    """Read hints."""
    return list(map(hint, text.split()))


def machine(*gibibytes: int, pages: int = 0) -> list[MemoryNode]:
    """NUMA nodes with this much memory, of which `pages` GiB each are set aside as huge pages."""
    return [MemoryNode(i, each * GIB, {"hugepages-1Gi": pages * GIB}) for i, each in enumerate(gibibytes)]
