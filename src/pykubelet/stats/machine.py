"""Facts about the host for `/metrics/cadvisor` (`machine_*`, `cadvisor_version_info`) and `/spec/`.

`MachineFacts` is read once: none of it changes while the kubelet runs. cAdvisor's series on CPU topology
(caches, siblings, memory and huge pages of NUMA nodes) are not among those that the kubelet exposes.
`read_rlimit` returns the limit on tasks (processes and threads) and their number, for the summary.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from pykubelet.api.stats import RlimitStats, stats_time
from pykubelet.linux.hardware import Filesystem, Hardware, read_hardware
from pykubelet.linux.host_info import BOOT_ID_FILES, MACHINE_ID_FILES, read_machine
from pykubelet.stats.samples import FilesystemUsage, MachineFacts
from pykubelet.stats.storage.filesystems import Filesystems

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
        nvm_memory_mode=hardware.nvm.memory_mode_capacity,
        nvm_app_direct_mode=hardware.nvm.app_direct_mode_capacity,
        nvm_power_budget=hardware.nvm.avg_power_budget,
    )


async def machine_info(filesystems: Filesystems) -> Hardware:
    """Return cAdvisor's MachineInfo of this host, for `/spec/`."""
    await filesystems.refresh(SPEC_MAX_AGE_SECONDS)
    found = [_filesystem(usage) for usage in filesystems.all()]
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return await asyncio.to_thread(read_hardware, now, filesystems=found)


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
