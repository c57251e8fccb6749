"""What all pods together may use, and what the system's own daemons may: `enforceNodeAllocatable`.

The limit of all pods keeps the machine alive for its daemons. Where it cannot be had yet, because pods
use more (the node was not drained before something was reserved), the node starts nevertheless and tries
again until there is room. The cgroups of the system and of Kubernetes' own daemons are somebody else's:
they must exist, and are touched only where the configuration says so; a node that cannot do what was
asked there does not start.

Both are told as events of the node, which people look for when a daemon was slowed down or killed.

Cgroups for what runs beside pods: the agent itself (`kubeletCgroups`), and all the rest (`systemCgroups`).

They are for accounting and for limits of somebody else's setting. Where a service manager has put the agent
into its cgroup already, naming that one changes nothing. Processes that sit in the root of the hierarchies
belong to nobody; they are moved to the system's cgroup again and again, because new ones keep coming. Kernel
threads and the first process stay where they are.
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
from pykubelet.cm.cgroups.driver import CgroupDriver, CgroupError, CgroupFiles
from pykubelet.cm.cgroups.values import CgroupName, CgroupValues, cgroupfs_path, node_values, parse_path
from pykubelet.config.types import KubeletConfiguration
from pykubelet.linux.cgroupfs import Cgroups, parse_own_cgroups
from pykubelet.logs import get_logger
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
Record = Callable[[Literal["Normal", "Warning"], str, str], None]
"""Takes an event about the node: its type, reason and message."""
RETRY_SECONDS = 60.0
"""How long to leave pods in peace that use too much: with each try the kernel takes all caches from them."""
ENFORCED, FAILED = "NodeAllocatableEnforced", "FailedNodeAllocatableEnforcement"


def no_record(kind: str, reason: str, message: str) -> None:
    """Tell nobody: a node without a cluster has no events of its own."""


class NodeAllocatableEnforcer:
    """Sets the limits of one node as a whole."""

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
        """Take the settings, the cgroups, what the machine has, and whoever hears of it.

        `protect_memory`: whether what is reserved is shielded from reclaim, too (v2, gate `MemoryQoS`).
        """
        self._config = config
        self._groups = groups
        self._pods = node_values(enforced(capacity, config), page_sizes)
        self._page_sizes = page_sizes
        self._record = record
        self._protect_memory = protect_memory
        self._unmet = False
        self._next = 0.0

    async def limit_pods(self, name: CgroupName) -> None:
        """Set what all pods may use together; raises CgroupError, but not when they use more already."""
        try:
            await self._groups.write(name, self._pods)
        except CgroupError as err:
            if not self._unmet:
                message = f"Failed to update Node Allocatable Limits {cgroupfs_path(name)}: {err}"
                self._record("Warning", FAILED, message)
            if err.errno != errno.EBUSY:
                raise
            if not self._unmet:
                log.error(err, "Pods use more than they may together, the limit will be tried again")
            self._unmet = True
            self._next = asyncio.get_running_loop().time() + RETRY_SECONDS
            return
        self._unmet = False
        self._record("Normal", ENFORCED, "Updated Node Allocatable limit across pods")

    async def retry(self, name: CgroupName) -> None:
        """Try again what pods were in the way of, once in a while; raises CgroupError."""
        if self._unmet and asyncio.get_running_loop().time() >= self._next:
            await self.limit_pods(name)

    async def enforce_reservations(self) -> None:
        """Limit the cgroups of the system and of Kubernetes' daemons, as configured; raises CgroupError."""
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
                except CgroupError as err:
                    what = f"{kind.title()} Reserved{' Compressible' if suffix else ''}"
                    self._record(
                        "Warning", FAILED, f'Failed to enforce {what} Cgroup Limits on "{path}": {err}'
                    )
                    raise
                self._record("Normal", ENFORCED, f"Updated limits on {kind} reserved cgroup {path}")

    async def _enforce(self, enforcement: str, path: str, amounts: dict[str, str], *, only_cpu: bool) -> None:
        if not amounts:
            field = "kubeReserved" if enforcement.startswith("kube") else "systemReserved"
            raise CgroupError(
                errno.EINVAL,
                f"enforceNodeAllocatable has {enforcement} but nothing is reserved: set {field}",
            )
        name = self._groups.parse(path)
        if not self._groups.files.exists(name):
            raise CgroupError(
                errno.ENOENT,
                f"enforceNodeAllocatable has {enforcement} but there is no cgroup {path}: make it "
                "in every hierarchy before the agent starts",
            )
        reserved = {resource: Quantity.parse(text) for resource, text in amounts.items()}
        values = node_values(reserved, self._page_sizes, only_cpu=only_cpu)
        if self._protect_memory and values.memory:
            values = dataclasses.replace(values, unified={"memory.min": str(values.memory)})
        await self._groups.write(name, values)


EVERY_SECONDS = 60.0


async def keep_daemons(cgroups: Cgroups, *, agent: str = "", system: str = "") -> None:
    """Have this process in one cgroup and processes that are nowhere in another; for ever."""
    async with asyncio.TaskGroup() as group:
        if agent:
            group.create_task(_keep(cgroups, agent, lambda: [os.getpid()]))
        if system:
            group.create_task(_keep(cgroups, system, lambda: strays(cgroups)))


def join(cgroups: Cgroups, path: str, pids: Iterable[int]) -> None:
    """Move processes into a cgroup, in every hierarchy; makes it if need be. Raises OSError.

    A process that has ended meanwhile, or is there already, is left alone. One that cannot be moved is no
    reason to leave the others.
    """
    name = parse_path(path)
    moving = [pid for pid in pids if cgroup_of(cgroups, pid) not in (None, cgroupfs_path(name))]
    if not moving:
        return
    CgroupFiles(cgroups).make(name, CgroupValues())
    log.v(3).info("Moving processes", cgroup=path, pids=len(moving))
    refused: OSError | None = None
    for folder in dict.fromkeys(cgroups.path(controller, path) for controller in cgroups.mounts):
        for pid in moving:
            try:
                (folder / "cgroup.procs").write_text(str(pid))
            except ProcessLookupError:
                continue
            except OSError as err:
                # Realtime processes, for one, cannot be moved everywhere; all others can.
                refused = OSError(err.errno, f"cannot move process {pid} to {folder}: {err.strerror}")
    if refused is not None:
        raise refused


def cgroup_of(cgroups: Cgroups, pid: int, proc: Path = Path("/proc")) -> str | None:
    """Give the cgroup in which a process is accounted for; None when there is no such process."""
    try:
        found = parse_own_cgroups((proc / str(pid) / "cgroup").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None
    return found.get("" if cgroups.unified else "cpu", "/")


def strays(cgroups: Cgroups, root: str = "/") -> set[int]:
    """Give the processes that sit in the root, without the kernel's own and the first one."""
    folder = cgroups.root if cgroups.unified else cgroups.path("cpu", root)
    pids = {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
    return {pid for pid in pids - {0, 1} if not _is_kernels(pid)}


async def _keep(cgroups: Cgroups, path: str, pids: Callable[[], Iterable[int]]) -> NoReturn:
    complaints = ErrorLogLimiter(log, "Failed to ensure state", cgroup=path)
    while True:
        now = asyncio.get_running_loop().time()
        try:
            join(cgroups, path, pids())
        except OSError as err:
            complaints.failed(err, now)
        else:
            complaints.succeeded(now)
        await asyncio.sleep(EVERY_SECONDS)


def _is_kernels(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process is one of the kernel's: it runs no program."""
    try:
        (proc / str(pid) / "exe").readlink()
    except OSError:
        return True
    return False
