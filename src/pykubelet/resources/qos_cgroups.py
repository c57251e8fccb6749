"""The tiers between the node and its pods: `burstable` and `besteffort`.

Guaranteed pods live directly below `kubepods`; the others share a tier each. The burstable tier
weighs as much as its pods have asked for together, the best-effort tier next to nothing, so that
who asked for nothing gets only what nobody else wants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.resources.cgroup_values import CgroupValues
from pykubelet.resources.huge_pages import UNBOUNDED
from pykubelet.resources.qos import MIN_SHARES, QOSClass, pod_requests, qos_class, shares_of

TIERS: Mapping[QOSClass, tuple[str, ...]] = {
    "Guaranteed": (),
    "Burstable": ("burstable",),
    "BestEffort": ("besteffort",),
}
"""Where pods of a class live, below `kubepods`."""

_NOTHING = Quantity.of(0)
_LEAST_MEMORY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """The node's settings that the tiers depend on."""

    page_sizes: tuple[str, ...] = ()
    pod_level: bool = True
    memory_reserved: int | None = None
    """Percent of requested memory that lower tiers cannot have (`qosReserved`, gate `QOSReserved`)."""
    allocatable_memory: int = 0
    """Bytes."""
    protect_memory: bool | None = None
    """Whether v2 shields requested memory from reclaim; None where that is not ours to say."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one pod asked for."""

    qos: QOSClass
    milli_cpu: int
    memory: int


def demand_of(pod: Pod, *, pod_level: bool = True) -> Demand:
    """Give what a pod asked for."""
    requests = pod_requests(pod, pod_level=pod_level)
    return Demand(
        qos_class(pod, pod_level=pod_level),
        requests.get("cpu", _NOTHING).milli,
        int(requests.get("memory", _NOTHING)),
    )


class Demands:
    """Demands of all pods by uid, with their sums by QoS class."""

    def __init__(self, demands: Mapping[str, Demand] | None = None) -> None:
        self._by_uid: dict[str, Demand] = {}
        self.milli_cpu: Counter[QOSClass] = Counter()
        """Thousandths of CPUs that the pods of a class request together."""
        self.memory: Counter[QOSClass] = Counter()
        """Bytes that the pods of a class request together."""
        for uid, demand in (demands or {}).items():
            self.put(uid, demand)

    def put(self, uid: str, demand: Demand | None) -> Demand | None:
        """Set or remove the demand of a pod; return the one before."""
        before = self._by_uid.pop(uid, None)
        if before is not None:
            self.milli_cpu[before.qos] -= before.milli_cpu
            self.memory[before.qos] -= before.memory
        if demand is not None:
            self._by_uid[uid] = demand
            self.milli_cpu[demand.qos] += demand.milli_cpu
            self.memory[demand.qos] += demand.memory
        return before

    def equals(self, demands: Mapping[str, Demand]) -> bool:
        """Return whether these are exactly the demands by uid."""
        return self._by_uid == demands


def tier_values(demands: Demands, policy: TierPolicy) -> dict[QOSClass, CgroupValues]:
    """Give the settings of the tiers, and those that pods add to `kubepods` itself (`Guaranteed`)."""
    cpu, memory = demands.milli_cpu, demands.memory
    burstable, best_effort = _memory_left(memory["Guaranteed"], memory["Burstable"], policy)
    minimum, low = _protection(memory["Guaranteed"], memory["Burstable"], policy)
    # Every tier is unbounded in huge pages: pods have their own limits, and nodes their supply.
    pages = dict.fromkeys(policy.page_sizes, UNBOUNDED)
    return {
        "Guaranteed": CgroupValues(huge_pages=pages, unified=minimum),
        "Burstable": CgroupValues(
            shares=shares_of(cpu["Burstable"]), memory=burstable, huge_pages=pages, unified=low
        ),
        "BestEffort": CgroupValues(shares=MIN_SHARES, memory=best_effort, huge_pages=pages),
    }


def _memory_left(guaranteed: int, burstable: int, policy: TierPolicy) -> tuple[int | None, int | None]:
    percent = policy.memory_reserved
    if percent is None or not policy.allocatable_memory:
        return None, None
    first = policy.allocatable_memory - guaranteed * percent // 100
    second = first - burstable * percent // 100
    # Nothing left must not read as no limit at all.
    return max(first, _LEAST_MEMORY), max(second, _LEAST_MEMORY)


def _protection(guaranteed: int, burstable: int, policy: TierPolicy) -> tuple[dict[str, str], dict[str, str]]:
    if policy.protect_memory is None:
        return {}, {}
    if not policy.protect_memory:
        return {"memory.min": "0"}, {"memory.low": "0"}
    # A parent must cover its children's protection, or theirs does not count.
    return {"memory.min": str(guaranteed + burstable)}, {"memory.low": str(burstable)}
