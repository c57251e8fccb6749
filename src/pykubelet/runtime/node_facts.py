"""Gathers what every request to the runtime depends on: the machine, and the agent's settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pykubelet.config.gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.host.selinux import FS, has_selinux
from pykubelet.host.swap_control import can_bound_swap
from pykubelet.resources.capacity import allocatable, machine_amounts, unreserved
from pykubelet.resources.huge_pages import read_page_sizes
from pykubelet.runtime.facts import NodeFacts


def gather_node_facts(
    config: KubeletConfiguration,
    gates: FeatureGates,
    root_dir: Path,
    host_ips: Sequence[str],
    *,
    cgroup_v2: bool,
    ignore_eviction: bool = False,
    selinux_fs: Path = FS,
) -> NodeFacts:
    """Read the machine once; none of this changes while the agent runs, but `host_ips` may.

    `ignore_eviction` is `--experimental-allocatable-ignore-eviction`; `selinux_fs` is where the kernel
    tells of SELinux.
    """
    memory = parse_meminfo(Path("/proc/meminfo").read_text())
    capacity = machine_amounts(config, root_dir)
    return NodeFacts(
        cluster_dns=tuple(config.cluster_dns),
        cluster_domain=config.cluster_domain,
        host_ips=host_ips,
        pod_logs_dir=config.pod_logs_dir,
        seccomp_root=str(root_dir / "seccomp"),
        seccomp_default=config.seccomp_default,
        selinux=has_selinux(selinux_fs),
        masked_paths=tuple(
            sorted(map(str, Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle")))
        ),
        cgroup_v2=cgroup_v2,
        cpu_quota=config.cpu_cfs_quota,
        cpu_period=config.cpu_cfs_quota_period // 1000,
        memory_capacity=memory.get("MemTotal", 0),
        swap_capacity=memory.get("SwapTotal", 0),
        swap_controller=can_bound_swap(unified=cgroup_v2),
        swap_behavior=config.memory_swap.swap_behavior,
        single_process_oom_kill=not cgroup_v2 or bool(config.single_process_oom_kill),
        memory_throttling_factor=config.memory_throttling_factor,
        memory_reservation_policy=config.memory_reservation_policy,
        page_size=os.sysconf("SC_PAGE_SIZE"),
        huge_page_sizes=read_page_sizes(),
        allocatable=allocatable(capacity, config, ignore_eviction=ignore_eviction),
        unreserved_memory=int(unreserved(capacity, config)["memory"]),
        gates=gates,
    )


def recursive_handlers(runtime: pb.StatusResponse) -> frozenset[str]:
    """Give the runtime's handlers that can make mounts read-only all the way down."""
    handlers = runtime.runtime_handlers
    return frozenset(handler.name for handler in handlers if handler.features.recursive_read_only_mounts)


def parse_meminfo(text: str) -> dict[str, int]:
    """Read /proc/meminfo: bytes by name."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isdecimal():
            found[name] = int(number) * (1024 if unit == "kB" else 1)
    return found
