"""Checks and setup of the host before any pod runs: cgroups, kernel settings, iptables, OOM score.

A host on which the kubelet cannot work ends the start with one line that has the cause and the remedy;
otherwise a pod's start would fail later, far from the cause. A limit that cannot be raised is a warning.

With `protectKernelDefaults` kernel settings are only checked, and another value ends the start
(`check_machine`); without it they are set, as upstream does. A setting that cannot be written (in a
container, /proc/sys is often read-only) is a warning, because pods run nevertheless.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from pykubelet.api import cpuset
from pykubelet.cm.capacity import read_capacity, read_page_sizes, storage_capacity
from pykubelet.cm.cgroups.driver import CgroupMetrics, CgroupWriteError
from pykubelet.cm.cgroups.node_cgroups import Record, keep_daemons, no_record
from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.cm.resize import AllocationState, open_allocation_state
from pykubelet.cm.topology.hints import PolicyError
from pykubelet.config.errors import ConfigError
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validation.validate import validate_machine
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.cri.runtime_pb2 import CGROUPFS, SYSTEMD, RuntimeConfigResponse
from pykubelet.kuberuntime.configuration.user_namespaces import UNIT, UserNamespaceRange, read_id_space
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.linux import cgroupfs as cgroups
from pykubelet.linux import kernel
from pykubelet.linux import kernel as swap
from pykubelet.linux import mounts as propagation
from pykubelet.linux import process_limits as oom
from pykubelet.linux import process_limits as rlimits
from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.linux.iptables import PROGRAMS, keep_chains
from pykubelet.linux.kernel import supports_noswap
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError, Unimplemented
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
_DRIVERS = {SYSTEMD: "systemd", CGROUPFS: "cgroupfs"}
_RUNTIME_TRIES = 3
_RUNTIME_PAUSE = 2.0
_ON_DISK = (
    "The tmpfs noswap option is not supported. Memory-backed volumes (e.g. secrets, emptyDirs, etc.) "
    "might be swapped to disk and should no longer be considered secure."
)


class StartupError(Exception):
    """Raised when the kubelet cannot start on this host; the text is one line with cause and remedy."""


def check_machine(config: KubeletConfiguration) -> None:
    """Raise ConfigError or StartupError when the configuration does not fit this host."""
    try:
        found = cgroups.detect_cgroups()
        online = cpuset.parse(Path("/sys/devices/system/cpu/online").read_text().strip())
    except OSError as err:
        raise StartupError(
            f"the machine does not show its cgroups and CPUs: {err}: mount /proc and /sys"
        ) from err
    log.info("Detected cgroups", mode=found.mode.value, driver=config.cgroup_driver)
    if problems := validate_machine(config, cgroup_v2=found.unified, online_cpus=online):
        raise ConfigError(problems)
    if not found.unified:
        log.warning("cgroup v1 is in maintenance mode: plan to move this node to cgroup v2")
    elif not (found.root / "cpu.stat").exists():
        log.warning("cgroup v2 is incomplete in this kernel: plan to move this node to 5.8 or later")
    differing = kernel.kernel_default_differences()
    if differing and config.protect_kernel_defaults:
        settings = " ".join(f"{name.replace('/', '.')}={value}" for name, (value, _) in differing.items())
        raise StartupError(
            f"kernel settings differ and protectKernelDefaults is set: run `sysctl -w {settings}`"
        )
    problem = swap.swap_problem(swap.swap_areas())
    if problem and config.fail_swap_on:
        raise StartupError(problem)


def adjust_process(config: KubeletConfiguration) -> None:
    """Set the OOM score and the open files limit of this process; log what cannot be set."""
    try:
        oom.set_oom_score(config.oom_score_adj)
    except OSError as err:
        log.warning("Failed to set the OOM score", score=config.oom_score_adj, err=err)
    limit = rlimits.raise_open_files(config.max_open_files)
    if not limit.reached:
        log.warning("Failed to raise the open files limit", requested=limit.configured, limit=limit.soft)


async def prepare_cgroups(
    config: KubeletConfiguration,
    gates: FeatureGates,
    root: Path,
    registry: CollectorRegistry,
    owns_cpus: Callable[[str], bool],
    record: Record = no_record,
) -> PodCgroups:
    """Ensure that the cgroup tree of all pods exists. Raises StartupError.

    `owns_cpus` returns whether the pod with a UID has exclusive CPUs; `record` records events about the node.
    """
    found = cgroups.detect_cgroups()
    capacity = read_capacity()
    if config.local_storage_capacity_isolation:
        capacity |= storage_capacity(root)
    metrics = CgroupMetrics(registry, unified=found.unified, memory_qos=gates.enabled("MemoryQoS"))
    pod_cgroups = PodCgroups(config, gates, found, capacity, read_page_sizes(), metrics, record, owns_cpus)
    try:
        await pod_cgroups.setup()
    except CgroupWriteError as err:
        raise StartupError(str(err)) from err
    if not found.unified:
        record("Warning", "CgroupV1", "cgroup v1 detected. It is deprecated: please migrate to cgroup v2")
    await warn_of_swap(root, record)
    return pod_cgroups


async def warn_of_swap(root: Path, record: Record) -> None:
    """Record an event when memory-backed volumes may be swapped to disk and tmpfs has no noswap option."""
    if swap.swap_areas() and not await asyncio.to_thread(supports_noswap, root):
        record("Warning", "PossibleMemoryBackedVolumesOnDisk", _ON_DISK)


async def take_cgroup_driver(
    cri: RuntimeConnection, config: KubeletConfiguration, gates: FeatureGates
) -> None:
    """Use the cgroup driver that the runtime reports: with two different drivers pods could not be managed.

    Raises StartupError when a runtime that supports RuntimeConfig fails to report it.
    """
    if not gates.enabled("KubeletCgroupDriverFromCRI"):
        return
    try:
        answer = await _runtime_config(cri)
    except Unimplemented:
        log.info("Container runtime does not report its cgroup driver, using the configured one")
        return
    except CriError as err:
        raise StartupError(f"cannot query the container runtime for its cgroup driver: {err}") from err
    if not answer.HasField("linux"):
        # An unset field reads as the first of the drivers.
        return
    driver = _DRIVERS.get(answer.linux.cgroup_driver)
    if driver is None:
        raise StartupError(
            f"the container runtime has an unknown cgroup driver ({answer.linux.cgroup_driver}): "
            "set it to systemd or cgroupfs"
        )
    if driver != config.cgroup_driver:
        log.info("Using the runtime's cgroup driver", driver=driver, configured=config.cgroup_driver)
        config.cgroup_driver = driver


async def _runtime_config(cri: RuntimeConnection) -> RuntimeConfigResponse:
    """Request the runtime's configuration, with retries: a runtime that just started may not respond."""
    for _ in range(_RUNTIME_TRIES - 1):
        try:
            return await cri.runtime.runtime_config()
        except Unimplemented:
            raise
        except CriError as err:
            log.error(err, "Failed to get the cgroup driver from the container runtime, retrying")
            await asyncio.sleep(_RUNTIME_PAUSE)
    return await cri.runtime.runtime_config()


def prepare_root(root: Path, stack: contextlib.AsyncExitStack) -> None:
    """Create the root directory with shared mount propagation; the exit stack reverts it.

    Raises StartupError when it cannot be created.
    """
    try:
        root.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as err:
        raise StartupError(
            f"cannot create the root directory {root}: {err.strerror or err}: "
            "free some space there, or choose another --root-dir"
        ) from err

    def take_back() -> None:
        # Running containers keep the mounts that they share.
        if not PodDirs(root).uids():
            propagation.unshare_mounts(root)

    try:
        if propagation.share_mounts(root):
            log.v(2).info("Bind-mounted the root directory with shared mount propagation", path=root)
            stack.callback(take_back)
    except OSError as err:
        log.warning(
            "Failed to set up shared mount propagation, volumes with mountPropagation do not work",
            path=root,
            err=err,
        )


def read_allocation_state(root: Path) -> AllocationState:
    """Open the checkpoints of allocated and actuated resources. Raises StartupError when they are invalid."""
    try:
        return open_allocation_state(root)
    except PolicyError as err:
        raise StartupError(str(err)) from err


def find_id_space(config: KubeletConfiguration) -> UserNamespaceRange:
    """Return the id range for user namespaces of pods. Raises StartupError when it is too small."""
    settings = config.user_namespaces
    try:
        space = read_id_space((settings.ids_per_pod if settings else None) or UNIT)
    except ContainerConfigError as err:
        raise StartupError(str(err)) from err
    if problem := space.problem(config.max_pods):
        raise StartupError(f"{problem}: see /etc/subuid and /etc/subgid")
    return space


USER_NAMESPACE_GATE = "KubeletInUserNamespace"


def set_kernel_defaults(gates: FeatureGates) -> None:
    """Set the kernel settings that differ from the values of a node; log what cannot be set.

    Raises StartupError in a user namespace without the feature gate for it.
    """
    for name, (value, found) in kernel.kernel_default_differences().items():
        log.v(2).info("Updating kernel flag", flag=name, expectedValue=value, actualValue=found)
        try:
            kernel.write_sysctl(name, value)
        except OSError as err:
            check_tolerated(f"kernel flag {name} cannot be set: {err.strerror or err}", gates)
            log.warning("Failed to set kernel flag", flag=name, value=value, err=err)


def check_tolerated(problem: str, gates: FeatureGates) -> None:
    """Raise StartupError for a problem of user namespaces in one without the feature gate for it."""
    if kernel.in_user_namespace() and not gates.enabled(USER_NAMESPACE_GATE):
        raise StartupError(
            f"{problem}; the kubelet runs in a user namespace: enable the feature gate {USER_NAMESPACE_GATE}"
        )


def start_daemon_cgroups(config: KubeletConfiguration, tasks: TaskScope) -> None:
    """Keep the kubelet and system processes in the cgroups of `kubeletCgroups` and `systemCgroups`."""
    agent, system = config.kubelet_cgroups, config.system_cgroups
    if agent or system:
        tasks.start(keep_daemons(detect_cgroups(), agent=agent, system=system), name="daemon-cgroups")


def start_util_chains(config: KubeletConfiguration, tasks: TaskScope) -> None:
    """Maintain the iptables chains that other components expect (`makeIPTablesUtilChains`)."""
    if config.make_iptables_util_chains:
        for program in PROGRAMS:
            tasks.start(keep_chains(program), name=program)
