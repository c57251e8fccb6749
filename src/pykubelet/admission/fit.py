"""Whether what a pod is promised is still there: the same account as the scheduler's. Pure.

Resources that the node does not know are somebody else's matter (the cluster may hand them out as a
whole), unless it said that it has none of them left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pykubelet.admission.link import Amounts, Usage
from pykubelet.api.meta import Resources
from pykubelet.api.names import is_extended_resource
from pykubelet.api.pod import Pod

_BASIC = ("cpu", "memory", "ephemeral-storage")


@dataclass(frozen=True, slots=True)
class Shortage:
    """A resource of which there is too little."""

    resource: str
    requested: int
    used: int
    capacity: int

    @property
    def missing(self) -> int:
        """How much would have to come free."""
        return self.requested - (self.capacity - self.used)

    @property
    def reason(self) -> str:
        """The word for it: `OutOfcpu`, `OutOfmemory`, `OutOfpods`…"""
        return f"OutOf{self.resource}"

    @property
    def message(self) -> str:
        """The numbers."""
        return (
            f"Node didn't have enough resource: {self.resource}, requested: {self.requested}, "
            f"used: {self.used}, capacity: {self.capacity}"
        )


def as_amounts(resources: Resources) -> dict[str, int]:
    """Give amounts as they are compared and told: thousandths of cpus, and whole units of all else."""
    return {name: amount.milli if name == "cpu" else int(amount) for name, amount in resources.items()}


def usage_of(pods: Iterable[Pod], requests_of: Callable[[Pod], Amounts]) -> Usage:
    """Return the sum of the resources of some pods."""
    count, amounts = 0, dict[str, int]()
    for pod in pods:
        count += 1
        for name, amount in requests_of(pod).items():
            amounts[name] = amounts.get(name, 0) + amount
    return Usage(count, amounts)


def shortages(
    pod: Pod, used: Usage, allocatable: Amounts, requests_of: Callable[[Pod], Amounts]
) -> list[Shortage]:
    """Give what there is too little of for the pod beside the others, in the order in which it is told.

    `used` has what the others have.
    """
    found = []
    most = allocatable.get("pods", 0)
    if used.pods + 1 > most:
        found.append(Shortage("pods", 1, used.pods, most))
    claimed = _claimed(pod)
    wanted = {name: amount for name, amount in requests_of(pod).items() if amount > 0 and name not in claimed}
    scalars = sorted(name for name in wanted if name not in _BASIC and _is_counted(name, allocatable))
    for name in (*(name for name in _BASIC if name in wanted), *scalars):
        taken, capacity = used.amounts.get(name, 0), allocatable.get(name, 0)
        if wanted[name] > capacity - taken:
            found.append(Shortage(name, wanted[name], taken, capacity))
    return found


def _claimed(pod: Pod) -> set[str]:
    """Give the resources for which the scheduler made a claim: they are not out of the node's own stock."""
    status = pod.status.extended_resource_claim_status
    return {mapping.resource_name for mapping in status.request_mappings} if status is not None else set()


def _is_counted(name: str, allocatable: Amounts) -> bool:
    if is_extended_resource(name):
        return name in allocatable
    return name.startswith(("hugepages-", "attachable-volumes-")) or "kubernetes.io/" in name
