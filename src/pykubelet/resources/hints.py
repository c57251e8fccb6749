"""What those who give out CPUs, memory and devices have to agree on: which NUMA nodes to take them from.

Each of them is a `HintProvider`: it says from which sets of NUMA nodes it could serve a container, the
topology manager finds the set that suits all, and each then allocates as near to it as it can. Nobody
knows the others; this file is all they share.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from pykubelet.api.pod import Container, Pod


@dataclass(frozen=True)
class Hint:
    """A set of NUMA nodes that would do; `nodes` of None: any would.

    A preferred one needs no more nodes than the request would need on an empty machine.
    """

    nodes: frozenset[int] | None
    preferred: bool


Hints = dict[str, list[Hint] | None]
"""Hints by resource. None: no preference; an empty list: no set of nodes can serve the request.

An empty dictionary means that the provider has no preference about anything.
"""

ANYWHERE = Hint(None, preferred=False)
"""The chosen hint where topology does not matter: with the policy `none`."""


class HintProvider(Protocol):
    """One who gives out something that belongs to NUMA nodes."""

    def hints(self, pod: Pod, container: Container) -> Hints:
        """Say where a container could be served; what it already has, it gets again."""

    def pod_hints(self, pod: Pod) -> Hints:
        """Say where all the pod's containers could be served together; for the scope `pod`."""

    def allocate(self, pod: Pod, container: Container, chosen: Hint) -> Awaitable[None] | None:
        """Give a container what it asks for, from the chosen nodes; does nothing for one that has it.

        At once, or as something to wait for: who has to ask a plugin cannot answer at once. Raises
        AllocationError.
        """


class AllocationError(Exception):
    """What a container asks for cannot be given.

    `reason` is the pod's: None where the reference has no name for it, which it then calls unexpected.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class PolicyError(Exception):
    """This machine, its configuration or a state file does not allow a manager's policy.

    One line with the cause and the remedy: an agent that went on would be guessing.
    """


def node_sets(nodes: Iterable[int]) -> Iterator[frozenset[int]]:
    """Give every set of these NUMA nodes but the empty one: small before large, low numbers first."""
    ordered = sorted(nodes)
    for size in range(1, len(ordered) + 1):
        yield from map(frozenset, combinations(ordered, size))


def breadth(nodes: frozenset[int]) -> tuple[int, int]:
    """Order sets of nodes: fewer nodes are narrower, then those with the lower highest number."""
    return len(nodes), sum(1 << node for node in nodes)
