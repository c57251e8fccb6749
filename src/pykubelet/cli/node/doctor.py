"""`pykubelet doctor`: checks whether this host can run a node, and prints a remedy for each problem.

All checks run, whatever the others report; an exception in one is itself a finding. The findings are
printed as a table on a terminal, as plain lines into a pipe, or as JSON. Nothing is changed, and no
traceback is printed. Whether swap, kernel settings and cgroup v1 are a problem depends on the configuration
of the node (`cli/node/doctor_config`), which the first finding names.

A check reads a few facts and passes them to a pure `evaluate_…` function, which contains the thresholds and
texts. The embedded runtime (no endpoint set) brings its own containerd and network, so it has more
requirements of the host. MACHINE_CHECKS cover the kernel and the host, RUNTIME_CHECKS the container
runtime, executables, pod network, ports and iptables.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from pykubelet.cli.client import NodeError
from pykubelet.cli.errors import print_error
from pykubelet.cli.node.doctor_config import (
    PORTS,
    STRICT,
    DoctorConfig,
    Port,
    config_of_file,
    config_of_flags,
    config_of_running,
    config_of_up,
)
from pykubelet.cli.node_access import Node, select_node, selection_or_environment
from pykubelet.cli.options import DEFAULT_DATA_DIR, NodeSelection
from pykubelet.cli.output import Output, serialized
from pykubelet.linux import HostError
from pykubelet.linux import process_limits as capabilities
from pykubelet.linux.cgroupfs import Cgroups, detect_cgroups
from pykubelet.linux.dbus import DBusError
from pykubelet.linux.host_info import ClockState, clock_state
from pykubelet.linux.kernel import (
    FEATURES,
    NAMESPACES,
    KernelFacts,
    SwapArea,
    feature_state,
    kernel_default_differences,
    parse_release,
    read_kernel,
    read_sysctl,
    swap_areas,
)
from pykubelet.linux.logind import (
    DelayDropIn,
    connect_logind,
    overriding_delay,
    read_delay_settings,
)
from pykubelet.linux.network import host_address, node_name
from pykubelet.linux.port_owner import PortOwner, find_port_owner
from pykubelet.linux.processes import search_path
from pykubelet.standalone.data_dir import lock_owner
from pykubelet.standalone.instance import EmbeddedError, Instance
from pykubelet.standalone.requirements import CNI_PLUGIN_DIRS, CNI_PLUGINS, PROGRAMS
from pykubelet.util.text import escape_unprintable

MI = 1024 * 1024
GI = 1024 * MI
DEFAULT_MAX_OPEN_FILES = 1_000_000
OLDEST_KERNEL = (4, 19)

# Without these no container can be set up; a missing CAP_SYS_RESOURCE is only a warning, see below.
NEEDED_CAPABILITIES = frozenset(
    {
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FOWNER",
        "CAP_KILL",
        "CAP_MKNOD",
        "CAP_NET_ADMIN",
        "CAP_NET_RAW",
        "CAP_SETGID",
        "CAP_SETPCAP",
        "CAP_SETUID",
        "CAP_SYS_ADMIN",
        "CAP_SYS_CHROOT",
        "CAP_SYS_PTRACE",
    }
)

# Without these no pod can run; the other features are needed by some pods only.
NEEDED_FEATURES = frozenset({"bridge", "veth"})


class Status(Enum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check; every finding that is not ok has a remedy."""

    area: str
    status: Status
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DoctorContext:
    """Input of the checks: the planned node on this host."""

    data_dir: Path
    endpoint: str | None = None
    """Endpoint of the container runtime; None for the embedded one."""
    config: Path | None = None
    """Configuration file of the kubelet, if one is known."""
    pid: int = 0
    """Process of the running kubelet of `--root-dir`."""
    settings: DoctorConfig = field(default=STRICT, compare=False)
    """Configuration that decides what is a problem."""


Check = Callable[[DoctorContext], list[Finding]]


def ok(area: str, what: str) -> Finding:
    """Return a finding that needs no remedy."""
    return Finding(area, Status.OK, what)


def warn(area: str, what: str, remedy: str) -> Finding:
    """Return a finding that does not keep a node from working."""
    return Finding(area, Status.WARN, what, remedy)


def fail(area: str, what: str, remedy: str) -> Finding:
    """Return a finding that keeps a node from working."""
    return Finding(area, Status.FAIL, what, remedy)


def split_remedy(err: Exception, separator: str) -> tuple[str, str]:
    """Split the text of one of pykubelet's errors into the cause and the remedy after the last separator."""
    cause, found, remedy = str(err).rpartition(separator)
    return (cause, remedy) if found else (remedy, "see the documentation")


def check_capabilities(_: DoctorContext) -> list[Finding]:
    """Check for root and its capabilities."""
    return evaluate_capabilities(capabilities.is_root(), capabilities.effective_capabilities())


def evaluate_capabilities(root: bool, effective: frozenset[str]) -> list[Finding]:
    """Evaluate the effective capabilities of this process."""
    area = "capabilities"
    if not root:
        return [fail(area, "not running as root", "run it as root: sudo pykubelet doctor")]
    if missing := NEEDED_CAPABILITIES - effective:
        remedy = "run it outside of the container, or give the container these (privileged: true)"
        return [fail(area, f"root, but without {', '.join(sorted(missing))}", remedy)]
    if "CAP_SYS_RESOURCE" not in effective:
        what = "root, but without CAP_SYS_RESOURCE: OOM scores cannot be lowered, limits cannot be raised"
        remedy = "give CAP_SYS_RESOURCE if you can; the embedded runtime adapts (restrict_oom_score_adj)"
        return [warn(area, what, remedy)]
    return [ok(area, f"root, {len(effective)} capabilities")]


def check_configuration(context: DoctorContext) -> list[Finding]:
    """Report which configuration the host is checked for."""
    return evaluate_configuration(context.settings)


def evaluate_configuration(settings: DoctorConfig) -> list[Finding]:
    """Evaluate whether the configuration can be used."""
    area = "configuration"
    if settings.problem:
        what = f"{settings.source}: {settings.problem}"
        return [fail(area, what, "correct it: pykubelet config validate FILE reports every problem")]
    return [ok(area, settings.source)]


def check_cgroups(context: DoctorContext) -> list[Finding]:
    """Check the cgroup controllers and the cgroup version."""
    return evaluate_cgroups(detect_cgroups(), fails_on_v1=context.settings.fail_cgroup_v1)


def evaluate_cgroups(cgroups: Cgroups, *, fails_on_v1: bool = False) -> list[Finding]:
    """Evaluate the host's cgroup controllers and version."""
    listed = ", ".join(sorted(cgroups.controllers)) or "none"
    if cgroups.missing:
        what = f"controllers missing: {', '.join(sorted(cgroups.missing))} (there are: {listed})"
        remedy = (
            "boot with cgroup_enable=memory systemd.unified_cgroup_hierarchy=1, or mount the v1 controllers"
        )
        found = [fail("cgroups", what, remedy)]
    else:
        found = [ok("cgroups", f"{cgroups.mode.value} at {cgroups.root}: {listed}")]
    if not cgroups.unified:
        what = "cgroup v1 is in maintenance mode in Kubernetes and will go; newer features need v2"
        remedy = "boot with systemd.unified_cgroup_hierarchy=1; until then leave failCgroupV1 at false"
        if fails_on_v1:
            remedy = "boot with systemd.unified_cgroup_hierarchy=1, or set failCgroupV1: false"
        found.append((fail if fails_on_v1 else warn)("cgroup version", what, remedy))
    return found


def check_swap(context: DoctorContext) -> list[Finding]:
    """Check for swap, with which `failSwapOn` keeps the kubelet from starting."""
    return evaluate_swap(swap_areas(), fails=context.settings.fail_swap_on)


def evaluate_swap(areas: list[SwapArea], *, fails: bool = True) -> list[Finding]:
    """Evaluate the swap areas of /proc/swaps; `fails` is the value of `failSwapOn`."""
    if not areas:
        return [ok("swap", "off")]
    what = f"on: {'; '.join(str(area) for area in areas)}"
    if not fails:
        return [ok("swap", f"{what}; the configuration allows it (failSwapOn: false)")]
    return [fail("swap", what, "swapoff -a, and /etc/fstab; or failSwapOn: false in the configuration")]


def check_kernel(_: DoctorContext) -> list[Finding]:
    """Check the kernel's release, features and namespaces."""
    return evaluate_kernel(read_kernel())


def evaluate_kernel(facts: KernelFacts) -> list[Finding]:
    """Evaluate the kernel's release, features and namespaces."""
    area, found = "kernel", []
    if parse_release(facts.release)[:2] < OLDEST_KERNEL:
        what = f"{facts.release} is older than {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]}"
        found.append(warn(area, what, "use a newer kernel: nobody tests Kubernetes on this one"))
    if missing := NAMESPACES - facts.namespaces:
        what = f"namespaces missing: {', '.join(sorted(missing))}"
        found.append(fail(area, what, "use a kernel with all CONFIG_*_NS options, as distributions have"))
    states = {feature: feature_state(feature, facts) for feature in FEATURES}
    for feature, state in states.items():
        if state is False:
            report = fail if feature.name in NEEDED_FEATURES else warn
            module = f"modprobe {feature.module}, or " if feature.module else ""
            what = f"no {feature.name}, needed for {feature.purpose}"
            found.append(report(area, what, f"{module}use a kernel with {feature.option}"))
    present = [feature.name for feature, state in states.items() if state]
    if not facts.bridge_netfilter_active and "br_netfilter" in present:
        what = "br_netfilter is not loaded: services may not be reachable from pods on the same node"
        remedy = "modprobe br_netfilter, and put it into /etc/modules-load.d/k8s.conf"
        found.append(warn(area, what, remedy))
    return [ok(area, f"{facts.release}: {', '.join(present)}"), *found]


def check_kernel_defaults(context: DoctorContext) -> list[Finding]:
    """Check the sysctls that `protectKernelDefaults` requires."""
    return evaluate_kernel_defaults(
        kernel_default_differences(), fails=context.settings.protect_kernel_defaults
    )


def evaluate_kernel_defaults(
    differences: dict[str, tuple[int, int | None]], *, fails: bool = False
) -> list[Finding]:
    """Evaluate the sysctls that differ: name to expected and actual value."""
    area = "kernel settings"
    if not differences:
        return [ok(area, "as the kubelet expects them")]
    what = ", ".join(
        f"{name.replace('/', '.')} is {'unreadable' if actual is None else actual}, not {expected}"
        for name, (expected, actual) in differences.items()
    )
    set_all = " ".join(f"{name.replace('/', '.')}={expected}" for name, (expected, _) in differences.items())
    if fails:
        return [fail(area, f"{what}; protectKernelDefaults is on", f"sysctl -w {set_all}")]
    return [warn(area, what, f"needed where protectKernelDefaults is on: sysctl -w {set_all}")]


def check_clock(_: DoctorContext) -> list[Finding]:
    """Check whether the clock is synchronized."""
    return evaluate_clock(clock_state())


def evaluate_clock(state: ClockState) -> list[Finding]:
    """Evaluate the kernel's clock state."""
    if state.synchronised:
        return [ok("clock", f"synchronised, at most {state.max_error_seconds:.3g} s wrong")]
    what = "not synchronised: certificates and leases need the right time"
    return [warn("clock", what, "run chrony or systemd-timesyncd (timedatectl set-ntp true)")]


def check_disk(context: DoctorContext) -> list[Finding]:
    """Check the free disk space for images, logs and volumes."""
    path = context.data_dir.absolute()
    while not path.exists():
        path = path.parent
    facts = os.statvfs(path)
    return evaluate_disk(
        path,
        free=facts.f_bavail * facts.f_frsize,
        size=facts.f_blocks * facts.f_frsize,
        inodes_free=facts.f_favail,
        inodes=facts.f_files,
    )


def evaluate_disk(path: Path, *, free: int, size: int, inodes_free: int, inodes: int) -> list[Finding]:
    """Compare with the default eviction thresholds: 10 % (images: 15 %) of the space, 5 % of the inodes."""
    area, share = "disk", 100 * free / size if size else 0.0
    what = f"{free / GI:.1f} GiB ({share:.0f} %) free at {path}"
    remedy = "make room there, or give another --data-dir"
    if share < 10:
        found = [fail(area, f"{what}: below 10 % pods are evicted", remedy)]
    elif share < 15 or free < GI:
        found = [warn(area, f"{what}: images are removed below 15 %, and pods need room", remedy)]
    else:
        found = [ok(area, what)]
    # File systems that allocate inodes on demand (btrfs) report 0.
    if inodes and 100 * inodes_free / inodes < 5:
        found.append(
            fail(area, f"only {inodes_free} of {inodes} inodes free: below 5 % pods are evicted", remedy)
        )
    return found


def check_memory(_: DoctorContext) -> list[Finding]:
    """Check the available memory."""
    return evaluate_memory(Path("/proc/meminfo").read_text())


def evaluate_memory(meminfo: str) -> list[Finding]:
    """Compare with the default eviction threshold of 100 MiB."""
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in meminfo.splitlines() if line.strip()}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    what = f"{free / GI:.1f} of {total / GI:.1f} GiB available"
    if free < 100 * MI:
        return [
            fail("memory", f"{what}: below 100 MiB pods are evicted", "end other programs, or add memory")
        ]
    if free < 512 * MI:
        return [warn("memory", f"{what}: little room for pods", "end other programs, or add memory")]
    return [ok("memory", what)]


def check_open_files(_: DoctorContext) -> list[Finding]:
    """Check the limit on open files, which `maxOpenFiles` raises."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return evaluate_open_files(hard, capabilities.has_capability("CAP_SYS_RESOURCE"))


def evaluate_open_files(hard: int, may_raise: bool) -> list[Finding]:
    """Evaluate the hard limit on open files."""
    area = "open files"
    if may_raise:
        return [ok(area, f"the limit can be raised to {DEFAULT_MAX_OPEN_FILES}")]
    if hard == resource.RLIM_INFINITY or hard >= DEFAULT_MAX_OPEN_FILES:
        return [ok(area, "enough are allowed")]
    what = f"at most {hard} instead of {DEFAULT_MAX_OPEN_FILES}, and without CAP_SYS_RESOURCE it stays so"
    return [
        warn(
            area, what, f"set LimitNOFILE={DEFAULT_MAX_OPEN_FILES} in the unit, or ulimit -n before the start"
        )
    ]


def check_propagation(_: DoctorContext) -> list[Finding]:
    """Check whether mounts made in containers propagate to the host."""
    return evaluate_propagation(Path("/proc/self/mountinfo").read_text())


def evaluate_propagation(mountinfo: str) -> list[Finding]:
    """Evaluate the topmost mount at / in the text of /proc/self/mountinfo."""
    area = "mount propagation"
    roots = [fields for line in mountinfo.splitlines() if (fields := line.split())[4:5] == ["/"]]
    if roots and any(field.startswith("shared:") for field in roots[-1][6:]):
        return [ok(area, "/ is shared")]
    what = "/ is not shared: CSI drivers and mountPropagation: Bidirectional do not work"
    return [warn(area, what, "mount --make-rshared /")]


def check_identity(_: DoctorContext) -> list[Finding]:
    """Check that the node's name and address can be determined."""
    found = []
    for area, read, serious in (("node name", node_name, True), ("node IP", host_address, False)):
        try:
            found.append(ok(area, str(read())))
        except HostError as err:
            found.append((fail if serious else warn)(area, *split_remedy(err, ": ")))
    return found


@dataclass(frozen=True, slots=True)
class ShutdownFacts:
    """What a graceful node shutdown depends on; times are in seconds."""

    period: int
    """Sum of the configured periods; 0 if none are."""
    delay: float | None
    """Longest delay of logind; None if it does not respond."""
    problem: str = ""
    overriding: DelayDropIn | None = None
    """Setting of the delay that applies instead of the kubelet's."""


def check_shutdown(context: DoctorContext) -> list[Finding]:
    """Check whether pods get their grace periods when the host shuts down."""
    return evaluate_shutdown(asyncio.run(read_shutdown_facts(context.settings.shutdown_seconds)))


async def read_shutdown_facts(period: int, bus: Path | None = None) -> ShutdownFacts:
    """Return the facts for a configured period, with the delay of logind."""
    overriding = overriding_delay(read_delay_settings())
    try:
        async with connect_logind(bus) as logind:
            return ShutdownFacts(period, await logind.max_delay(), "", overriding)
    except DBusError as err:
        return ShutdownFacts(period, None, str(err), overriding)


def evaluate_shutdown(facts: ShutdownFacts) -> list[Finding]:
    """Evaluate the periods of the configuration and logind's delay."""
    area = "graceful shutdown"
    if not facts.period:
        what = "off, shutdownGracePeriod is not set: a reboot kills pods without their grace periods"
        return [warn(area, what, "set shutdownGracePeriod and shutdownGracePeriodCriticalPods: 30s and 10s")]
    if facts.delay is None:
        what = f"{facts.period} s are configured, but logind does not respond: {facts.problem}"
        return [warn(area, what, "start dbus and systemd-logind; or run the kubelet with --drain-on-stop")]
    other = facts.overriding
    if facts.delay < facts.period and other is not None and other.seconds < facts.period:
        what = (
            f"{other.path} limits the delay of a shutdown to {other.seconds:g} s, {facts.period} s are needed"
        )
        remedy = "raise InhibitDelayMaxSec there or remove the file, then: systemctl reload systemd-logind"
        return [warn(area, what, remedy)]
    raised = ", which the kubelet raises" if facts.delay < facts.period else ""
    return [ok(area, f"{facts.period} s; logind delays a shutdown by up to {facts.delay:g} s{raised}")]


MACHINE_CHECKS: tuple[Check, ...] = (
    check_configuration,
    check_capabilities,
    check_cgroups,
    check_swap,
    check_kernel,
    check_kernel_defaults,
    check_memory,
    check_disk,
    check_open_files,
    check_propagation,
    check_clock,
    check_identity,
    check_shutdown,
)
RUNNING_HOST_CHECKS: tuple[Check, ...] = (
    check_capabilities,
    check_cgroups,
    check_swap,
    check_kernel,
    check_kernel_defaults,
    check_open_files,
    check_propagation,
    check_clock,
)
"""Checks of the host that take less than a few milliseconds; a running kubelet checks the rest itself."""
SYSTEM_CONFIG = Path("/var/lib/kubelet/config.yaml")
"""Configuration file of kubelets that kubeadm installs."""
CNI_CONFIG = Path("/etc/cni/net.d")
CNI_SUFFIXES = frozenset({".conf", ".conflist", ".json"})

# The other executables belong to the runtime: with --container-runtime-endpoint its installation brings them.
ALWAYS_NEEDED = frozenset({"iptables", "ip"})
_TIMEOUT_SECONDS = 5.0


def check_data_dir(context: DoctorContext) -> list[Finding]:
    """Check whether the embedded runtime can use the data directory."""
    if context.endpoint is not None:
        return []
    area = "data directory"
    try:
        instance = Instance.at(context.data_dir)
    except EmbeddedError as err:
        return [fail(area, *split_remedy(err, ": "))]
    if owner := lock_owner(instance):
        return [
            ok(area, f"{instance.data_dir}, in use by 'pykubelet {owner.purpose}' (pid {owner.pid or '?'})")
        ]
    return [ok(area, f"{instance.data_dir}{'' if instance.data_dir.exists() else ', not made yet'}")]


def check_programs(context: DoctorContext) -> list[Finding]:
    """Check that the required executables are installed."""
    packages = {
        name: package
        for name, package in PROGRAMS.items()
        if context.endpoint is None or name in ALWAYS_NEEDED
    }
    path = search_path()
    return evaluate_programs({name: shutil.which(name, path=path) for name in packages}, packages)


def evaluate_programs(found: Mapping[str, str | None], packages: Mapping[str, str]) -> list[Finding]:
    """Evaluate the paths of the executables; `packages` maps each to its Debian package."""
    missing = sorted(name for name, path in found.items() if path is None)
    if missing:
        names = " ".join(sorted({packages[name] for name in missing}))
        remedy = f"scripts/setup, or: apt-get install {names}"
        return [fail("programs", f"not installed: {', '.join(missing)}", remedy)]
    return [ok("programs", ", ".join(sorted(found)))]


def check_runtime(context: DoctorContext) -> list[Finding]:
    """Check whether the runtime responds; the embedded one need not run yet."""
    if context.endpoint is not None:
        return asyncio.run(_query_runtime(context.endpoint))
    if _running_node(context) is None:
        return [ok("runtime", "embedded: 'pykubelet up' starts a private containerd")]
    return asyncio.run(_query_runtime(Instance.at(context.data_dir).endpoint))


async def _query_runtime(endpoint: str) -> list[Finding]:
    # Imported here: gRPC is slow to load, and the other checks do not need it.
    from prometheus_client import CollectorRegistry

    from pykubelet.api.duration import Duration
    from pykubelet.cri.channel import CriMetrics
    from pykubelet.cri.connect import connect
    from pykubelet.kuberuntime.runtime_features import RuntimeFeatures
    from pykubelet.transport.errors import ConnectError, CriError

    timeout, metrics = Duration.from_seconds(_TIMEOUT_SECONDS), CriMetrics(CollectorRegistry())
    try:
        async with await connect(endpoint, timeout=timeout, connect_timeout=timeout, metrics=metrics) as cri:
            features = RuntimeFeatures(cri)
            response = await features.status()
            conditions = {
                condition.type: ""
                if condition.status
                else condition.message or condition.reason or "no reason given"
                for condition in response.status.conditions
            }
            name = f"{cri.version.runtime_name} {cri.version.runtime_version} at {endpoint}"
            missing = features.missing()
    except ConnectError as err:
        return [fail("runtime", *split_remedy(err, "; "))]
    except CriError as err:
        return [fail("runtime", f"{endpoint}: {err}", "see the runtime's log")]
    return evaluate_runtime(name, conditions, missing)


def evaluate_runtime(name: str, conditions: Mapping[str, str], missing: Sequence[str] = ()) -> list[Finding]:
    """Evaluate the conditions of a runtime that responded: type to the failure, "" if it is true.

    `missing` are features that the runtime does not have; most pods do not need them.
    """
    lacks = f", without {', '.join(missing)}" if missing else ""
    found = [ok("runtime", f"{name} speaks CRI v1{lacks}")]
    if message := conditions.get("RuntimeReady"):
        found = [fail("runtime", f"{name} is not ready: {message}", "see the runtime's log, and restart it")]
    if message := conditions.get("NetworkReady"):
        remedy = f"install a pod network: its configuration goes to {CNI_CONFIG}"
        found.append(warn("runtime", f"the pod network is not ready: {message}", remedy))
    return found


def check_cni(context: DoctorContext) -> list[Finding]:
    """Check the CNI plugins and the CNI configuration."""
    found = evaluate_cni_plugins({directory: _names(directory) for directory in CNI_PLUGIN_DIRS})
    if context.endpoint is None:
        return [*found, ok("CNI configuration", "embedded: 'pykubelet up' writes its own")]
    forwarding = read_sysctl("net/ipv4/ip_forward")
    if forwarding == 0:
        what = "net.ipv4.ip_forward is 0: pods do not reach other machines"
        found.append(
            warn("pod network", what, "sysctl -w net.ipv4.ip_forward=1, unless your pod network sets it")
        )
    return [*found, *evaluate_cni_config(CNI_CONFIG, _texts(CNI_CONFIG))]


def evaluate_cni_plugins(directories: Mapping[Path, frozenset[str]]) -> list[Finding]:
    """Evaluate the CNI plugins found in each directory."""
    needed = frozenset(CNI_PLUGINS)
    for directory, names in directories.items():
        if needed <= names:
            return [ok("CNI plugins", f"{len(names)} in {directory}")]
    best = max(directories.values(), key=lambda names: len(needed & names), default=frozenset[str]())
    remedy = "scripts/setup, or: apt-get install containernetworking-plugins"
    what = f"missing: {', '.join(sorted(needed - best))} (looked in {', '.join(map(str, directories))})"
    return [fail("CNI plugins", what, remedy)]


def evaluate_cni_config(directory: Path, texts: Mapping[str, str]) -> list[Finding]:
    """Evaluate the CNI configurations of a directory: file name to text; the first by name is used."""
    area = "CNI configuration"
    if not texts:
        what = f"none in {directory}: pods stay in ContainerCreating"
        return [warn(area, what, "install a pod network (flannel, Calico, Cilium or the like)")]
    name = min(texts)
    try:
        document = json.loads(texts[name])
        network = document["name"]
    except (ValueError, KeyError, TypeError):
        return [
            fail(area, f"{directory / name} is no CNI configuration", "correct or remove it: it comes first")
        ]
    return [ok(area, f"network {network!r} from {directory / name}")]


def check_ports(context: DoctorContext) -> list[Finding]:
    """Check the ports that the kubelet listens on."""
    ports = context.settings.ports
    return evaluate_ports({port: find_port_owner(port) for port, *_ in ports}, _running_node(context), ports)


def evaluate_ports(
    owners: Mapping[int, PortOwner | None], own: int | None, ports: Sequence[Port] = PORTS
) -> list[Finding]:
    """Evaluate the owners of the ports; `own` is the pid of the node already running here, or None."""
    found = []
    for port, purpose, needed in ports:
        owner = owners.get(port)
        if owner is None:
            continue
        what = f"{port} ({purpose}) is taken by {owner} on {owner.address}"
        if own and owner.pid == own:
            found.append(ok("ports", f"{port} ({purpose}) is this node's"))
        elif needed:
            found.append(fail("ports", what, "stop it (another kubelet?), or give the agent another port"))
        else:
            found.append(warn("ports", what, "fine as long as the agent's configuration does not use it"))
    free = [str(port) for port, _, _ in ports if owners.get(port) is None]
    return [*([ok("ports", f"free: {', '.join(free)}")] if free else []), *found]


def check_packet_filter(_: DoctorContext) -> list[Finding]:
    """Check that iptables works: an installed executable does not prove kernel support."""
    program = shutil.which("iptables", path=search_path())
    if program is None:
        return [fail("packet filter", "iptables is not installed", "apt-get install iptables")]
    version = _run(program, "--version")
    return evaluate_packet_filter(version.stdout.strip(), _run(program, "-w", "5", "-t", "nat", "-S"))


def evaluate_packet_filter(version: str, listing: subprocess.CompletedProcess[str]) -> list[Finding]:
    """Evaluate whether the nat table could be listed."""
    area = "packet filter"
    if listing.returncode == 0:
        return [ok(area, f"{version} lists the nat table")]
    cause = " ".join(listing.stderr.split()).removeprefix(f"{version}: ") or f"exit code {listing.returncode}"
    remedy = "run as root; load the modules (modprobe ip_tables nf_tables), or switch the backend"
    return [fail(area, f"{version}: {cause}", f"{remedy} (update-alternatives --config iptables)")]


def _running_node(context: DoctorContext) -> int | None:
    """Return the pid of the node that already runs on the directory, or None."""
    if context.endpoint is not None:
        return context.pid or None
    try:
        owner = lock_owner(Instance.at(context.data_dir))
    except EmbeddedError:
        return None  # reported by check_data_dir
    return owner.pid if owner and owner.purpose == "up" else None


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=2 * _TIMEOUT_SECONDS, check=False)


def _names(directory: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in directory.iterdir())
    except OSError:
        return frozenset()


def _texts(directory: Path) -> dict[str, str]:
    return {
        name: (directory / name).read_text(errors="replace")
        for name in _names(directory)
        if Path(name).suffix in CNI_SUFFIXES
    }


RUNTIME_CHECKS: tuple[Check, ...] = (
    check_data_dir,
    check_programs,
    check_runtime,
    check_cni,
    check_packet_filter,
    check_ports,
)
__all__ = ["CHECKS", "DoctorContext", "Finding", "Status", "examine", "run_doctor"]
CHECKS: tuple[Check, ...] = (*MACHINE_CHECKS, *RUNTIME_CHECKS)


def run_doctor(
    selection: NodeSelection, endpoint: str | None, output: Output, config: Path | None = None
) -> int:
    """Check this host and print the findings; return 1 if a node cannot work here, else 0.

    `endpoint` is the container runtime to query; None checks the embedded runtime's requirements, or the
    runtime of the kubelet of `--root-dir`. `config` is the configuration file of the planned node.
    """
    try:
        context = doctor_context(selection, endpoint, config)
    except (EmbeddedError, NodeError) as err:
        return print_error("pykubelet doctor", err)
    findings = examine(context)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may contain any bytes
    print_findings(findings, output)
    return 1 if any(finding.status is Status.FAIL for finding in findings) else 0


def doctor_context(
    selection: NodeSelection, endpoint: str | None, config: Path | None = None
) -> DoctorContext:
    """Return what is checked: by default the host for a node of `pykubelet up`. Raises NodeError.

    The configuration is that of `config`, else of the running node, else of the file with which the kubelet
    of `--root-dir` last ran, else the defaults of `up`. With only an endpoint the file of kubeadm replaces
    the defaults, if it exists.
    """
    chosen = selection_or_environment(selection)
    settings = config_of_file(config) if config is not None else None
    node = select_node(chosen) if chosen.root_dir is not None else None
    if node is None or node.instance is not None:
        data_dir = node.instance.data_dir if node is not None and node.instance is not None else None
        data_dir = data_dir or chosen.data_dir or DEFAULT_DATA_DIR
        if settings is None and (endpoint is None or chosen != NodeSelection()):
            settings = _config_of_running_up(data_dir)
        if settings is None and endpoint is not None and SYSTEM_CONFIG.exists():
            config, settings = SYSTEM_CONFIG, config_of_file(SYSTEM_CONFIG)
        return DoctorContext(data_dir, endpoint, config, settings=settings or config_of_up())
    info = node.info
    is_running = node.is_running()
    if settings is None:
        config = Path(info.config_file) if info.config_file else None
        settings = (config_of_running(node) if is_running else None) or config_of_flags(
            info.config_file, info.config_dir, node.title
        )
    return DoctorContext(
        node.root_dir,
        endpoint or info.container_runtime_endpoint,
        config,
        info.pid if is_running else 0,
        settings,
    )


def _config_of_running_up(data_dir: Path) -> DoctorConfig | None:
    try:
        instance = Instance.at(data_dir)
    except EmbeddedError:
        return None  # reported by check_data_dir
    owner = lock_owner(instance)
    return config_of_running(Node.of(instance)) if owner and owner.purpose == "up" else None


def examine(context: DoctorContext, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Run the checks and return their findings; an exception in a check is a warning."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check(context)
        # The findings of the other checks are still useful.
        except Exception as err:
            area = check.__name__.removeprefix("check_").replace("_", " ")
            what = f"could not be checked: {type(err).__name__}: {err}"
            findings.append(
                warn(area, " ".join(what.split()), "if this machine is healthy, report it as a bug")
            )
    return findings


def running_host_problems() -> list[Finding]:
    """Return what is not as a node with all requirements needs it, on the host of a running one. Blocks."""
    findings = examine(DoctorContext(Path("/")), RUNNING_HOST_CHECKS)
    return [finding for finding in findings if finding.status is not Status.OK]


def print_findings(findings: list[Finding], output: Output) -> None:
    """Print the findings in a format; a table on a terminal, and plain lines into a pipe."""
    if output in (Output.JSON, Output.YAML):
        print(serialized(document(findings), output), end="")
    elif output is Output.NAME:
        for area in dict.fromkeys(finding.area for finding in findings):
            print(_shown(area))
    elif sys.stdout.isatty():
        print_table(findings)
    else:
        print("\n".join(as_lines(findings)))


def document(findings: list[Finding]) -> dict[str, Any]:
    """Return the findings as a document of plain values."""
    counts = Counter(finding.status for finding in findings)
    return {
        "findings": [
            {
                "area": finding.area,
                "status": finding.status.value,
                "what": finding.what,
                "remedy": finding.remedy,
            }
            for finding in findings
        ],
        **{status.value: counts[status] for status in Status},
    }


def as_lines(findings: list[Finding]) -> list[str]:
    """Return a line per finding and one per remedy, for logs and pipes."""
    width = max((len(finding.area) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status.value:<5} {finding.area:<{width}}  {_shown(finding.what)}")
        if finding.remedy:
            lines.append(f"{'':5} {'':{width}}  -> {_shown(finding.remedy)}")
    return [*lines, summary(findings)]


def print_table(findings: list[Finding]) -> None:
    """Print the findings as a table for a terminal."""
    # Imported here: only this output needs rich.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
    table = Table("", "Area", "Finding", header_style="bold", expand=False)
    for finding in findings:
        colour = colours[finding.status]
        cell = Text(_shown(finding.what))
        if finding.remedy:
            cell.append(f"\n-> {_shown(finding.remedy)}", style=colour)
        table.add_row(Text(finding.status.value, style=colour), Text(_shown(finding.area)), cell)
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(summary(findings)))


def _shown(text: str) -> str:
    """Return a text for a terminal; any process of this host chooses its name."""
    return escape_unprintable(text, lines=False)


def summary(findings: list[Finding]) -> str:
    """Return the number of findings by severity and the conclusion, in one line."""
    counts = Counter(finding.status for finding in findings)
    conclusion = "a node cannot work here yet" if counts[Status.FAIL] else "this machine can be a node"
    numbers = f"{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed"
    return f"{numbers}: {conclusion}"
