"""The tree that holds all pods: `kubepods`, its tiers, and a cgroup per pod.

    /kubepods                  all pods together: the machine without what is reserved
    ├─ pod<uid>                guaranteed pods
    ├─ burstable/pod<uid>
    └─ besteffort/pod<uid>

below `cgroupRoot`, at the paths and with the values of the reference, so that tools that look there
find what they expect and a node can be handed over between agents. Containers' own cgroups, one
level deeper, are the runtime's. Nothing outside of the tree is touched, but the cgroups that
`systemReservedCgroup` and `kubeReservedCgroup` name, when enforcing them is asked for.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.config.gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.host.cgroups import Cgroups
from pykubelet.logs import get_logger
from pykubelet.resources.capacity import enforced, overcommitment, unreserved
from pykubelet.resources.cgroup_files import CgroupError, CgroupFiles
from pykubelet.resources.cgroup_names import (
    CgroupName,
    last_part,
    parse_path,
    pod_part,
    runtime_parent,
    uid_of_part,
)
from pykubelet.resources.cgroup_values import CgroupValues, PodPolicy, node_values, pod_values
from pykubelet.resources.in_force import resources_in_force
from pykubelet.resources.metrics import CgroupMetrics
from pykubelet.resources.qos import QOSClass, qos_class
from pykubelet.resources.qos_cgroups import TIERS, Demand, TierPolicy, demand_of, tier_values

log = get_logger(__name__)

ALL_PODS = "kubepods"


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
    ) -> None:
        """Take the node's settings, its cgroups, its capacity (`read_capacity`) and its huge page sizes."""
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
        self._files = CgroupFiles(cgroups, self._driver, self._metrics)
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
        self._made: set[str] = set()
        self._demands: dict[str, Demand] | None = None
        self._read: dict[str, tuple[Pod, Demand]] = {}
        self._settled = False
        self._unmet: CgroupValues | None = None

    async def setup(self) -> None:
        """Make the tree and set what all pods together may use; raises CgroupError with a remedy.

        Pods that use more than they may now (the node was not drained before the limit was
        lowered) do not fail it: `update_qos` tries again until eviction has made room.
        """
        if not self._enabled:
            return
        self._check()
        values = node_values(enforced(self._capacity, self._config), self._policy.page_sizes)
        self._files.make(self._root, CgroupValues())
        self._limit_all_pods(values)
        for qos, tier in tier_values((), self._tier_policy).items():
            # What pods want together is known when the sources have told of them; until then what an
            # earlier life of the agent has set is better than nothing.
            shares = tier.shares if qos == "BestEffort" else None
            self._files.make(self._root + TIERS[qos], CgroupValues(shares=shares, huge_pages=tier.huge_pages))
        self._enforce_reservations()

    async def ensure(self, pod: Pod) -> str:
        """Have the pod's cgroup with its limits; gives the name that the runtime takes, "" for none.

        Raises CgroupError, which is an OSError.
        """
        if not self._enabled:
            return ""
        name = self._name(qos_class(pod, pod_level=self._policy.pod_level), pod.uid)
        if pod.uid not in self._made or not self._files.exists(name):
            self._files.make(name, pod_values(pod, self._policy))
            self._made.add(pod.uid)
            self._weigh(pod.uid, self._demand(pod))
        return runtime_parent(name, self._driver)

    def in_force(self, pod: Pod) -> tuple[Resources, Resources] | None:
        """Give the limits and requests that the pod's cgroup enforces; None when it has none."""
        if not self._enabled:
            return None
        values = pod_values(pod, self._policy)
        return resources_in_force(
            pod, values, unified=self._cgroups.unified, pod_level=self._policy.pod_level
        )

    async def remove(self, uid: str) -> None:
        """Remove the pod's cgroups and kill what is still in them; raises CgroupError if that fails.

        Needs no memory of the pod: it looks in every tier.
        """
        if not self._enabled:
            return
        with self._metrics.timed("destroy"):
            for qos in TIERS:
                await self._files.remove(self._name(qos, uid))
        self._made.discard(uid)
        self._weigh(uid, None)

    def uids(self) -> set[str]:
        """Pods that have a cgroup, in whatever tier and hierarchy."""
        if not self._enabled:
            return set()
        folders = {folder for tier in TIERS.values() for folder in self._files.children(self._root + tier)}
        parts = {last_part(folder, self._driver) for folder in folders}
        return {uid for part in parts if (uid := uid_of_part(part)) is not None}

    def update_qos(self, pods: Iterable[Pod]) -> None:
        """Weigh the tiers by all pods that are to run here; raises CgroupError.

        To be called when the sources have told of their pods, and often: between the calls `ensure`
        and `remove` keep the weights right, and a call with the same pods costs nothing.
        """
        if not self._enabled:
            return
        if self._unmet is not None:
            self._limit_all_pods(self._unmet)
        self._read = {pod.uid: (pod, self._demand(pod)) for pod in pods}
        demands = {uid: demand for uid, (_, demand) in self._read.items()}
        if self._settled and demands == self._demands:
            return
        self._demands = demands
        self._settled = True
        for qos, values in tier_values(demands.values(), self._tier_policy).items():
            self._write_tier(self._root + TIERS[qos], values)

    def _name(self, qos: QOSClass, uid: str) -> CgroupName:
        try:
            return (*self._root, *TIERS[qos], pod_part(uid))
        except ValueError as err:
            raise CgroupError(errno.EINVAL, str(err)) from err

    def _check(self) -> None:
        if self._driver == "systemd":
            raise CgroupError(
                errno.ENOSYS,
                "cgroupDriver systemd is not supported: set it to cgroupfs, here and in the runtime "
                "(containerd: SystemdCgroup = false)",
            )
        if missing := self._cgroups.missing:
            raise CgroupError(
                errno.ENOSYS,
                f"the cgroup controllers {', '.join(sorted(missing))} are missing: "
                "enable them on the kernel's command line, or set cgroupsPerQOS: false",
            )
        if problem := overcommitment(self._capacity, self._config):
            raise CgroupError(errno.EINVAL, problem)

    def _limit_all_pods(self, values: CgroupValues) -> None:
        try:
            self._files.write(self._root, values)
            self._unmet = None
        except CgroupError as err:
            if err.errno != errno.EBUSY:
                raise
            if self._unmet is None:
                log.error(err, "Pods use more than they may together, the limit will be tried again")
            self._unmet = values

    def _enforce_reservations(self) -> None:
        kinds = (
            ("system-reserved", self._config.system_reserved_cgroup, self._config.system_reserved),
            ("kube-reserved", self._config.kube_reserved_cgroup, self._config.kube_reserved),
        )
        for kind, path, amounts in kinds:
            for enforcement, only_cpu in ((kind, False), (f"{kind}-compressible", True)):
                if enforcement not in self._config.enforce_node_allocatable:
                    continue
                name = parse_path(path)
                if not self._files.exists(name):
                    raise CgroupError(
                        errno.ENOENT,
                        f"enforceNodeAllocatable has {enforcement} but there is no cgroup {path}: make it "
                        "in every hierarchy before the agent starts",
                    )
                parsed = {resource: Quantity.parse(text) for resource, text in amounts.items()}
                self._files.write(name, node_values(parsed, self._policy.page_sizes, only_cpu=only_cpu))

    def _demand(self, pod: Pod) -> Demand:
        known = self._read.get(pod.uid)
        if known is not None and known[0] is pod:
            return known[1]
        return demand_of(pod, pod_level=self._policy.pod_level)

    def _weigh(self, uid: str, demand: Demand | None) -> None:
        """Take one pod in or out of the weights, once they are known at all."""
        if self._demands is None:
            return
        before = self._demands.pop(uid, None)
        if demand is not None:
            self._demands[uid] = demand
        if before == demand:
            return
        self._settled = False
        if any(change is not None and change.qos == "Burstable" for change in (before, demand)):
            shares = tier_values(self._demands.values(), self._tier_policy)["Burstable"].shares
            self._files.write(self._root + TIERS["Burstable"], CgroupValues(shares=shares))

    def _write_tier(self, name: CgroupName, values: CgroupValues) -> None:
        try:
            self._files.make(name, values)
        except CgroupError as err:
            self._settled = False
            if err.errno != errno.EBUSY or values.memory is None:
                raise
            # Already above its limit: at least it shall not grow.
            usage = max(values.memory, self._files.memory_usage(name))
            self._files.write(name, CgroupValues(memory=usage))


def _percent(reserved: dict[str, str]) -> int | None:
    text = reserved.get("memory")
    return None if text is None else int(text.removesuffix("%"))
