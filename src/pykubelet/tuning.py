"""What a node's agent does to the machine as a whole (settings, chains, cgroups of daemons) and hears of it.

With `protectKernelDefaults` the settings are only checked, and another value ends the start
(`preparing.check_machine`); without it they are set, as by the reference. A setting that cannot be written
(in a container, /proc/sys often is read-only) is a warning: pods run with it nevertheless.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from pykubelet.config.types import KubeletConfiguration
from pykubelet.host import kernel
from pykubelet.host.cgroups import detect_cgroups
from pykubelet.host.kube_chains import PROGRAMS, keep_chains
from pykubelet.host.oom_watch import kills, open_log
from pykubelet.logs import get_logger
from pykubelet.resources.daemon_cgroups import keep_daemons
from pykubelet.resources.node_cgroups import Record
from pykubelet.tasks import TaskScope

log = get_logger(__name__)


def set_kernel_defaults() -> None:
    """Set those kernel settings that differ from what a node's should be; says what could not be set."""
    for name, (value, found) in kernel.kernel_default_differences().items():
        log.v(2).info("Updating kernel flag", flag=name, expectedValue=value, actualValue=found)
        try:
            kernel.write_sysctl(name, value)
        except OSError as err:
            log.warning("Could not set a kernel setting; going on without", flag=name, value=value, err=err)


def start_daemon_cgroups(config: KubeletConfiguration, tasks: TaskScope) -> None:
    """Keep the agent, and processes that are nowhere, in the cgroups that were named for them."""
    agent, system = config.kubelet_cgroups, config.system_cgroups
    if agent or system:
        tasks.start(keep_daemons(detect_cgroups(), agent=agent, system=system), name="daemon-cgroups")


def start_util_chains(config: KubeletConfiguration, tasks: TaskScope) -> None:
    """Keep the chains in the packet filter that other components look for, unless told not to."""
    if config.make_iptables_util_chains:
        for program in PROGRAMS:
            tasks.start(keep_chains(program), name=program)


async def tell_kills(record: Record, open_log: Callable[[], int] = open_log) -> None:
    """Tell, as events of the node, of processes that were killed because the machine was out of memory.

    Kills within the limit of a cgroup are not the node's trouble: statuses of pods tell of those.
    """
    try:
        fd = open_log()
    except OSError as err:
        log.info("The kernel's log cannot be read: nobody will be told of SystemOOM", why=str(err))
        return
    try:
        async for kill in kills(fd):
            if kill.of_the_machine:
                log.v(1).info("Got sys oom event", process=kill.process, pid=kill.pid, cgroup=kill.cgroup)
                victim = f"victim process: {kill.process}, pid: {kill.pid}"
                record("Warning", "SystemOOM", f"System OOM encountered, {victim}")
    except OSError as err:
        log.error(err, "The kernel's log can no longer be read: nobody will be told of SystemOOM")
    finally:
        os.close(fd)
