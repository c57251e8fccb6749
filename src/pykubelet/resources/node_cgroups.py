"""What all pods together may use, and what the system's own daemons may: `enforceNodeAllocatable`.

The limit of all pods keeps the machine alive for its daemons. Where it cannot be had yet, because pods
use more (the node was not drained before something was reserved), the node starts nevertheless and tries
again until there is room. The cgroups of the system and of Kubernetes' own daemons are somebody else's:
they must exist, and are touched only where the configuration says so; a node that cannot do what was
asked there does not start.

Both are told as events of the node, which people look for when a daemon was slowed down or killed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from collections.abc import Callable
from typing import Literal

from pykubelet.api.meta import Resources
from pykubelet.api.quantity import Quantity
from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs import get_logger
from pykubelet.resources.capacity import enforced
from pykubelet.resources.cgroup_driver import CgroupDriver
from pykubelet.resources.cgroup_files import CgroupError
from pykubelet.resources.cgroup_names import CgroupName, cgroupfs_path
from pykubelet.resources.cgroup_values import node_values

log = get_logger(__name__)

Record = Callable[[Literal["Normal", "Warning"], str, str], None]
"""Takes an event about the node: its type, reason and message."""

RETRY_SECONDS = 60.0
"""How long to leave pods in peace that use too much: with each try the kernel takes all caches from them."""
ENFORCED, FAILED = "NodeAllocatableEnforced", "FailedNodeAllocatableEnforcement"


def no_record(kind: str, reason: str, message: str) -> None:
    """Tell nobody: a node without a cluster has no events of its own."""


class NodeLimits:
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
