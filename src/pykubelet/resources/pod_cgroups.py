"""The tree that holds all pods: `kubepods`, its tiers, and a cgroup per pod.

    /kubepods                  all pods together: the machine without what is reserved
    ├─ pod<uid>                guaranteed pods
    ├─ burstable/pod<uid>
    └─ besteffort/pod<uid>

below `cgroupRoot`, at the paths and with the values of the reference, so that tools that look there
find what they expect and a node can be handed over between agents. Containers' own cgroups, one
level deeper, are the runtime's. Nothing outside of the tree is touched, but what `node_cgroups.py`
is asked to enforce.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from pykubelet.api import cpuset
from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.config.gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.host.cgroups import Cgroups
from pykubelet.logs import get_logger
from pykubelet.resources.capacity import overcommitment, unreserved
from pykubelet.resources.cgroup_driver import CgroupDriver
from pykubelet.resources.cgroup_files import CgroupError
from pykubelet.resources.cgroup_names import (
    CgroupName,
    cgroupfs_path,
    last_part,
    parse_path,
    pod_part,
    runtime_parent,
    uid_of_part,
)
from pykubelet.resources.cgroup_values import CgroupValues, PodPolicy, pod_values
from pykubelet.resources.in_force import resources_in_force
from pykubelet.resources.metrics import CgroupMetrics
from pykubelet.resources.node_cgroups import NodeLimits, Record, no_record
from pykubelet.resources.qos import QOSClass, qos_class
from pykubelet.resources.qos_cgroups import TIERS, Demand, Demands, TierPolicy, demand_of, tier_values
from pykubelet.resources.resize_cgroup import PodGroup

log = get_logger(__name__)

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
        self._limits = NodeLimits(config, self._groups, capacity, page_sizes, record, protect_memory=protects)
        self._policy = PodPolicy(
            quota=config.cpu_cfs_quota,
            period=config.cpu_cfs_quota_period // 1000,
            pids=config.pod_pids_limit,
            page_sizes=page_sizes,
            pod_level=pod_level,
            protect_memory=protects and tiered,
        )
        self._tier_policy = TierPolicy(
            page_sizes=page_sizes,
            pod_level=pod_level,
            memory_reserved=_percent(config.qos_reserved) if gates.enabled("QOSReserved") else None,
            allocatable_memory=int(unreserved(capacity, config).get("memory", Quantity.of(0))),
            protect_memory=tiered if protects else None,
        )
        self._made: dict[str, QOSClass] = {}
        """In which tier a pod's cgroup is, of pods that have one by us."""
        self._demands: Demands | None = None
        self._read: dict[str, tuple[Pod, Demand]] = {}
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

    def group(self, pod: Pod) -> PodGroup | None:
        """Give the pod's own cgroup, to be resized; None where pods have none."""
        if not self._enabled:
            return None
        name = self._name(qos_class(pod, pod_level=self._policy.pod_level), pod.uid)
        return PodGroup(self._groups, name, self._values(pod), unified=self._cgroups.unified)

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

    def _demand(self, pod: Pod) -> Demand:
        known = self._read.get(pod.uid)
        if known is not None and known[0] is pod:
            return known[1]
        return demand_of(pod, pod_level=self._policy.pod_level)

    async def _weigh(self, uid: str, demand: Demand | None) -> None:
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
