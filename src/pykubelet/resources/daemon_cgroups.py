"""Cgroups for what runs beside pods: the agent itself (`kubeletCgroups`), and all the rest (`systemCgroups`).

They are for accounting and for limits of somebody else's setting. Where a service manager has put the agent
into its cgroup already, naming that one changes nothing. Processes that sit in the root of the hierarchies
belong to nobody; they are moved to the system's cgroup again and again, because new ones keep coming. Kernel
threads and the first process stay where they are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from pykubelet.host.cgroups import Cgroups, parse_own_cgroups
from pykubelet.kube.retrying import Complaints
from pykubelet.logs import get_logger
from pykubelet.resources.cgroup_files import CgroupFiles
from pykubelet.resources.cgroup_names import cgroupfs_path, parse_path
from pykubelet.resources.cgroup_values import CgroupValues

log = get_logger(__name__)

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
    complaints = Complaints(log, "Failed to ensure state", cgroup=path)
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
