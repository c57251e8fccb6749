"""Cgroup tree of pods: `kubepods`, the QoS cgroups, and a cgroup per pod.

    /kubepods                  all pods together: the capacity without reservations
    ├─ pod<uid>                Guaranteed pods
    ├─ burstable/pod<uid>
    └─ besteffort/pod<uid>

The tree is below `cgroupRoot`, with upstream's paths and values, so that other tools find it and a node can
be handed over between kubelets. Containers' cgroups, one level deeper, belong to the runtime. Nothing outside
the tree is changed, except what `node_cgroups.py` is configured to enforce. After a restart, existing cgroups
are set again.

The burstable cgroup has the CPU shares of its pods' requests together, the best-effort cgroup the minimum, so
that pods without requests get only CPU time that no other pod uses.

`PodCgroup` is a pod's cgroup during a resize: current and desired settings, written one at a time in the
order of `cm/resize.py`. A limit that the pod no longer has stays: Kubernetes does not remove limits in place.

`resources_in_force` derives a pod's resources from its cgroup settings. The status of a running pod shows
them instead of the spec's. The two differ where the kernel counts otherwise: shares are coarser than
millicores, cgroup v1 has a number even without a limit, and resources that no cgroup limits
(`ephemeral-storage`) are omitted.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pykubelet.api import cpuset
from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cm.capacity import UNBOUNDED, overcommitment, unreserved
from pykubelet.cm.cgroups.driver import CgroupDriver, CgroupMetrics, CgroupWriteError
from pykubelet.cm.cgroups.node_cgroups import NodeAllocatableEnforcer, Record, no_record
from pykubelet.cm.cgroups.values import (
    UNLIMITED,
    CgroupName,
    CgroupValues,
    PodPolicy,
    cgroupfs_path,
    driver_path,
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
"""Parent cgroup of pods below `kubepods`, by QoS class."""
_ZERO = Quantity.from_units(0)
_LEAST_MEMORY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class QosPolicy:
    """Node settings that determine the QoS cgroups."""

    page_sizes: tuple[str, ...] = ()
    pod_level: bool = True
    memory_reserved: int | None = None
    """Percent of requested memory withheld from lower QoS classes (`qosReserved`, gate `QOSReserved`)."""
    allocatable_memory: int = 0
    """Bytes."""
    protect_memory: bool | None = None
    """Whether v2 protects requested memory from reclaim; None leaves the setting alone."""


@dataclass(frozen=True, slots=True)
class QosDemand:
    """QoS class and requests of a pod, in millicores and bytes."""

    qos: QOSClass
    milli_cpu: int
    memory: int


def demand_of(pod: Pod, *, pod_level: bool = True) -> QosDemand:
    """Return the QoS class and requests of a pod."""
    requests = pod_requests(pod, pod_level=pod_level)
    return QosDemand(
        qos_class(pod, pod_level=pod_level),
        requests.get("cpu", _ZERO).milli,
        int(requests.get("memory", _ZERO)),
    )


class Demands:
    """Demands of all pods by UID, with their sums by QoS class."""

    def __init__(self, demands: Mapping[str, QosDemand] | None = None) -> None:
        self._by_uid: dict[str, QosDemand] = {}
        self.milli_cpu: Counter[QOSClass] = Counter()
        """Total CPU requests of the pods of a class, in millicores."""
        self.memory: Counter[QOSClass] = Counter()
        """Total memory requests of the pods of a class, in bytes."""
        for uid, demand in (demands or {}).items():
            self.put(uid, demand)

    def put(self, uid: str, demand: QosDemand | None) -> QosDemand | None:
        """Set or remove the demand of a pod; return the previous one."""
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
        """Return whether these are exactly the demands by UID."""
        return self._by_uid == demands


def tier_values(demands: Demands, policy: QosPolicy) -> dict[QOSClass, CgroupValues]:
    """Return the settings of the QoS cgroups; those of `Guaranteed` are for `kubepods` itself."""
    cpu, memory = demands.milli_cpu, demands.memory
    burstable, best_effort = _memory_left(memory["Guaranteed"], memory["Burstable"], policy)
    minimum, low = _protection(memory["Guaranteed"], memory["Burstable"], policy)
    # Huge pages are unlimited in every QoS cgroup: each pod has its own limit, and the node its supply.
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
    # A remainder of 0 must not mean unlimited.
    return max(first, _LEAST_MEMORY), max(second, _LEAST_MEMORY)


def _protection(guaranteed: int, burstable: int, policy: QosPolicy) -> tuple[dict[str, str], dict[str, str]]:
    if policy.protect_memory is None:
        return {}, {}
    if not policy.protect_memory:
        return {"memory.min": "0"}, {"memory.low": "0"}
    # A parent must cover its children's protection, or theirs has no effect.
    return {"memory.min": str(guaranteed + burstable)}, {"memory.low": str(burstable)}


_MILLI = 10**6
_LEAST_LIMIT = MIN_QUOTA * 1000 // DEFAULT_PERIOD
"""Smallest CPU limit that the kernel supports, in millicores."""


def resources_in_force(
    pod: Pod, values: CgroupValues, *, unified: bool, pod_level: bool = True
) -> tuple[Resources, Resources]:
    """Return the limits and the requests of a pod whose cgroup has these settings."""
    limits, requests = dict[str, Quantity](), dict[str, Quantity]()
    if (pod_resources := pod.spec.resources) is not None:
        limits, requests = dict(pod_resources.limits), dict(pod_resources.requests)
    milli_request = -(-(values.shares or 0) * 1000 // SHARES_PER_CPU)
    if _exceeds_minimum(milli_request, requests, MIN_SHARES):
        requests["cpu"] = Quantity(milli_request * _MILLI)
    milli_limit = values.quota * 1000 // values.period if values.quota and values.quota > 0 else 0
    if milli_limit and _exceeds_minimum(milli_limit, limits, _LEAST_LIMIT):
        limits["cpu"] = Quantity(milli_limit * _MILLI)
    memory = pod_requests(pod, pod_level=pod_level).get("memory")
    if memory is not None:
        requests.setdefault("memory", memory)
    if values.memory:
        limits["memory"] = Quantity.from_units(round_down_to_pages(values.memory), "binary")
    elif not unified:
        limits["memory"] = Quantity.from_units(round_down_to_pages(2**63 - 1), "binary")
    return limits, requests


def round_down_to_pages(size: int) -> int:
    """Return a memory limit in bytes as the kernel applies it: rounded down to whole pages."""
    page = os.sysconf("SC_PAGE_SIZE")
    return size // page * page


def _exceeds_minimum(milli: int, spec_amounts: Resources, minimum: int) -> bool:
    """Return whether an amount is above the kernel's minimum, which stands for all smaller amounts."""
    known = spec_amounts.get("cpu")
    return milli > minimum or (known is not None and known.milli > minimum)


_NO_BOUND = 2**63 - 1


class PodCgroup:
    """Cgroup of a pod during a resize; all methods may raise OSError."""

    def __init__(
        self, groups: CgroupDriver, name: CgroupName, values: CgroupValues, *, unified: bool
    ) -> None:
        """Initialize with the cgroup's name and the settings for the allocated resources."""
        self._groups = groups
        self._name = name
        self._values = groups.effective_values(values)
        self._unified = unified

    def settings(self) -> CgroupValues:
        """Return the current CPU and memory settings."""
        return self._groups.files.read(self._name)

    def now(self) -> PodLimits:
        """Return the current settings as comparable numbers."""
        return _limits(self.settings())

    def desired(self, now: PodLimits) -> PodLimits:
        """Return the desired settings; what the pod does not specify stays unchanged."""
        shares = self._values.shares or now.shares
        if self._unified:
            # The weights of v2 are coarser; an equal weight is not a change.
            shares = shares_of_weight(weight_of_shares(shares))
        memory = round_down_to_pages(self._values.memory) if self._values.memory else now.memory
        return PodLimits(memory, self._values.quota or now.quota, shares)

    @property
    def period(self) -> int:
        """Microseconds over which the CPU quota is measured."""
        return self._values.period

    @property
    def memory_limit(self) -> int | None:
        """Desired memory limit in bytes, or None if the pod does not specify one."""
        return self._values.memory

    async def set(self, part: Part) -> None:
        """Write the desired value of one setting."""
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
        """Return the memory usage in bytes."""
        return self._groups.files.memory_usage(self._name)


def _limits(values: CgroupValues) -> PodLimits:
    return PodLimits(values.memory or _NO_BOUND, values.quota or UNLIMITED, values.shares or MIN_SHARES)


ALL_PODS = "kubepods"
LIST_SECONDS = 30.0
"""Seconds until the pods' cgroups are listed again without a change of their number."""
REWRITE_SECONDS = 60.0
"""Seconds until the QoS cgroups are written again without a change: other processes can write them too."""
_ONLINE = Path("/sys/devices/system/cpu/online")


class _Listing(NamedTuple):
    """Pods that had a cgroup at the last listing."""

    counts: list[int]
    """Number of links of each directory, in one hierarchy."""
    uids: frozenset[str]
    until: float


class PodCgroups:
    """Manager of pods' cgroups; it does nothing with `cgroupsPerQOS: false`."""

    def __init__(
        self,
        config: KubeletConfiguration,
        gates: FeatureGates,
        cgroups: Cgroups,
        capacity: Resources,
        page_sizes: tuple[str, ...] = (),
        metrics: CgroupMetrics | None = None,
        record: Record = no_record,
        owns_cpus: Callable[[str], bool] = lambda uid: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initialize with the node's settings, cgroups, capacity (`read_capacity`) and huge page sizes.

        `record` records events about the node's limits. Pods for whose UID `owns_cpus` returns true have
        exclusive CPUs and get no CPU quota, which would protect no other pod.
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
            allocatable_memory=self._allocatable_memory(config),
            protect_memory=tiered if protects else None,
        )
        self._created: dict[str, QOSClass] = {}
        """QoS class of each pod whose cgroup this process has created, by UID."""
        self._demands: Demands | None = None
        self._read: dict[str, tuple[Pod, QosDemand]] = {}
        self._up_to_date = False
        self._next_rewrite = 0.0
        self._owns_cpus = owns_cpus
        self._updating = asyncio.Lock()
        self._clock = clock
        self._listed: _Listing | None = None

    async def setup(self) -> None:
        """Create the tree and set the limit of all pods together. Raises CgroupWriteError with a remedy.

        Pods that already use more than the limit (the node was not drained before it was lowered) are not an
        error: `update_qos` retries until eviction has freed memory.
        """
        self.check_reservations(self._config)
        if not self._enabled:
            return
        self._check()
        await self._make_root()
        await self._make_tiers()
        await self._limits.enforce_reservations()

    def check_reservations(self, config: KubeletConfiguration) -> None:
        """Raise CgroupWriteError if more is reserved than the node has, or nothing that is enforced."""
        if problem := overcommitment(self._capacity, config):
            raise CgroupWriteError(errno.EINVAL, problem)
        if self._enabled:
            self._limits.check(config)

    def set_reservations(self, config: KubeletConfiguration) -> None:
        """Replace the reservations, which must have been checked; the next `update_qos` writes the limits."""
        self._config = config
        self._limits.set_config(config)
        self._tier_policy = replace(self._tier_policy, allocatable_memory=self._allocatable_memory(config))
        self._up_to_date = False

    async def ensure(self, pod: Pod) -> str:
        """Ensure that the pod's cgroup exists with its limits; return its name for the runtime, or "".

        Raises CgroupWriteError, which is an OSError.
        """
        if not self._enabled:
            return ""
        qos = qos_class(pod, pod_level=self._policy.pod_level)
        name = self._name(qos, pod.uid)
        if pod.uid not in self._created or not self._files.exists(name):
            await self._restore(name[:-1])
            self._listed = None
            await self._make(pod, name)
            self._created[pod.uid] = qos
            await self._update_shares(pod.uid, self._demand(pod))
        return runtime_parent(name, self._driver)

    def path(self, pod: Pod) -> str:
        """Return the path of the pod's cgroup below each hierarchy, or "" if pods have no cgroups.

        Raises CgroupWriteError for an invalid UID.
        """
        if not self._enabled:
            return ""
        qos = self._created.get(pod.uid) or qos_class(pod, pod_level=self._policy.pod_level)
        return driver_path(self._name(qos, pod.uid), self._driver)

    def tree_paths(self) -> tuple[str, ...]:
        """Return the paths of the cgroup of all pods and of the QoS cgroups, which exist without pods."""
        if not self._enabled:
            return ()
        return tuple(driver_path((*self._root, *tier), self._driver) for tier in TIERS.values())

    def exists(self, pod: Pod) -> bool:
        """Return whether the pod's cgroup exists with all controllers; True if pods have no cgroups."""
        if not self._enabled:
            return True
        return self._files.exists(self._name(qos_class(pod, pod_level=self._policy.pod_level), pod.uid))

    def in_force(self, pod: Pod, settings: CgroupValues | None = None) -> tuple[Resources, Resources] | None:
        """Return the limits and requests that the pod's cgroup enforces, or None if pods have no cgroups.

        `settings`: the settings read from the cgroup, if they may differ from the allocated resources.
        """
        if not self._enabled:
            return None
        values = settings or self._groups.effective_values(self._values(pod))
        return resources_in_force(
            pod, values, unified=self._cgroups.unified, pod_level=self._policy.pod_level
        )

    def group(self, pod: Pod) -> PodCgroup | None:
        """Return the pod's cgroup for a resize, or None if pods have no cgroups."""
        if not self._enabled:
            return None
        name = self._name(qos_class(pod, pod_level=self._policy.pod_level), pod.uid)
        return PodCgroup(self._groups, name, self._values(pod), unified=self._cgroups.unified)

    async def remove(self, uid: str) -> None:
        """Remove the pod's cgroup and kill processes inside. Raises CgroupWriteError.

        Works without a record of the pod: if its QoS class is unknown, all are tried.
        """
        if not self._enabled:
            return
        known = self._created.get(uid)
        with self._metrics.timed("destroy"):
            for qos in TIERS if known is None else (known,):
                await self._groups.remove(self._name(qos, uid))
        self._created.pop(uid, None)
        self._listed = None
        await self._update_shares(uid, None)

    def uids(self) -> AbstractSet[str]:
        """Return the UIDs of pods that have a cgroup, in any QoS class and hierarchy.

        Called every two seconds, and nearly always nothing has changed: the directories are listed again only
        after a change by this object, when the number of children differs, and every LIST_SECONDS.
        """
        if not self._enabled:
            return frozenset()
        tiers = [self._root + tier for tier in TIERS.values()]
        # Before the listing: a child that is created in between causes another listing.
        counts = [self._files.child_count(tier) for tier in tiers]
        now, listed = self._clock(), self._listed
        if listed is None or listed.counts != counts or now >= listed.until:
            directories = {directory for tier in tiers for directory in self._files.children(tier)}
            parts = {last_part(directory, self._driver) for directory in directories}
            uids = frozenset(uid for part in parts if (uid := uid_of_part(part)) is not None)
            self._listed = listed = _Listing(counts, uids, now + LIST_SECONDS)
        return listed.uids

    async def update_qos(self, pods: Iterable[Pod]) -> None:
        """Update the QoS cgroups for all pods that are to run here. Raises CgroupWriteError.

        To be called when the pod sources are synced, and often: between the calls `ensure` and `remove` keep
        the shares correct, and a call with the same pods writes nothing, except every REWRITE_SECONDS. While
        one call waits for systemd, others return immediately.
        """
        if not self._enabled or self._updating.locked():
            return
        async with self._updating:
            await self._update_qos(pods)

    async def _update_qos(self, pods: Iterable[Pod]) -> None:
        due = (now := asyncio.get_running_loop().time()) >= self._next_rewrite
        if due:
            self._next_rewrite = now + REWRITE_SECONDS
            await self._restore(self._root)
        await self._limits.retry(self._root)
        self._read = {pod.uid: (pod, self._demand(pod)) for pod in pods}
        found = {uid: demand for uid, (_, demand) in self._read.items()}
        if self._up_to_date and self._demands is not None and self._demands.equals(found) and not due:
            return
        self._demands = demands = Demands(found)
        self._up_to_date = True
        for qos, values in tier_values(demands, self._tier_policy).items():
            await self._write_tier(self._root + TIERS[qos], values)
        if self._tier_policy.protect_memory:
            self._metrics.protected(demands.memory["Guaranteed"], demands.memory["Burstable"])

    async def _make_root(self) -> None:
        await self._groups.make(self._root, CgroupValues(cpus=self._all_cpus()))
        await self._limits.limit_pods(self._root)

    async def _make_tiers(self) -> None:
        for qos, tier in tier_values(self._demands or Demands(), self._tier_policy).items():
            # The total requests are known when the pod sources are synced; until then the values set by
            # the previous kubelet process stay.
            known = self._demands is not None or qos == "BestEffort"
            first = CgroupValues(shares=tier.shares if known else None, huge_pages=tier.huge_pages)
            await self._groups.make(self._root + TIERS[qos], first)
        self._up_to_date = False

    async def _restore(self, above: CgroupName) -> None:
        """Recreate the parents of a pod's cgroup: another process may have removed them while empty.

        With the kernel's default of 1024 shares, BestEffort pods would weigh as much as a request of one CPU.
        """
        if self._files.exists(above):
            return
        log.info("Recreating removed cgroups of all pods", cgroup=cgroupfs_path(above))
        if not self._files.exists(self._root):
            await self._make_root()
        await self._make_tiers()

    async def _make(self, pod: Pod, name: CgroupName) -> None:
        try:
            await self._groups.make(name, self._values(pod))
        except CgroupWriteError as err:
            if err.errno not in (errno.EBUSY, errno.EINVAL) or not self._files.children(name):
                raise
            # Its containers have more than the pod's new limits: a resize shrinks them first.
            log.info("Left pod cgroup unchanged until resize", podUID=pod.uid, err=str(err))

    def _values(self, pod: Pod) -> CgroupValues:
        unbound = self._policy.quota and self._owns_cpus(pod.uid)
        return pod_values(pod, replace(self._policy, quota=False) if unbound else self._policy)

    def _name(self, qos: QOSClass, uid: str) -> CgroupName:
        try:
            return (*self._root, *TIERS[qos], pod_part(uid))
        except ValueError as err:
            raise CgroupWriteError(errno.EINVAL, str(err)) from err

    def _check(self) -> None:
        self._groups.check()
        if missing := self._cgroups.missing:
            raise CgroupWriteError(
                errno.ENOSYS,
                f"the cgroup controllers {', '.join(sorted(missing))} are missing: "
                "enable them on the kernel's command line, or set cgroupsPerQOS: false",
            )

    def _all_cpus(self) -> frozenset[int]:
        """Return all online CPUs if no CPU manager assigns them: systemd keeps a cpuset that it knows."""
        if not self._cgroups.unified or self._config.cpu_manager_policy != "none":
            return frozenset()
        return cpuset.parse(_ONLINE.read_text().strip())

    def _allocatable_memory(self, config: KubeletConfiguration) -> int:
        return int(unreserved(self._capacity, config).get("memory", _ZERO))

    def _demand(self, pod: Pod) -> QosDemand:
        known = self._read.get(pod.uid)
        if known is not None and known[0] is pod:
            return known[1]
        return demand_of(pod, pod_level=self._policy.pod_level)

    async def _update_shares(self, uid: str, demand: QosDemand | None) -> None:
        """Add, replace or remove one pod's requests in the burstable shares, once all pods are known."""
        if self._demands is None:
            return
        before = self._demands.put(uid, demand)
        if before == demand:
            return
        self._up_to_date = False
        if any(change is not None and change.qos == "Burstable" for change in (before, demand)):
            shares = tier_values(self._demands, self._tier_policy)["Burstable"].shares
            await self._groups.write(self._root + TIERS["Burstable"], CgroupValues(shares=shares))

    async def _write_tier(self, name: CgroupName, values: CgroupValues) -> None:
        try:
            await self._groups.make(name, values)
        except CgroupWriteError as err:
            if err.errno != errno.EBUSY or values.memory is None:
                self._up_to_date = False
                raise
            # Usage is above the limit: limit it to the current usage until the next rewrite.
            usage = max(values.memory, self._files.memory_usage(name))
            await self._groups.write(name, CgroupValues(memory=usage))


def _percent(reserved: dict[str, str]) -> int | None:
    text = reserved.get("memory")
    return None if text is None else int(text.removesuffix("%"))
