"""Settings of cgroups, computed from pods and the node, and names of cgroups. Pure functions.

The numbers are those of upstream kubelet v1.36, because two kubelets that take over a node from each other
must agree on the limits of its pods. cgroup v1 and v2 name the same limits differently; only `v1_writes` and
`v2_writes` know the names.

A cgroup name is a tuple of its parts, `("kubepods", "burstable", "pod4f…")`. The cgroupfs driver joins them
to a path. systemd requires one unit per level, whose name repeats those above it:
`/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod4f….slice`. A dash means one level deeper
there, so dashes inside a part become underscores, and parts must not contain underscores.
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
    declared_limit,
    pod_requests,
    qos_class,
    quota_of,
    shares_of,
)

UNLIMITED = -1
_ZERO = Quantity.from_units(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupValues:
    """Settings of a cgroup; None leaves a setting unchanged."""

    shares: int | None = None
    """CPU shares of v1; the weight of v2 is derived from them."""
    quota: int | None = None
    """Microseconds of CPU time per period; -1 is unlimited."""
    period: int = DEFAULT_PERIOD
    memory: int | None = None
    """Bytes."""
    pids: int | None = None
    huge_pages: Mapping[str, int] = field(default_factory=dict)
    """Bytes by page size as the kernel spells it (`2MB`)."""
    unified: Mapping[str, str] = field(default_factory=dict)
    """Files of v2 without a counterpart in v1, with their content."""
    cpus: frozenset[int] = frozenset()
    """Allowed CPUs, v2 only; empty leaves them unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPolicy:
    """Node settings that determine a pod's cgroup."""

    quota: bool = True
    """Whether CPU limits are enforced (`cpuCFSQuota`)."""
    period: int = DEFAULT_PERIOD
    """Microseconds (`cpuCFSQuotaPeriod`)."""
    pids: int = UNLIMITED
    """Maximum number of processes of a pod (`podPidsLimit`); unlimited if not positive."""
    page_sizes: tuple[str, ...] = ()
    """Huge page sizes of the host, as the kernel spells them."""
    pod_level: bool = True
    """Whether pod-level resources count: feature gate `PodLevelResources`."""
    protect_memory: bool = False
    """Whether v2 protects requested memory from reclaim: `TieredReservation`, feature gate `MemoryQoS`."""


class Write(NamedTuple):
    """A value for one file of a cgroup."""

    controller: str
    file: str
    text: str
    optional: bool = False
    """Whether older kernels lack the file."""


def pod_values(pod: Pod, policy: PodPolicy) -> CgroupValues:
    """Return the settings of a pod's cgroup."""
    requests = pod_requests(pod, pod_level=policy.pod_level)
    shares, quota = MIN_SHARES, None
    qos = qos_class(pod, pod_level=policy.pod_level)
    if qos != "BestEffort":
        shares = shares_of(requests.get("cpu", _ZERO).milli)
        if cpu := declared_limit(pod, "cpu", pod_level=policy.pod_level):
            quota = quota_of(cpu.milli, policy.period) if policy.quota else UNLIMITED
    memory_request = int(requests.get("memory", _ZERO))
    unified = {}
    if policy.protect_memory and memory_request:
        unified["memory.min" if qos == "Guaranteed" else "memory.low"] = str(memory_request)
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
    """Return the memory limit of a whole pod in bytes, or None if one of its containers has no limit."""
    if qos_class(pod, pod_level=pod_level) == "BestEffort":
        return None
    limit = declared_limit(pod, "memory", pod_level=pod_level)
    return int(limit) if limit else None


def node_values(amounts: Resources, page_sizes: tuple[str, ...], *, only_cpu: bool = False) -> CgroupValues:
    """Return the settings of a cgroup that may use these amounts in total, such as all pods.

    `only_cpu` omits resources that are not compressible.
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
    """Return the CPU weight of v2 (1 to 10000) for the CPU shares of v1 (2 to 262144)."""
    shares = max(MIN_SHARES, min(shares, MAX_SHARES))
    return 1 + (shares - MIN_SHARES) * 9999 // (MAX_SHARES - MIN_SHARES)


def shares_of_weight(weight: int) -> int:
    """Return the smallest CPU shares of v1 that convert to this weight of v2."""
    return MIN_SHARES + bisect_left(range(MIN_SHARES, MAX_SHARES + 1), weight, key=weight_of_shares)


def v1_writes(values: CgroupValues) -> Iterator[Write]:
    """Yield the writes for the v1 hierarchies, in order."""
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
    """Yield the writes for the unified hierarchy, in order."""
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


def _or_max(number: int) -> str:
    return str(number) if number > 0 else "max"


CgroupName = tuple[str, ...]
_SLICE = ".slice"
_POD = "pod"


def parse_path(path: str) -> CgroupName:
    """Parse a cgroupfs path; `/` and the empty string are the root."""
    return tuple(part for part in path.split("/") if part)


def cgroupfs_path(name: CgroupName) -> str:
    """Return the path of a cgroup with the cgroupfs driver: `/kubepods/burstable`."""
    return "/" + "/".join(name)


def systemd_path(name: CgroupName) -> str:
    """Return the path of a cgroup with the systemd driver: `/kubepods.slice/kubepods-burstable.slice`.

    Raises ValueError for a part that could not be parsed back.
    """
    for part in name:
        if not part or "/" in part or "_" in part:
            raise ValueError(f"{part!r} cannot be a part of a systemd slice: use letters, digits and dashes")
    parts = [part.replace("-", "_") for part in name]
    return "/" + "/".join("-".join(parts[: depth + 1]) + _SLICE for depth in range(len(parts)))


def parse_systemd_path(path: str) -> CgroupName:
    """Parse the path of a slice, or its unit name alone."""
    unit = path.rpartition("/")[2].removesuffix(_SLICE)
    return tuple(part.replace("_", "-") for part in unit.split("-")) if unit else ()


def driver_path(name: CgroupName, driver: str) -> str:
    """Return the path of a cgroup below each hierarchy."""
    return systemd_path(name) if driver == "systemd" else cgroupfs_path(name)


def runtime_parent(name: CgroupName, driver: str) -> str:
    """Return the cgroup parent of a sandbox for the runtime: a path, or the unit name of a slice."""
    return systemd_path(name).rpartition("/")[2] if driver == "systemd" else cgroupfs_path(name)


def last_part(directory: str, driver: str) -> str:
    """Return the last part of the cgroup name for a directory's name."""
    return (parse_systemd_path(directory) or ("",))[-1] if driver == "systemd" else directory


def pod_part(uid: str) -> str:
    """Return the last part of a pod's cgroup name. Raises ValueError for an invalid UID."""
    if not uid or "/" in uid or "\0" in uid or "\n" in uid:
        raise ValueError(f"{uid!r} cannot be a pod's uid")
    return _POD + uid


def uid_of_part(part: str) -> str | None:
    """Return the UID of the pod that a part belongs to, or None if it is not a pod's."""
    uid = part.removeprefix(_POD)
    return uid if uid and uid != part else None
