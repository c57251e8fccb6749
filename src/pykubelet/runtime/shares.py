"""Which CPUs and whose memory a container may use, as the makers of requests are told it.

Who gives them is above this room; here is only what is asked when a container is made. On most nodes the
answer is always the same: all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pykubelet.api.pod import Container, Pod


@dataclass(frozen=True, slots=True)
class Share:
    """A container's part of the machine."""

    cpus: str = ""
    """The CPUs to run on (`0-3,5`); empty: wherever the kernel puts it."""
    memory_nodes: str = ""
    """The NUMA nodes to take memory from; empty: any."""
    exclusive: bool = False
    """Whether nobody else runs on these CPUs."""


class Shares(Protocol):
    """Who knows the shares; all answers are at hand."""

    def has_exclusive(self, uid: str) -> bool:
        """Whether a container of this pod has CPUs of its own."""
        ...

    def of(self, pod: Pod, container: Container) -> Share:
        """Give the share of a container that is about to be made."""
        ...

    def made(self, pod: Pod, container: Container, container_id: str, cpus: str) -> None:
        """Take note that the runtime has made a container that runs on these CPUs."""
        ...


class Everything:
    """The shares where nothing is given out: everybody may use everything."""

    def has_exclusive(self, uid: str) -> bool:
        """Nobody has."""
        return False

    def of(self, pod: Pod, container: Container) -> Share:
        """Give all there is."""
        return ALL

    def made(self, pod: Pod, container: Container, container_id: str, cpus: str) -> None:
        """Nobody has to know."""


ALL = Share()
