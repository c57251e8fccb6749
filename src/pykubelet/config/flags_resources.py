"""Flags about the machine's resources: cgroups, CPUs, memory, reservations, eviction, measuring."""

from pykubelet.config.flag_rows import group, here, in_file, old
from pykubelet.config.flag_types import (
    BOOL,
    DURATION,
    INT32,
    MAP,
    OPTION,
    RESERVED_MEMORY,
    STRING,
    STRINGS,
    THRESHOLDS,
)

ROWS = (
    *group(
        "Cgroups, CPUs and memory",
        in_file("cgroup-driver", STRING, "cgroup_driver", "cgroupfs or systemd."),
        in_file("cgroup-root", STRING, "cgroup_root", "Cgroup that all pods are under."),
        in_file("cgroups-per-qos", BOOL, "cgroups_per_qos", "Keep a cgroup for each QoS class and pod."),
        in_file("kubelet-cgroups", STRING, "kubelet_cgroups", "Cgroup that the agent itself runs in."),
        in_file("system-cgroups", STRING, "system_cgroups", "Cgroup for processes that have none."),
        here("runtime-cgroups", STRING, "Cgroup that the container runtime runs in."),
        in_file("cpu-cfs-quota", BOOL, "cpu_cfs_quota", "Enforce CPU limits."),
        in_file(
            "cpu-cfs-quota-period", DURATION, "cpu_cfs_quota_period", "Period over which CPU limits hold."
        ),
        in_file("cpu-manager-policy", STRING, "cpu_manager_policy", "none or static."),
        in_file(
            "cpu-manager-policy-options",
            OPTION,
            "cpu_manager_policy_options",
            "An option of that policy, name=value; repeat the flag for more.",
        ),
        in_file(
            "cpu-manager-reconcile-period",
            DURATION,
            "cpu_manager_reconcile_period",
            "How often the containers' CPU sets are put right.",
        ),
        in_file("memory-manager-policy", STRING, "memory_manager_policy", "None or Static."),
        in_file(
            "reserved-memory",
            RESERVED_MEMORY,
            "reserved_memory",
            "Memory of NUMA nodes that pods do not get, such as 0:memory=1Gi;1:memory=1Gi.",
        ),
        in_file(
            "topology-manager-policy",
            STRING,
            "topology_manager_policy",
            "none, best-effort, restricted or single-numa-node.",
        ),
        in_file(
            "topology-manager-policy-options",
            MAP,
            "topology_manager_policy_options",
            "Options of that policy.",
        ),
        in_file("topology-manager-scope", STRING, "topology_manager_scope", "container or pod."),
        in_file(
            "qos-reserved", MAP, "qos_reserved", "Part of requests kept for higher QoS, such as memory=50%."
        ),
    ),
    *group(
        "Reservations",
        in_file(
            "system-reserved", MAP, "system_reserved", "What the system keeps, such as cpu=200m,memory=500Mi."
        ),
        in_file("kube-reserved", MAP, "kube_reserved", "What Kubernetes' own daemons keep."),
        in_file(
            "system-reserved-cgroup", STRING, "system_reserved_cgroup", "Cgroup of the system's daemons."
        ),
        in_file("kube-reserved-cgroup", STRING, "kube_reserved_cgroup", "Cgroup of Kubernetes' own daemons."),
        in_file("reserved-cpus", STRING, "reserved_system_cpus", "CPUs kept from pods, such as 0-1,4."),
        in_file(
            "enforce-node-allocatable",
            STRINGS,
            "enforce_node_allocatable",
            "Reservations to enforce: pods, system-reserved, kube-reserved, or none.",
        ),
        old(
            "experimental-allocatable-ignore-eviction",
            BOOL,
            "Leave the hard eviction thresholds out of what is allocatable.",
            "it will be removed; reserve less instead",
        ),
    ),
    *group(
        "Eviction",
        in_file(
            "eviction-hard", THRESHOLDS, "eviction_hard", "Evict at once below these, memory.available<100Mi."
        ),
        in_file("eviction-soft", THRESHOLDS, "eviction_soft", "Evict after a grace period below these."),
        in_file(
            "eviction-soft-grace-period",
            MAP,
            "eviction_soft_grace_period",
            "That grace period, such as memory.available=1m30s.",
        ),
        in_file(
            "eviction-max-pod-grace-period",
            INT32,
            "eviction_max_pod_grace_period",
            "Seconds that a softly evicted pod gets at most; negative: what it asks for.",
        ),
        in_file(
            "eviction-minimum-reclaim",
            MAP,
            "eviction_minimum_reclaim",
            "How far to go above a threshold, such as imagefs.available=2Gi.",
        ),
        in_file(
            "eviction-pressure-transition-period",
            DURATION,
            "eviction_pressure_transition_period",
            "How long a pressure condition stays after the pressure is gone.",
        ),
        in_file(
            "kernel-memcg-notification",
            BOOL,
            "kernel_memcg_notification",
            "Have the kernel say when memory is short, instead of looking.",
        ),
    ),
    *group(
        "Measuring",
        here("housekeeping-interval", DURATION, "How often containers are measured."),
        old(
            "global-housekeeping-interval",
            DURATION,
            "How often the machine is looked over for new or lost containers.",
            "it will be removed; nothing replaces it",
        ),
        old(
            "machine-id-file",
            STRING,
            "Files to look for the machine's id in, the first that exists counts.",
            "it will be removed; nothing replaces it",
        ),
        old(
            "boot-id-file",
            STRING,
            "Files to look for the boot's id in, the first that exists counts.",
            "it will be removed; nothing replaces it",
        ),
    ),
)
