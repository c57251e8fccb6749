"""What the doctor looks at: one small check per concern, each giving findings with a remedy.

A check reads a few facts and hands them to a pure `judge_…` function, which is where the opinions
are. The embedded runtime (no endpoint given) brings its own containerd and network, so more is
asked of the machine then. `runtime_checks.py` holds the checks that look outside of the kernel.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pykubelet.host import HostError, capabilities
from pykubelet.host.addresses import host_address
from pykubelet.host.cgroups import Cgroups, detect_cgroups
from pykubelet.host.clock import ClockState, clock_state
from pykubelet.host.hostname import node_name
from pykubelet.host.kernel import (
    FEATURES,
    NAMESPACES,
    KernelFacts,
    feature_state,
    kernel_default_differences,
    parse_release,
    read_kernel,
)
from pykubelet.host.swap import SwapArea, swap_areas

MI = 1024 * 1024
GI = 1024 * MI
WANTED_FILES = 1_000_000
OLDEST_KERNEL = (4, 19)

# Without these no container can be set up; CAP_SYS_RESOURCE is another matter, see below.
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
# Without these there are no pods; the other features only some pods need.
NEEDED_FEATURES = frozenset({"bridge", "veth"})


class Status(Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the doctor saw; a remedy belongs to everything that is not ok."""

    area: str
    status: Status
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    """What is examined: this machine, as the home of a node."""

    data_dir: Path
    endpoint: str | None = None
    """The runtime to use; None for the embedded one."""


Check = Callable[[Patient], list[Finding]]


def ok(area: str, what: str) -> Finding:
    """Make a finding that needs no remedy."""
    return Finding(area, Status.OK, what)


def warn(area: str, what: str, remedy: str) -> Finding:
    """Make a finding that a node can live with."""
    return Finding(area, Status.WARN, what, remedy)


def fail(area: str, what: str, remedy: str) -> Finding:
    """Make a finding that keeps a node from working."""
    return Finding(area, Status.FAIL, what, remedy)


def split_remedy(err: Exception, separator: str) -> tuple[str, str]:
    """Take apart one of our own error lines: the cause, and the remedy after the last separator."""
    cause, found, remedy = str(err).rpartition(separator)
    return (cause, remedy) if found else (remedy, "see the documentation")


def check_capabilities(_: Patient) -> list[Finding]:
    """Root, and what root may do."""
    return judge_capabilities(capabilities.is_root(), capabilities.effective())


def judge_capabilities(root: bool, effective: frozenset[str]) -> list[Finding]:
    """Judge the rights of this process."""
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


def check_cgroups(_: Patient) -> list[Finding]:
    """The controllers, and their version."""
    return judge_cgroups(detect_cgroups())


def judge_cgroups(cgroups: Cgroups) -> list[Finding]:
    """Judge the machine's cgroups."""
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
        found.append(warn("cgroup version", what, remedy))
    return found


def check_swap(_: Patient) -> list[Finding]:
    """Swap, which `failSwapOn` refuses."""
    return judge_swap(swap_areas())


def judge_swap(areas: list[SwapArea]) -> list[Finding]:
    """Judge what /proc/swaps lists."""
    if not areas:
        return [ok("swap", "off")]
    what = f"on: {'; '.join(str(area) for area in areas)}"
    return [fail("swap", what, "swapoff -a, and /etc/fstab; or failSwapOn: false in the configuration")]


def check_kernel(_: Patient) -> list[Finding]:
    """Release, features, namespaces."""
    return judge_kernel(read_kernel())


def judge_kernel(facts: KernelFacts) -> list[Finding]:
    """Judge what the kernel can do."""
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
            make = fail if feature.name in NEEDED_FEATURES else warn
            module = f"modprobe {feature.module}, or " if feature.module else ""
            what = f"no {feature.name}, needed for {feature.purpose}"
            found.append(make(area, what, f"{module}use a kernel with {feature.option}"))
    present = [feature.name for feature, state in states.items() if state]
    if not facts.bridge_netfilter_active and "br_netfilter" in present:
        what = "br_netfilter is not loaded: services may not be reachable from pods on the same node"
        remedy = "modprobe br_netfilter, and put it into /etc/modules-load.d/k8s.conf"
        found.append(warn(area, what, remedy))
    return [ok(area, f"{facts.release}: {', '.join(present)}"), *found]


def check_kernel_defaults(_: Patient) -> list[Finding]:
    """The settings that `protectKernelDefaults` is about."""
    return judge_kernel_defaults(kernel_default_differences())


def judge_kernel_defaults(differences: dict[str, tuple[int, int | None]]) -> list[Finding]:
    """Judge the settings that differ from the expected."""
    area = "kernel settings"
    if not differences:
        return [ok(area, "as the kubelet expects them")]
    what = ", ".join(
        f"{name.replace('/', '.')} is {'unreadable' if actual is None else actual}, not {expected}"
        for name, (expected, actual) in differences.items()
    )
    set_all = " ".join(f"{name.replace('/', '.')}={expected}" for name, (expected, _) in differences.items())
    remedy = f"needed where protectKernelDefaults is on: sysctl -w {set_all}"
    return [warn(area, what, remedy)]


def check_clock(_: Patient) -> list[Finding]:
    """Whether someone keeps the clock right."""
    return judge_clock(clock_state())


def judge_clock(state: ClockState) -> list[Finding]:
    """Judge the kernel's word on its clock."""
    if state.synchronised:
        return [ok("clock", f"synchronised, at most {state.max_error_seconds:.3g} s wrong")]
    what = "not synchronised: certificates and leases need the right time"
    return [warn("clock", what, "run chrony or systemd-timesyncd (timedatectl set-ntp true)")]


def check_disk(patient: Patient) -> list[Finding]:
    """Room for images, logs and volumes."""
    place = patient.data_dir.absolute()
    while not place.exists():
        place = place.parent
    facts = os.statvfs(place)
    return judge_disk(
        place,
        free=facts.f_bavail * facts.f_frsize,
        size=facts.f_blocks * facts.f_frsize,
        inodes_free=facts.f_favail,
        inodes=facts.f_files,
    )


def judge_disk(place: Path, *, free: int, size: int, inodes_free: int, inodes: int) -> list[Finding]:
    """Judge by the default eviction thresholds: 10 % (15 % for images) of the space, 5 % of the inodes."""
    area, share = "disk", 100 * free / size if size else 0.0
    what = f"{free / GI:.1f} GiB ({share:.0f} %) free at {place}"
    remedy = "make room there, or give another --data-dir"
    if share < 10:
        found = [fail(area, f"{what}: below 10 % pods are evicted", remedy)]
    elif share < 15 or free < GI:
        found = [warn(area, f"{what}: images are removed below 15 %, and pods need room", remedy)]
    else:
        found = [ok(area, what)]
    # Some filesystems (btrfs) make inodes as they are needed and say 0.
    if inodes and 100 * inodes_free / inodes < 5:
        found.append(
            fail(area, f"only {inodes_free} of {inodes} inodes free: below 5 % pods are evicted", remedy)
        )
    return found


def check_memory(_: Patient) -> list[Finding]:
    """Room for pods."""
    return judge_memory(Path("/proc/meminfo").read_text())


def judge_memory(meminfo: str) -> list[Finding]:
    """Judge by the default eviction threshold of 100 MiB."""
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


def check_open_files(_: Patient) -> list[Finding]:
    """The limit that `maxOpenFiles` raises."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return judge_open_files(hard, capabilities.has("CAP_SYS_RESOURCE"))


def judge_open_files(hard: int, may_raise: bool) -> list[Finding]:
    """Judge the hard limit."""
    area = "open files"
    if may_raise:
        return [ok(area, f"the limit can be raised to {WANTED_FILES}")]
    if hard == resource.RLIM_INFINITY or hard >= WANTED_FILES:
        return [ok(area, "enough are allowed")]
    what = f"at most {hard} instead of {WANTED_FILES}, and without CAP_SYS_RESOURCE it stays so"
    return [warn(area, what, f"set LimitNOFILE={WANTED_FILES} in the unit, or ulimit -n before the start")]


def check_propagation(_: Patient) -> list[Finding]:
    """Whether mounts made in containers can reach the host."""
    return judge_propagation(Path("/proc/self/mountinfo").read_text())


def judge_propagation(mountinfo: str) -> list[Finding]:
    """Judge the uppermost mount at / in the text of /proc/self/mountinfo."""
    area = "mount propagation"
    roots = [fields for line in mountinfo.splitlines() if (fields := line.split())[4:5] == ["/"]]
    if roots and any(field.startswith("shared:") for field in roots[-1][6:]):
        return [ok(area, "/ is shared")]
    what = "/ is not shared: CSI drivers and mountPropagation: Bidirectional do not work"
    return [warn(area, what, "mount --make-rshared /")]


def check_identity(_: Patient) -> list[Finding]:
    """The node's name and address."""
    found = []
    for area, ask, serious in (("node name", node_name, True), ("node IP", host_address, False)):
        try:
            found.append(ok(area, str(ask())))
        except HostError as err:
            found.append((fail if serious else warn)(area, *split_remedy(err, ": ")))
    return found


MACHINE_CHECKS: tuple[Check, ...] = (
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
)
