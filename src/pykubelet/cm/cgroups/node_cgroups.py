"""Node-level cgroups: `enforceNodeAllocatable`, `kubeletCgroups` and `systemCgroups`.

`NodeAllocatableEnforcer` limits all pods together, so that the node's daemons keep their resources. If pods
already use more (the node was not drained before resources were reserved), the node starts nevertheless and
retries until the limit can be set. The cgroups of the system and of Kubernetes' daemons are not the
kubelet's: they must exist, and are set only where the configuration requires it; if that fails, the node does
not start. Both outcomes are events of the node, which explain why a daemon was throttled or killed.

`keep_daemons` moves the kubelet to `kubeletCgroups`, and the processes in the root cgroup to `systemCgroups`.
These cgroups are for accounting and for limits set by other tools. Nothing changes if a service manager has
already put the kubelet into the named cgroup. New processes keep appearing in the root cgroup, so they are
moved every MOVE_INTERVAL_SECONDS; kernel threads and PID 1 stay there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NoReturn

from pykubelet.api.meta import Resources
from pykubelet.api.quantity import Quantity
from pykubelet.cm.capacity import enforced
from pykubelet.cm.cgroups.driver import CgroupDriver, CgroupFiles, CgroupWriteError
from pykubelet.cm.cgroups.values import CgroupName, CgroupValues, cgroupfs_path, node_values, parse_path
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux.cgroupfs import Cgroups, parse_own_cgroups
from pykubelet.logs import get_logger
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
Record = Callable[[Literal["Normal", "Warning"], str, str], None]
"""Callback that records an event about the node: type, reason and message."""
RETRY_SECONDS = 60.0
"""Seconds until a limit below the pods' usage is retried: each attempt reclaims all their page cache."""
ENFORCED, FAILED = "NodeAllocatableEnforced", "FailedNodeAllocatableEnforcement"


def no_record(kind: str, reason: str, message: str) -> None:
    """Discard the event: a node without a cluster has no events."""


class NodeAllocatableEnforcer:
    """Enforcer of the node's limits: all pods together, and reserved cgroups."""

    def __init__(
        self,
        config: KubeletConfiguration,
        groups: CgroupDriver,
        capacity: Resources,
        page_sizes: tuple[str, ...],
        record: Record = no_record,
        *,
        protect_memory: bool = False,
    ) -> None:
        """Initialize with the configuration, the cgroup driver, the capacity and the event recorder.

        `protect_memory`: whether reserved memory is also protected from reclaim (v2, feature gate
        `MemoryQoS`).
        """
        self._config = config
        self._groups = groups
        self._capacity = capacity
        self._pods = node_values(enforced(capacity, config), page_sizes)
        self._page_sizes = page_sizes
        self._record = record
        self._protect_memory = protect_memory
        self._unmet = False
        self._pods_due = self._reservations_due = False
        self._next = 0.0

    def check(self, config: KubeletConfiguration) -> None:
        """Raise CgroupWriteError if an enforced reservation is empty."""
        for suffix in ("", "-compressible"):
            for kind, amounts in (("system", config.system_reserved), ("kube", config.kube_reserved)):
                enforcement = f"{kind}-reserved{suffix}"
                if enforcement in config.enforce_node_allocatable and not amounts:
                    raise _nothing_reserved(enforcement)

    def set_config(self, config: KubeletConfiguration) -> None:
        """Replace the reservations; the next `retry` writes the limits."""
        self._config = config
        self._pods = node_values(enforced(self._capacity, config), self._page_sizes)
        self._unmet, self._pods_due, self._reservations_due = False, True, True
        self._next = 0.0

    async def limit_pods(self, name: CgroupName) -> None:
        """Set the limit of all pods together. Raises CgroupWriteError, except if they already use more."""
        try:
            await self._groups.write(name, self._pods)
        except CgroupWriteError as err:
            if not self._unmet:
                message = f"Failed to update Node Allocatable Limits {cgroupfs_path(name)}: {err}"
                self._record("Warning", FAILED, message)
            if err.errno != errno.EBUSY:
                raise
            if not self._unmet:
                log.error(err, "Failed to set limit of all pods below their usage, will retry")
            self._unmet, self._pods_due = True, False
            self._next = asyncio.get_running_loop().time() + RETRY_SECONDS
            return
        self._unmet = self._pods_due = False
        self._record("Normal", ENFORCED, "Updated Node Allocatable limit across pods")

    async def retry(self, name: CgroupName) -> None:
        """Write limits that could not be set before or have changed, at most every RETRY_SECONDS.

        Raises CgroupWriteError.
        """
        now = asyncio.get_running_loop().time()
        if not (self._unmet or self._pods_due or self._reservations_due) or now < self._next:
            return
        self._next = now + RETRY_SECONDS
        if self._unmet or self._pods_due:
            await self.limit_pods(name)
        if self._reservations_due:
            await self.enforce_reservations()
            self._reservations_due = False

    async def enforce_reservations(self) -> None:
        """Limit the cgroups of the system and of Kubernetes' daemons as configured.

        Raises CgroupWriteError.
        """
        config = self._config
        kinds = (
            ("system", config.system_reserved_cgroup, config.system_reserved),
            ("kube", config.kube_reserved_cgroup, config.kube_reserved),
        )
        for suffix in ("", "-compressible"):
            for kind, path, amounts in kinds:
                enforcement = f"{kind}-reserved{suffix}"
                if enforcement not in config.enforce_node_allocatable:
                    continue
                try:
                    await self._enforce(enforcement, path, amounts, only_cpu=bool(suffix))
                except CgroupWriteError as err:
                    what = f"{kind.title()} Reserved{' Compressible' if suffix else ''}"
                    self._record(
                        "Warning", FAILED, f'Failed to enforce {what} Cgroup Limits on "{path}": {err}'
                    )
                    raise
                self._record("Normal", ENFORCED, f"Updated limits on {kind} reserved cgroup {path}")

    async def _enforce(self, enforcement: str, path: str, amounts: dict[str, str], *, only_cpu: bool) -> None:
        if not amounts:
            raise _nothing_reserved(enforcement)
        name = self._groups.parse(path)
        if not self._groups.files.exists(name):
            raise CgroupWriteError(
                errno.ENOENT,
                f"enforceNodeAllocatable has {enforcement} but there is no cgroup {path}: make it "
                "in every hierarchy before the agent starts",
            )
        reserved = {resource: Quantity.parse(text) for resource, text in amounts.items()}
        values = node_values(reserved, self._page_sizes, only_cpu=only_cpu)
        if self._protect_memory and values.memory:
            values = dataclasses.replace(values, unified={"memory.min": str(values.memory)})
        await self._groups.write(name, values)


def _nothing_reserved(enforcement: str) -> CgroupWriteError:
    field = "kubeReserved" if enforcement.startswith("kube") else "systemReserved"
    return CgroupWriteError(
        errno.EINVAL, f"enforceNodeAllocatable has {enforcement} but nothing is reserved: set {field}"
    )


MOVE_INTERVAL_SECONDS = 60.0


async def keep_daemons(cgroups: Cgroups, *, agent: str = "", system: str = "") -> None:
    """Keep this process in one cgroup and processes of the root cgroup in another, until cancelled."""
    async with asyncio.TaskGroup() as group:
        if agent:
            group.create_task(_keep(cgroups, agent, lambda: [os.getpid()]))
        if system:
            group.create_task(_keep(cgroups, system, lambda: root_cgroup_processes(cgroups)))


def join(cgroups: Cgroups, path: str, pids: Iterable[int]) -> None:
    """Move processes into a cgroup in every hierarchy, creating it if needed. Raises OSError.

    Processes that have exited, or are already there, are skipped. If one cannot be moved, the others are
    moved nevertheless.
    """
    name = parse_path(path)
    moving = [pid for pid in pids if cgroup_of(cgroups, pid) not in (None, cgroupfs_path(name))]
    if not moving:
        return
    CgroupFiles(cgroups).make(name, CgroupValues())
    log.v(3).info("Moving processes", cgroup=path, pids=len(moving))
    failure: OSError | None = None
    for directory in dict.fromkeys(cgroups.path(controller, path) for controller in cgroups.mounts):
        for pid in moving:
            try:
                (directory / "cgroup.procs").write_text(str(pid))
            except ProcessLookupError:
                continue
            except OSError as err:
                # Realtime processes, for example, cannot be moved to every cgroup.
                failure = OSError(err.errno, f"cannot move process {pid} to {directory}: {err.strerror}")
    if failure is not None:
        raise failure


def cgroup_of(cgroups: Cgroups, pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return the cgroup in which a process is accounted, or None if the process does not exist."""
    try:
        found = parse_own_cgroups((proc / str(pid) / "cgroup").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None
    return found.get("" if cgroups.unified else "cpu", "/")


def root_cgroup_processes(cgroups: Cgroups, root: str = "/") -> set[int]:
    """Return the processes in the root cgroup, without kernel threads and PID 1."""
    directory = cgroups.root if cgroups.unified else cgroups.path("cpu", root)
    pids = {int(pid) for pid in (directory / "cgroup.procs").read_text().split()}
    return {pid for pid in pids - {0, 1} if not _is_kernel_thread(pid)}


async def _keep(cgroups: Cgroups, path: str, pids: Callable[[], Iterable[int]]) -> NoReturn:
    error_log = ErrorLogLimiter(log, "Failed to move processes into cgroup, will retry", cgroup=path)
    while True:
        now = asyncio.get_running_loop().time()
        try:
            join(cgroups, path, pids())
        except OSError as err:
            error_log.failed(err, now)
        else:
            error_log.succeeded(now)
        await asyncio.sleep(MOVE_INTERVAL_SECONDS)


def _is_kernel_thread(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether a process is a kernel thread: it has no executable."""
    try:
        (proc / str(pid) / "exe").readlink()
    except OSError:
        return True
    return False
