"""Documents of cAdvisor's API about one cgroup: its spec and its latest sample, in the v1 and v2 types.

The kubelet keeps the latest sample of a cgroup only, so a list of samples has at most one entry. Environment
variables are never part of a spec.
"""

from __future__ import annotations

from collections.abc import Sequence

from pykubelet.server.cadvisor_api.samples import (
    Document,
    HostFacts,
    cpu,
    cpu_rate,
    disk_io,
    filesystem_sizes,
    huge_pages,
    interfaces,
    known,
    machine_filesystem,
    memory,
    processes,
    timestamp,
)
from pykubelet.stats.samples import Record, Target, Usage

_NANOSECONDS_PER_MILLICORE = 1_000_000
_POD_LABELS = (
    ("io.kubernetes.container.name", "container"),
    ("io.kubernetes.pod.name", "pod"),
    ("io.kubernetes.pod.namespace", "namespace"),
    ("io.kubernetes.pod.uid", "pod_uid"),
)


def container_info(record: Record, usage: Usage | None, children: Sequence[str], host: HostFacts) -> Document:
    """Return ContainerInfo (v1); `usage` is the sample to include, `children` the paths directly below."""
    document = {**_reference(record.target), "spec": spec(record, host)}
    if children:
        document["subcontainers"] = [{"name": path} for path in children]
    if usage is not None:
        document["stats"] = [_container_stats(record, usage, host)]
    return document


def spec(record: Record, host: HostFacts) -> Document:
    """Return ContainerSpec (v1)."""
    target, limits = record.target, record.limits
    is_root = target.kind == "root"
    has_memory = limits.has_memory or is_root
    details = record.details
    document: Document = {
        **known(
            {
                "creation_time": timestamp(limits.created),
                "start_time": timestamp(target.created or limits.created),
            }
        ),
        "has_cpu": limits.has_cpu,
        "has_memory": has_memory,
        "has_hugetlb": details is not None and bool(details.huge_pages),
        "has_network": bool(record.network),
        "has_processes": details is not None,
        "has_filesystem": is_root and bool(host.filesystems),
        "has_diskio": details is not None and bool(details.io),
        "has_custom_metrics": False,
    }
    if limits.has_cpu:
        quota = {"quota": limits.cpu_quota} if limits.cpu_quota else {}
        period = {"period": limits.cpu_period} if limits.cpu_period else {}
        document["cpu"] = {"limit": limits.cpu_shares, **quota, **period}
    if has_memory:
        document["memory"] = {
            # cAdvisor reports the host's memory as the limits of the root cgroup.
            "limit": host.machine.memory if is_root else limits.memory_limit,
            "reservation": limits.memory_reservation,
            "swap_limit": host.machine.swap if is_root else limits.memory_swap_limit,
        }
    if limits.max_processes:
        document["processes"] = {"limit": limits.max_processes}
    if labels := _labels(target):
        document["labels"] = labels
    if target.image:
        document["image"] = target.image
    return document


def spec_v2(record: Record, host: HostFacts) -> Document:
    """Return ContainerSpec (v2)."""
    document = spec(record, host)
    if record.target.runtime_id:
        document["aliases"] = [record.target.runtime_id]
    return document


def stats_v20(record: Record, usage: Usage, host: HostFacts) -> Document:
    """Return DeprecatedContainerStats, the samples of `/api/v2.0/stats`."""
    found = spec(record, host)
    document = _container_stats(record, usage, host)
    document.pop("oom_events", None)
    if record.network:
        document["network"] = {"interfaces": interfaces(record.network)}
    flags = ("cpu", "memory", "hugetlb", "network", "processes", "filesystem", "diskio", "custom_metrics")
    return (
        document
        | {f"has_{name}": found[f"has_{name}"] for name in flags}
        | known({"cpu_inst": cpu_rate(record)})
    )


def stats_v21(record: Record, usage: Usage, host: HostFacts) -> Document:
    """Return ContainerStats (v2), the samples of `/api/v2.1/stats`."""
    document = _container_stats(record, usage, host) | known({"cpu_inst": cpu_rate(record)})
    for name in ("filesystem", "oom_events"):
        document.pop(name, None)
    if record.network:
        document["network"] = {"interfaces": interfaces(record.network)}
    return document


def machine_stats(record: Record, usage: Usage, host: HostFacts) -> Document:
    """Return MachineStats of the root cgroup, for `/api/v2.1/machinestats`."""
    document = {
        "timestamp": timestamp(usage.time),
        "cpu": cpu(record, usage, host),
        "cpu_inst": cpu_rate(record),
        "memory": memory(record, usage, host),
        "network": {"interfaces": interfaces(record.network)} if record.network else None,
        "filesystem": [machine_filesystem(found) for found in host.filesystems] or None,
    }
    return known(document)


def derived_stats(record: Record) -> Document:
    """Return DerivedStats: the latest usage; percentiles of minutes, hours and days are not computed."""
    if (usage := record.usage) is None:
        return {}
    rate = None if record.nano_cores is None else record.nano_cores // _NANOSECONDS_PER_MILLICORE
    latest = {"cpu": rate, "memory": usage.working_set}
    return known({"timestamp": timestamp(usage.time), "latest_usage": known(latest)})


def _container_stats(record: Record, usage: Usage, host: HostFacts) -> Document:
    """Return ContainerStats (v1) with what was measured."""
    limits, is_root = record.limits, record.target.kind == "root"
    network = interfaces(record.network) if record.network else None
    return known(
        {
            "timestamp": timestamp(usage.time),
            "cpu": cpu(record, usage, host) if limits.has_cpu else None,
            "diskio": disk_io(record, usage, host),
            "memory": memory(record, usage, host) if limits.has_memory or is_root else None,
            "hugetlb": huge_pages(record.details),
            # Clients older than the list of interfaces read the first one.
            "network": {**network[0], "interfaces": network} if network else None,
            "filesystem": [filesystem_sizes(found) for found in host.filesystems] or None
            if is_root
            else None,
            "processes": processes(record),
            "oom_events": record.oom_events or None,
        }
    )


def _reference(target: Target) -> Document:
    """Return ContainerReference; the namespace of aliases, a name of the runtime, is not known."""
    if not target.runtime_id:
        return {"name": target.path}
    return {"id": target.runtime_id, "name": target.path, "aliases": [target.runtime_id]}


def _labels(target: Target) -> dict[str, str]:
    """Return the labels that the kubelet sets on containers and sandboxes."""
    if target.kind not in ("container", "sandbox"):
        return {}
    return {label: value for label, name in _POD_LABELS if (value := getattr(target, name))}
