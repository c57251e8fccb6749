"""Facts about the host for `/metrics/cadvisor` (`machine_*`, `cadvisor_version_info`) and `/spec/`.

`MachineFactsCache` reads `MachineFacts` again every five minutes, as cAdvisor does, because CPUs and memory
may be added to a running host. cAdvisor's series on CPU topology (caches, siblings, memory and huge pages of
NUMA nodes) are not among those that the kubelet exposes.
`read_rlimit` returns the limit on tasks (processes and threads) and their number, for the summary.
"""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pykubelet.api.stats import RlimitStats, stats_time
from pykubelet.linux.hardware import Filesystem, Hardware, read_hardware
from pykubelet.linux.host_info import BOOT_ID_FILES, MACHINE_ID_FILES, read_machine
from pykubelet.stats.cached_call import CachedCall
from pykubelet.stats.samples import FilesystemUsage, MachineFacts, MemoryModules
from pykubelet.stats.storage.filesystems import Filesystems
from pykubelet.util.tasks import TaskScope

FACTS_MAX_AGE_SECONDS = 300.0
"""Seconds after which the facts are read again; cAdvisor's value."""
SPEC_MAX_AGE_SECONDS = 10.0
"""Seconds for which the sizes of file systems in `/spec/` are reused."""


def read_machine_facts(
    machine_id_files: str = MACHINE_ID_FILES, boot_id_files: str = BOOT_ID_FILES, root: Path = Path("/")
) -> MachineFacts:
    """Read the facts; the files are those of `--machine-id-file` and `--boot-id-file`. Blocks briefly."""
    hardware = read_hardware("", machine_id_files, boot_id_files, root)
    identity = read_machine(machine_id_files, boot_id_files, root)
    return MachineFacts(
        machine_id=hardware.machine_id,
        system_uuid=hardware.system_uuid,
        boot_id=hardware.boot_id,
        kernel_version=identity.kernel,
        os_version=identity.os_image,
        cores=hardware.num_cores,
        physical_cores=hardware.num_physical_cores,
        sockets=hardware.num_sockets,
        books=hardware.num_books or 0,
        drawers=hardware.num_drawers or 0,
        memory=hardware.memory_capacity,
        swap=hardware.swap_capacity,
        modules=tuple(
            MemoryModules(type=kind, capacity=found.capacity, count=found.dimm_count)
            for kind, found in sorted(hardware.memory_by_type.items())
        ),
        nvm_memory_mode=hardware.nvm.memory_mode_capacity,
        nvm_app_direct_mode=hardware.nvm.app_direct_mode_capacity,
        nvm_power_budget=hardware.nvm.avg_power_budget,
    )


class MachineFactsCache:
    """The facts, read again in a thread when they are older than `FACTS_MAX_AGE_SECONDS`.

    Until the new ones are read, the previous ones are returned.
    """

    def __init__(
        self,
        tasks: TaskScope,
        machine_id_files: str = MACHINE_ID_FILES,
        boot_id_files: str = BOOT_ID_FILES,
        root: Path = Path("/"),
    ) -> None:
        """Read the facts; the files are those of `--machine-id-file` and `--boot-id-file`. Blocks briefly."""
        self._read = partial(read_machine_facts, machine_id_files, boot_id_files, root)
        self._initial = self._read()
        self._call: CachedCall[MachineFacts] = CachedCall(
            "machine-facts",
            self._read_in_thread,
            tasks,
            interval=FACTS_MAX_AGE_SECONDS,
            wait=0.0,
            max_age=math.inf,
            errors=(OSError,),
        )

    def latest(self) -> MachineFacts:
        """Return the latest facts without waiting, and read them again if that is due."""
        self._call.refresh()
        return self._call.latest() or self._initial

    async def _read_in_thread(self) -> MachineFacts:
        return await asyncio.to_thread(self._read)


async def machine_info(
    filesystems: Filesystems,
    machine_id_files: str = MACHINE_ID_FILES,
    boot_id_files: str = BOOT_ID_FILES,
) -> Hardware:
    """Return cAdvisor's MachineInfo of this host, for `/spec/`; the files are those of the flags."""
    await filesystems.refresh(SPEC_MAX_AGE_SECONDS)
    found = [_filesystem(usage) for usage in filesystems.all()]
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return await asyncio.to_thread(read_hardware, now, machine_id_files, boot_id_files, filesystems=found)


def _filesystem(usage: FilesystemUsage) -> Filesystem:
    return Filesystem(
        device=usage.device,
        capacity=usage.capacity,
        type="vfs",  # cAdvisor's name for statvfs(2)
        inodes=usage.inodes or 0,
        has_inodes=usage.inodes is not None,
    )


def read_rlimit(now: float, proc: Path = Path("/proc")) -> RlimitStats:
    """Return the smaller of the kernel's two limits and the number of tasks; what cannot be read is None.

    Takes about 50 microseconds.
    """
    limits = [_number(proc / "sys/kernel" / name) for name in ("pid_max", "threads-max")]
    return RlimitStats(
        time=stats_time(now),
        maxpid=min((limit for limit in limits if limit is not None), default=None),
        curproc=_tasks(proc),
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return None


def _tasks(proc: Path) -> int | None:
    try:
        # "0.20 0.18 0.12 1/80 11206": runnable and all tasks
        return int((proc / "loadavg").read_bytes().split()[3].partition(b"/")[2])
    except (OSError, ValueError, IndexError):
        return None
