"""The tree that holds all pods: `kubepods`, its tiers, and a cgroup per pod.

    /kubepods                  all pods together: the machine without what is reserved
    ├─ pod<uid>                guaranteed pods
    ├─ burstable/pod<uid>
    └─ besteffort/pod<uid>

below `cgroupRoot`, at the paths and with the values of the reference, so that tools that look there
find what they expect and a node can be handed over between agents. Containers' own cgroups, one
level deeper, are the runtime's. Nothing outside of the tree is touched, but what `node_cgroups.py`
is asked to enforce.

The tiers between the node and its pods: `burstable` and `besteffort`.

Guaranteed pods live directly below `kubepods`; the others share a tier each. The burstable tier
weighs as much as its pods have asked for together, the best-effort tier next to nothing, so that
who asked for nothing gets only what nobody else wants.

A pod's own cgroup while the pod is resized: what it is set to, what it shall be, one setting at a time.

Which setting comes when is decided elsewhere (`resize_plan.py`). A limit that the pod no longer wishes for
stays: taking limits away in place is not something that Kubernetes does.

What a pod as a whole has got, read back from what its cgroup is set to.

Once a pod runs, its status tells this instead of what was asked for. The two differ where the kernel
counts otherwise: shares are coarser than millicores, cgroup v1 has a number even for no limit at all,
and what no cgroup bounds (`ephemeral-storage`) is not told.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pykubelet.api import cpuset
from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cm.capacity import UNBOUNDED, overcommitment, unreserved
from pykubelet.cm.cgroups.driver import CgroupDriver, CgroupError, CgroupMetrics
from pykubelet.cm.cgroups.node_cgroups import NodeAllocatableEnforcer, Record, no_record
from pykubelet.cm.cgroups.values import (
    UNLIMITED,
    CgroupName,
    CgroupValues,
    PodPolicy,
    cgroupfs_path,
    last_part,
    parse_path,
    pod_part,
    pod_values,
    runtime_parent,
    shares_of_weight,
    uid_of_part,
    weight_of_shares,
)
from pykubelet.cm.qos import (
    DEFAULT_PERIOD,
    MIN_QUOTA,
    MIN_SHARES,
    SHARES_PER_CPU,
    QOSClass,
    pod_requests,
    qos_class,
    shares_of,
)
from pykubelet.cm.resize import Part, PodLimits
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.logs import get_logger

log = get_logger(__name__)
TIERS: Mapping[QOSClass, tuple[str, ...]] = {
    "Guaranteed": (),
    "Burstable": ("burstable",),
    "BestEffort": ("besteffort",),
}
"""Where pods of a class live, below `kubepods`."""
_NOTHING = Quantity.of(0)
_LEAST_MEMORY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class QosPolicy:
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
class QosDemand:
    """What one pod asked for."""

    qos: QOSClass
    milli_cpu: int
    memory: int


def demand_of(pod: Pod, *, pod_level: bool = True) -> QosDemand:
    """Give what a pod asked for."""
    requests = pod_requests(pod, pod_level=pod_level)
    return QosDemand(
        qos_class(pod, pod_level=pod_level),
        requests.get("cpu", _NOTHING).milli,
        int(requests.get("memory", _NOTHING)),
    )


class Demands:
    """Demands of all pods by uid, with their sums by QoS class."""

    def __init__(self, demands: Mapping[str, QosDemand] | None = None) -> None:
        self._by_uid: dict[str, QosDemand] = {}
        self.milli_cpu: Counter[QOSClass] = Counter()
        """Thousandths of CPUs that the pods of a class request together."""
        self.memory: Counter[QOSClass] = Counter()
        """Bytes that the pods of a class request together."""
        for uid, demand in (demands or {}).items():
            self.put(uid, demand)

    def put(self, uid: str, demand: QosDemand | None) -> QosDemand | None:
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

    def equals(self, demands: Mapping[str, QosDemand]) -> bool:
        """Return whether these are exactly the demands by uid."""
        return self._by_uid == demands


def tier_values(demands: Demands, policy: QosPolicy) -> dict[QOSClass, CgroupValues]:
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


def _memory_left(guaranteed: int, burstable: int, policy: QosPolicy) -> tuple[int | None, int | None]:
    percent = policy.memory_reserved
    if percent is None or not policy.allocatable_memory:
        return None, None
    first = policy.allocatable_memory - guaranteed * percent // 100
    second = first - burstable * percent // 100
    # Nothing left must not read as no limit at all.
    return max(first, _LEAST_MEMORY), max(second, _LEAST_MEMORY)


def _protection(guaranteed: int, burstable: int, policy: QosPolicy) -> tuple[dict[str, str], dict[str, str]]:
    if policy.protect_memory is None:
        return {}, {}
    if not policy.protect_memory:
        return {"memory.min": "0"}, {"memory.low": "0"}
    # A parent must cover its children's protection, or theirs does not count.
    return {"memory.min": str(guaranteed + burstable)}, {"memory.low": str(burstable)}


_MILLI = 10**6
_LEAST_LIMIT = MIN_QUOTA * 1000 // DEFAULT_PERIOD
"""The smallest limit of cpu that the kernel knows, in millicores."""


def resources_in_force(
    pod: Pod, values: CgroupValues, *, unified: bool, pod_level: bool = True
) -> tuple[Resources, Resources]:
    """Give the limits and the requests of a pod whose cgroup is set to `values`."""
    limits, requests = dict[str, Quantity](), dict[str, Quantity]()
    if (whole := pod.spec.resources) is not None:
        limits, requests = dict(whole.limits), dict(whole.requests)
    promised = -(-(values.shares or 0) * 1000 // SHARES_PER_CPU)
    if _tells_more(promised, requests, MIN_SHARES):
        requests["cpu"] = Quantity(promised * _MILLI)
    bound = values.quota * 1000 // values.period if values.quota and values.quota > 0 else 0
    if bound and _tells_more(bound, limits, _LEAST_LIMIT):
        limits["cpu"] = Quantity(bound * _MILLI)
    memory = pod_requests(pod, pod_level=pod_level).get("memory")
    if memory is not None:
        requests.setdefault("memory", memory)
    if values.memory:
        limits["memory"] = Quantity.of(whole_pages(values.memory), "binary")
    elif not unified:
        limits["memory"] = Quantity.of(whole_pages(2**63 - 1), "binary")
    return limits, requests


def whole_pages(size: int) -> int:
    """Give the bytes that the kernel makes of a limit: it bounds memory by whole pages."""
    page = os.sysconf("SC_PAGE_SIZE")
    return size // page * page


def _tells_more(milli: int, asked: Resources, least: int) -> bool:
    """Whether an amount is more than the kernel's least, which stands for anything up to that."""
    known = asked.get("cpu")
    return milli > least or (known is not None and known.milli > least)


_NO_BOUND = 2**63 - 1


class PodCgroup:
    """The cgroup of one pod; everything here may raise OSError."""

    def __init__(
        self, groups: CgroupDriver, name: CgroupName, values: CgroupValues, *, unified: bool
    ) -> None:
        """Take where it is and what the pod was promised."""
        self._groups = groups
        self._name = name
        self._values = groups.granted(values)
        self._unified = unified

    def settings(self) -> CgroupValues:
        """Give what it is set to in cpu and memory."""
        return self._groups.files.read(self._name)

    def now(self) -> PodLimits:
        """Give what it is set to, in numbers that can be compared."""
        return _limits(self.settings())

    def wanted(self, now: PodLimits) -> PodLimits:
        """Give what it shall be set to; what the pod does not say stays."""
        shares = self._values.shares or now.shares
        if self._unified:
            # The kernel's weights are coarser; the same weight is no change.
            shares = shares_of_weight(weight_of_shares(shares))
        memory = whole_pages(self._values.memory) if self._values.memory else now.memory
        return PodLimits(memory, self._values.quota or now.quota, shares)

    @property
    def period(self) -> int:
        """The microseconds over which the quota of cpu is measured."""
        return self._values.period

    @property
    def memory_limit(self) -> int | None:
        """Give the bytes that the pod shall have, None when it says nothing."""
        return self._values.memory

    async def set(self, part: Part) -> None:
        """Make one setting what it shall be."""
        values = self._values
        await self._groups.write(
            self._name,
            CgroupValues(
                shares=values.shares if part == "shares" else None,
                quota=values.quota if part == "quota" else None,
                memory=values.memory if part == "memory" else None,
                period=values.period,
            ),
        )

    def memory_usage(self) -> int:
        """Give the bytes that are in use."""
        return self._groups.files.memory_usage(self._name)


def _limits(values: CgroupValues) -> PodLimits:
    return PodLimits(values.memory or _NO_BOUND, values.quota or UNLIMITED, values.shares or MIN_SHARES)


ALL_PODS = "kubepods"
REWRITE_SECONDS = 60.0
"""How often the tiers are set although nothing has changed: others can write there, too."""
_ONLINE = Path("/sys/devices/system/cpu/online")


class PodCgroups:
    """Makes, updates and removes pods' cgroups; with `cgroupsPerQOS: false` it does nothing."""

    def __init__(
        self,
        config: KubeletConfiguration,
        gates: FeatureGates,
        cgroups: Cgroups,
        capacity: Resources,
        page_sizes: tuple[str, ...] = (),
        metrics: CgroupMetrics | None = None,
        record: Record = no_record,
    ) -> None:
        """Take the node's settings, its cgroups, its capacity (`read_capacity`) and its huge page sizes.

        `record` hears of the node's limits, as events.
        """
        pod_level = gates.enabled("PodLevelResources")
        protects = gates.enabled("MemoryQoS") and cgroups.unified
        tiered = config.memory_reservation_policy == "TieredReservation"
        self._config = config
        self._cgroups = cgroups
        self._capacity = capacity
        self._enabled = config.cgroups_per_qos
        self._driver = config.cgroup_driver
        self._root = (*parse_path(config.cgroup_root), ALL_PODS)
        self._metrics = metrics or CgroupMetrics()
        self._groups = CgroupDriver(cgroups, self._driver, self._metrics)
        self._files = self._groups.files
        self._limits = NodeAllocatableEnforcer(
            config, self._groups, capacity, page_sizes, record, protect_memory=protects
        )
        self._policy = PodPolicy(
            quota=config.cpu_cfs_quota,
            period=config.cpu_cfs_quota_period // 1000,
            pids=config.pod_pids_limit,
            page_sizes=page_sizes,
            pod_level=pod_level,
            protect_memory=protects and tiered,
        )
        self._tier_policy = QosPolicy(
            page_sizes=page_sizes,
            pod_level=pod_level,
            memory_reserved=_percent(config.qos_reserved) if gates.enabled("QOSReserved") else None,
            allocatable_memory=int(unreserved(capacity, config).get("memory", Quantity.of(0))),
            protect_memory=tiered if protects else None,
        )
        self._made: dict[str, QOSClass] = {}
        """In which tier a pod's cgroup is, of pods that have one by us."""
        self._demands: Demands | None = None
        self._read: dict[str, tuple[Pod, QosDemand]] = {}
        self._settled = False
        self._look_again = 0.0
        self._owns_cpus: Callable[[str], bool] = lambda uid: False
        self._weighing = asyncio.Lock()

    def leave_unbound(self, owns_cpus: Callable[[str], bool]) -> None:
        """Set no quota for pods that have CPUs of their own, by uid: it would protect nobody."""
        self._owns_cpus = owns_cpus

    async def setup(self) -> None:
        """Make the tree and set what all pods together may use; raises CgroupError with a remedy.

        Pods that use more than they may now (the node was not drained before the limit was
        lowered) do not fail it: `update_qos` tries again until eviction has made room.
        """
        if problem := overcommitment(self._capacity, self._config):
            raise CgroupError(errno.EINVAL, problem)
        if not self._enabled:
            return
        self._check()
        await self._make_root()
        await self._make_tiers()
        await self._limits.enforce_reservations()

    async def ensure(self, pod: Pod) -> str:
        """Have the pod's cgroup with its limits; gives the name that the runtime takes, "" for none.

        Raises CgroupError, which is an OSError.
        """
        if not self._enabled:
            return ""
        qos = qos_class(pod, pod_level=self._policy.pod_level)
        name = self._name(qos, pod.uid)
        if pod.uid not in self._made or not self._files.exists(name):
            await self._restore(name[:-1])
            await self._make(pod, name)
            self._made[pod.uid] = qos
            await self._weigh(pod.uid, self._demand(pod))
        return runtime_parent(name, self._driver)

    def exists(self, pod: Pod) -> bool:
        """Whether the pod has its cgroup, whole; true of every pod where there are none."""
        if not self._enabled:
            return True
        return self._files.exists(self._name(qos_class(pod, pod_level=self._policy.pod_level), pod.uid))

    def in_force(self, pod: Pod, settings: CgroupValues | None = None) -> tuple[Resources, Resources] | None:
        """Give the limits and requests that the pod's cgroup enforces; None when it has none.

        `settings`: what was read from it, while it may be something else than what the pod was promised.
        """
        if not self._enabled:
            return None
        values = settings or self._groups.granted(self._values(pod))
        return resources_in_force(
            pod, values, unified=self._cgroups.unified, pod_level=self._policy.pod_level
        )

    def group(self, pod: Pod) -> PodCgroup | None:
        """Give the pod's own cgroup, to be resized; None where pods have none."""
        if not self._enabled:
            return None
        name = self._name(qos_class(pod, pod_level=self._policy.pod_level), pod.uid)
        return PodCgroup(self._groups, name, self._values(pod), unified=self._cgroups.unified)

    async def remove(self, uid: str) -> None:
        """Remove the pod's cgroups and kill what is still in them; raises CgroupError if that fails.

        Needs no memory of the pod: where its cgroup is not known, it looks in every tier.
        """
        if not self._enabled:
            return
        known = self._made.get(uid)
        with self._metrics.timed("destroy"):
            for qos in TIERS if known is None else (known,):
                await self._groups.remove(self._name(qos, uid))
        self._made.pop(uid, None)
        await self._weigh(uid, None)

    def uids(self) -> set[str]:
        """Pods that have a cgroup, in whatever tier and hierarchy."""
        if not self._enabled:
            return set()
        folders = {folder for tier in TIERS.values() for folder in self._files.children(self._root + tier)}
        parts = {last_part(folder, self._driver) for folder in folders}
        return {uid for part in parts if (uid := uid_of_part(part)) is not None}

    async def update_qos(self, pods: Iterable[Pod]) -> None:
        """Weigh the tiers by all pods that are to run here; raises CgroupError.

        To be called when the sources have told of their pods, and often: between the calls `ensure`
        and `remove` keep the weights right, and a call with the same pods costs nothing, but once a
        minute. While one waits for systemd others return at once.
        """
        if not self._enabled or self._weighing.locked():
            return
        async with self._weighing:
            await self._update_qos(pods)

    async def _update_qos(self, pods: Iterable[Pod]) -> None:
        due = (now := asyncio.get_running_loop().time()) >= self._look_again
        if due:
            self._look_again = now + REWRITE_SECONDS
            await self._restore(self._root)
        await self._limits.retry(self._root)
        self._read = {pod.uid: (pod, self._demand(pod)) for pod in pods}
        found = {uid: demand for uid, (_, demand) in self._read.items()}
        if self._settled and self._demands is not None and self._demands.equals(found) and not due:
            return
        self._demands = demands = Demands(found)
        self._settled = True
        for qos, values in tier_values(demands, self._tier_policy).items():
            await self._write_tier(self._root + TIERS[qos], values)
        if self._tier_policy.protect_memory:
            self._metrics.protected(demands.memory["Guaranteed"], demands.memory["Burstable"])

    async def _make_root(self) -> None:
        await self._groups.make(self._root, CgroupValues(cpus=self._all_cpus()))
        await self._limits.limit_pods(self._root)

    async def _make_tiers(self) -> None:
        for qos, tier in tier_values(self._demands or Demands(), self._tier_policy).items():
            # What pods want together is known when the sources have told of them; until then what an
            # earlier life of the agent has set is better than nothing.
            known = self._demands is not None or qos == "BestEffort"
            first = CgroupValues(shares=tier.shares if known else None, huge_pages=tier.huge_pages)
            await self._groups.make(self._root + TIERS[qos], first)
        self._settled = False

    async def _restore(self, above: CgroupName) -> None:
        """Have what is above a pod's cgroup as it shall be: somebody may have removed it while it was empty.

        The kernel's own values would give those who asked for nothing as much as those who asked for a cpu.
        """
        if self._files.exists(above):
            return
        log.info("Cgroups of all pods were removed; making them again", cgroup=cgroupfs_path(above))
        if not self._files.exists(self._root):
            await self._make_root()
        await self._make_tiers()

    async def _make(self, pod: Pod, name: CgroupName) -> None:
        try:
            await self._groups.make(name, self._values(pod))
        except CgroupError as err:
            if err.errno not in (errno.EBUSY, errno.EINVAL) or not self._files.children(name):
                raise
            # Its containers have more than the pod shall have: they shrink first, which is a resize's work.
            log.info("A pod keeps what its cgroup is set to for now", podUID=pod.uid, why=str(err))

    def _values(self, pod: Pod) -> CgroupValues:
        unbound = self._policy.quota and self._owns_cpus(pod.uid)
        return pod_values(pod, replace(self._policy, quota=False) if unbound else self._policy)

    def _name(self, qos: QOSClass, uid: str) -> CgroupName:
        try:
            return (*self._root, *TIERS[qos], pod_part(uid))
        except ValueError as err:
            raise CgroupError(errno.EINVAL, str(err)) from err

    def _check(self) -> None:
        self._groups.check()
        if missing := self._cgroups.missing:
            raise CgroupError(
                errno.ENOSYS,
                f"the cgroup controllers {', '.join(sorted(missing))} are missing: "
                "enable them on the kernel's command line, or set cgroupsPerQOS: false",
            )

    def _all_cpus(self) -> frozenset[int]:
        """Give the cpus of all pods if nobody assigns them: systemd keeps cpusets where it knows of one."""
        if not self._cgroups.unified or self._config.cpu_manager_policy != "none":
            return frozenset()
        return cpuset.parse(_ONLINE.read_text().strip())

    def _demand(self, pod: Pod) -> QosDemand:
        known = self._read.get(pod.uid)
        if known is not None and known[0] is pod:
            return known[1]
        return demand_of(pod, pod_level=self._policy.pod_level)

    async def _weigh(self, uid: str, demand: QosDemand | None) -> None:
        """Take one pod in or out of the weights, once they are known at all."""
        if self._demands is None:
            return
        before = self._demands.put(uid, demand)
        if before == demand:
            return
        self._settled = False
        if any(change is not None and change.qos == "Burstable" for change in (before, demand)):
            shares = tier_values(self._demands, self._tier_policy)["Burstable"].shares
            await self._groups.write(self._root + TIERS["Burstable"], CgroupValues(shares=shares))

    async def _write_tier(self, name: CgroupName, values: CgroupValues) -> None:
        try:
            await self._groups.make(name, values)
        except CgroupError as err:
            if err.errno != errno.EBUSY or values.memory is None:
                self._settled = False
                raise
            # Already above its limit: at least it shall not grow, until all is set again in a while.
            usage = max(values.memory, self._files.memory_usage(name))
            await self._groups.write(name, CgroupValues(memory=usage))


def _percent(reserved: dict[str, str]) -> int | None:
    text = reserved.get("memory")
    return None if text is None else int(text.removesuffix("%"))
