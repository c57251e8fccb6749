"""What a cgroup is set to: computed from pods and the node, then written in the kernel's words.

Everything here is a pure function. The numbers are those of the reference kubelet v1.36, because
two agents that share a node's history must agree on what its pods get; cgroup v1 and v2 name the
same limits differently, and `v1_writes` and `v2_writes` are the only places that know how.

Names of cgroups, in the two spellings of the two cgroup drivers.

A cgroup is known here by its parts, `("kubepods", "burstable", "pod4f…")`. The cgroupfs driver
writes them as a path. systemd wants one unit per level, whose name repeats those above it:
`/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod4f….slice`. There a dash means one
level deeper, so dashes inside of a part become underscores, and parts must have none of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pykubelet.api import cpuset
from pykubelet.api.meta import Resources
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.cm.capacity import page_limits
from pykubelet.cm.qos import (
    DEFAULT_PERIOD,
    MAX_SHARES,
    MIN_SHARES,
    has_pod_level_resources,
    pod_limits,
    pod_requests,
    qos_class,
    quota_of,
    shares_of,
)

UNLIMITED = -1
_NOTHING = Quantity.of(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupValues:
    """Settings of one cgroup; what is None is left as it is."""

    shares: int | None = None
    """Cpu shares of v1; v2's weight is derived from them."""
    quota: int | None = None
    """Microseconds of cpu per period; -1 is no limit."""
    period: int = DEFAULT_PERIOD
    memory: int | None = None
    """Bytes."""
    pids: int | None = None
    huge_pages: Mapping[str, int] = field(default_factory=dict)
    """Bytes by page size as the kernel writes it (`2MB`)."""
    unified: Mapping[str, str] = field(default_factory=dict)
    """Files of v2 that v1 has no counterpart of."""
    cpus: frozenset[int] = frozenset()
    """The cpus that may be used, on v2; none is left as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPolicy:
    """The node's settings that a pod's cgroup depends on."""

    quota: bool = True
    """Whether cpu limits are enforced (`cpuCFSQuota`)."""
    period: int = DEFAULT_PERIOD
    """Microseconds (`cpuCFSQuotaPeriod`)."""
    pids: int = UNLIMITED
    """Processes of one pod (`podPidsLimit`); not positive: no limit."""
    page_sizes: tuple[str, ...] = ()
    """The machine's sizes of huge pages, as the kernel writes them."""
    pod_level: bool = True
    """Whether resources of the whole pod count: the gate `PodLevelResources`."""
    protect_memory: bool = False
    """Whether v2 shields requested memory from reclaim: `TieredReservation` with the gate `MemoryQoS`."""


class Write(NamedTuple):
    """One value for one file of a cgroup."""

    controller: str
    file: str
    text: str
    optional: bool = False
    """Older kernels do not have the file."""


def pod_values(pod: Pod, policy: PodPolicy) -> CgroupValues:
    """Give the settings of a pod's cgroup."""
    requests = pod_requests(pod, pod_level=policy.pod_level)
    shares, quota = MIN_SHARES, None
    qos = qos_class(pod, pod_level=policy.pod_level)
    if qos != "BestEffort":
        shares = shares_of(requests.get("cpu", _NOTHING).milli)
        if cpu := _declared_limit(pod, "cpu", policy.pod_level):
            quota = quota_of(cpu.milli, policy.period) if policy.quota else UNLIMITED
    promised = int(requests.get("memory", _NOTHING))
    unified = {}
    if policy.protect_memory and promised:
        unified["memory.min" if qos == "Guaranteed" else "memory.low"] = str(promised)
    return CgroupValues(
        shares=shares,
        quota=quota,
        period=policy.period,
        memory=memory_limit(pod, pod_level=policy.pod_level),
        pids=policy.pids if policy.pids > 0 else None,
        huge_pages=page_limits(requests, policy.page_sizes),
        unified=unified,
    )


def memory_limit(pod: Pod, *, pod_level: bool = True) -> int | None:
    """Give the bytes that a pod as a whole may use; None when a container of it has no limit."""
    if qos_class(pod, pod_level=pod_level) == "BestEffort":
        return None
    limit = _declared_limit(pod, "memory", pod_level)
    return int(limit) if limit else None


def node_values(amounts: Resources, page_sizes: tuple[str, ...], *, only_cpu: bool = False) -> CgroupValues:
    """Give the settings of a cgroup that may use these amounts as a whole, such as all pods.

    `only_cpu` leaves out what cannot be given back by slowing down.
    """
    shares = shares_of(amounts["cpu"].milli) if "cpu" in amounts else None
    if only_cpu:
        return CgroupValues(shares=shares)
    return CgroupValues(
        shares=shares,
        memory=int(amounts["memory"]) if "memory" in amounts else None,
        pids=int(amounts["pid"]) if "pid" in amounts else None,
        huge_pages=page_limits(amounts, page_sizes),
    )


def weight_of_shares(shares: int) -> int:
    """Give v2's cpu weight (1 to 10000) for v1's shares (2 to 262144)."""
    shares = max(MIN_SHARES, min(shares, MAX_SHARES))
    return 1 + (shares - MIN_SHARES) * 9999 // (MAX_SHARES - MIN_SHARES)


def shares_of_weight(weight: int) -> int:
    """Give the fewest shares of v1 that make this weight of v2."""
    return MIN_SHARES + bisect_left(range(MIN_SHARES, MAX_SHARES + 1), weight, key=weight_of_shares)


def v1_writes(values: CgroupValues) -> Iterator[Write]:
    """Say what to write in the v1 hierarchies, in this order."""
    if values.shares:
        yield Write("cpu", "cpu.shares", str(values.shares))
    if values.quota:
        yield Write("cpu", "cpu.cfs_period_us", str(values.period))
        yield Write("cpu", "cpu.cfs_quota_us", str(values.quota))
    if values.memory:
        yield Write("memory", "memory.limit_in_bytes", str(values.memory))
    if values.pids is not None:
        yield Write("pids", "pids.max", _or_max(values.pids))
    for size, limit in values.huge_pages.items():
        yield Write("hugetlb", f"hugetlb.{size}.limit_in_bytes", str(limit))
        yield Write("hugetlb", f"hugetlb.{size}.rsvd.limit_in_bytes", str(limit), optional=True)


def v2_writes(values: CgroupValues) -> Iterator[Write]:
    """Say what to write in the unified hierarchy, in this order."""
    if values.shares:
        yield Write("cpu", "cpu.weight", str(weight_of_shares(values.shares)))
    if values.quota:
        yield Write("cpu", "cpu.max", f"{_or_max(values.quota)} {values.period}")
    if values.memory:
        yield Write("memory", "memory.max", _or_max(values.memory))
    if values.pids is not None:
        yield Write("pids", "pids.max", _or_max(values.pids))
    for size, limit in values.huge_pages.items():
        yield Write("hugetlb", f"hugetlb.{size}.max", str(limit))
        yield Write("hugetlb", f"hugetlb.{size}.rsvd.max", str(limit), optional=True)
    for file, text in values.unified.items():
        yield Write(file.partition(".")[0], file, text)
    if values.cpus:
        yield Write("cpuset", "cpuset.cpus", cpuset.format(values.cpus))


def _declared_limit(pod: Pod, resource: str, pod_level: bool) -> Quantity | None:
    """Give the pod's limit if the whole pod, or else each of its containers, has one.

    A sum over containers of which one is unbounded would bound that one too.
    """
    whole = pod.spec.resources if pod_level and has_pod_level_resources(pod) else None
    if whole is None or not whole.limits.get(resource, _NOTHING).nanos:
        parts = (*pod.spec.containers, *pod.spec.init_containers)
        if not all(part.resources.limits.get(resource, _NOTHING).nanos for part in parts):
            return None
    limit = pod_limits(pod, pod_level=pod_level).get(resource, _NOTHING)
    return limit if limit.nanos else None


def _or_max(number: int) -> str:
    return str(number) if number > 0 else "max"


CgroupName = tuple[str, ...]
_SLICE = ".slice"
_POD = "pod"


def parse_path(path: str) -> CgroupName:
    """Take a cgroupfs path apart; `/` and the empty text are the root."""
    return tuple(part for part in path.split("/") if part)


def cgroupfs_path(name: CgroupName) -> str:
    """Write a name as the cgroupfs driver does: `/kubepods/burstable`."""
    return "/" + "/".join(name)


def systemd_path(name: CgroupName) -> str:
    """Write a name as systemd lays it out: `/kubepods.slice/kubepods-burstable.slice`.

    Raises ValueError for a part that could not be read back.
    """
    for part in name:
        if not part or "/" in part or "_" in part:
            raise ValueError(f"{part!r} cannot be a part of a systemd slice: use letters, digits and dashes")
    parts = [part.replace("-", "_") for part in name]
    return "/" + "/".join("-".join(parts[: depth + 1]) + _SLICE for depth in range(len(parts)))


def parse_systemd_path(path: str) -> CgroupName:
    """Take a slice's path, or just its unit name, apart."""
    unit = path.rpartition("/")[2].removesuffix(_SLICE)
    return tuple(part.replace("_", "-") for part in unit.split("-")) if unit else ()


def driver_path(name: CgroupName, driver: str) -> str:
    """Give the path of a cgroup below each hierarchy."""
    return systemd_path(name) if driver == "systemd" else cgroupfs_path(name)


def runtime_parent(name: CgroupName, driver: str) -> str:
    """Give what the runtime takes as a sandbox's cgroup parent: a path, or the name of a slice."""
    return systemd_path(name).rpartition("/")[2] if driver == "systemd" else cgroupfs_path(name)


def last_part(folder: str, driver: str) -> str:
    """Give the last part of the cgroup that a folder, given by its own name, is for."""
    return (parse_systemd_path(folder) or ("",))[-1] if driver == "systemd" else folder


def pod_part(uid: str) -> str:
    """Give the last part of a pod's cgroup; raises ValueError for a uid that is no plain name."""
    if not uid or "/" in uid or "\0" in uid or "\n" in uid:
        raise ValueError(f"{uid!r} cannot be a pod's uid")
    return _POD + uid


def uid_of_part(part: str) -> str | None:
    """Give the pod that a part was made for; None when it is something else's."""
    uid = part.removeprefix(_POD)
    return uid if uid and uid != part else None
