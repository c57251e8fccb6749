"""What a container's status says that it has: what the runtime tells, or what it was last set to. Pure.

While nothing is being resized that is what the pod was promised, in its author's words. The kernel counts
cpus more coarsely than people write them: amounts at its least stand for anything up to that.
"""

from __future__ import annotations

from pykubelet.api.meta import Resources
from pykubelet.api.pod import ResourceRequirements
from pykubelet.api.pod_status import StatusResources
from pykubelet.api.quantity import Quantity
from pykubelet.resources.qos import DEFAULT_PERIOD, MIN_QUOTA, MIN_SHARES
from pykubelet.runtime.observed import ActualResources, ObservedContainer

_NANOS_PER_MILLI = 10**6
_LEAST_LIMIT = MIN_QUOTA * 1000 // DEFAULT_PERIOD
"""The smallest limit of cpu that the kernel knows, in thousandths."""


def actual_resources(
    promised: ResourceRequirements, seen: ObservedContainer, actuated: ResourceRequirements | None
) -> StatusResources:
    """Give the resources of a container for its status."""
    told = seen.resources or ActualResources()
    settled = actuated is None or actuated == promised
    if seen.phase != "running" or (settled and seen.resources is None):
        return StatusResources(limits=promised.limits, requests=promised.requests)
    known = actuated or promised
    limits, requests = dict(promised.limits), dict(promised.requests)
    if limits:
        _tell(limits, "cpu", _cpu(told.cpu_limit), known.limits, least=_LEAST_LIMIT)
        _tell(limits, "memory", _bytes(told.memory_limit), known.limits)
    if requests:
        _tell(requests, "cpu", _cpu(told.cpu_request), known.requests, least=MIN_SHARES)
        _tell(requests, "memory", None, known.requests)
    return StatusResources(limits=limits, requests=requests)


def _tell(amounts: Resources, name: str, told: Quantity | None, known: Resources, least: int = 0) -> None:
    """Replace one of the amounts by what the runtime told, or else by what is known."""
    asked = amounts.get(name)
    actual = told if told is not None else known.get(name)
    if actual is None:
        amounts.pop(name, None)
    elif actual != asked and max(actual.milli, asked.milli if asked is not None else 0) > least:
        amounts[name] = actual


def _cpu(milli: int) -> Quantity | None:
    return Quantity(milli * _NANOS_PER_MILLI) if milli else None


def _bytes(size: int) -> Quantity | None:
    return Quantity.of(size, "binary") if size else None
