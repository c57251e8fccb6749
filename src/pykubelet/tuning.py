"""What a node's agent changes of the machine: kernel settings, chains that others look for, daemons' cgroups.

With `protectKernelDefaults` the settings are only checked, and another value ends the start
(`preparing.check_machine`); without it they are set, as by the reference. A setting that cannot be written
(in a container, /proc/sys often is read-only) is a warning: pods run with it nevertheless.
"""

from __future__ import annotations

from pykubelet.config.types import KubeletConfiguration
from pykubelet.host import kernel
from pykubelet.host.cgroups import detect_cgroups
from pykubelet.host.kube_chains import PROGRAMS, keep_chains
from pykubelet.logs import get_logger
from pykubelet.resources.daemon_cgroups import keep_daemons
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
