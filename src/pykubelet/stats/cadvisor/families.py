"""Families of `/metrics/cadvisor` about cgroups: CPU, memory, processes, limits and pressure.

CPU load and task states are 0 unless `--enable-load-reader` is set, as upstream. The health state, which
cAdvisor never measures in the kubelet, is a constant here as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

from pykubelet.stats.cadvisor.page import CadvisorPage, CgroupRow
from pykubelet.stats.exposition import Family, Kind, Value, multiple, plain
from pykubelet.stats.samples import UNLIMITED, CpuLoad, Limits, Psi, Usage

Page = CadvisorPage
_NANOSECONDS = 1e9
_MICROSECONDS = 1e6
_TASK_STATES = {
    "iowaiting": "io_wait",
    "running": "running",
    "sleeping": "sleeping",
    "stopped": "stopped",
    "uninterruptible": "uninterruptible",
}
"""Field of TaskStates by label."""
_MILLI = 1000
"""cAdvisor reports averages of tasks in thousandths."""


def _usage(name: str, kind: Kind, text: str, value: str | Value) -> Family[Page]:
    return _plain(name, kind, text, attrgetter("cgroups"), value, "usage", "usage_stamp")


def _details(name: str, kind: Kind, text: str, value: str | Value) -> Family[Page]:
    return _plain(name, kind, text, attrgetter("detailed"), value, "details", "details_stamp")


_LOAD_FLAG = "0 without --enable-load-reader and cgroup v1."


def _load(name: str, text: str, field: str) -> Family[Page]:
    average: Callable[[CpuLoad], float] = attrgetter(field)
    return _plain(
        name,
        "gauge",
        text,
        attrgetter("cgroups"),
        lambda load: int(average(load) * _MILLI),
        "load",
        "usage_stamp",
    )


def _throttled(name: str, text: str, value: str | Value) -> Family[Page]:
    return _plain(name, "counter", text, attrgetter("throttled"), value, "details", "details_stamp")


def _limit(name: str, text: str, value: str | Value) -> Family[Page]:
    return _plain(name, "gauge", text, attrgetter("cgroups"), value, "limits", "no_stamp")


def _plain(
    name: str,
    kind: Kind,
    text: str,
    rows: Callable[[Page], list[CgroupRow]],
    value: str | Value,
    sample: str,
    time: str,
) -> Family[Page]:
    index = CgroupRow._fields.index
    read = attrgetter(value) if isinstance(value, str) else value
    return plain(name, kind, text, rows, read, sample=index(sample), time=index(time))


def _memory_limit(name: str, text: str, value: Callable[[Limits], int]) -> Family[Page]:
    def lines(name: str, page: Page) -> Iterator[str]:
        for row in page.cgroups:
            if row.limits.has_memory:
                limit = value(row.limits)
                yield f"{name}{row.series}}} {0 if limit > UNLIMITED else limit}\n"

    return multiple(name, "gauge", text, lines)


def _pressure(resource: str, psi: Callable[[Usage], Psi]) -> Iterator[Family[Page]]:
    name = f"container_pressure_{resource}"
    yield _usage(
        f"{name}_stalled_seconds_total",
        "counter",
        f"Time for which all tasks waited for {resource}, in seconds.",
        lambda usage: psi(usage).full.total / _MICROSECONDS,
    )
    yield _usage(
        f"{name}_waiting_seconds_total",
        "counter",
        f"Time for which some tasks waited for {resource}, in seconds.",
        lambda usage: psi(usage).some.total / _MICROSECONDS,
    )


def _cpu_usage(name: str, page: Page) -> Iterator[str]:
    for row in page.cgroups:
        if row.usage.cpu:
            labels = f'{row.texts.container},cpu="total"{row.texts.tail}'
            yield f"{name}{labels}}} {row.usage.cpu / _NANOSECONDS}{row.usage_stamp}\n"


def _memory_failures(name: str, page: Page) -> Iterator[str]:
    for row in page.cgroups:
        texts, usage = row.texts, row.usage
        minor = f'{name}{texts.container},failure_type="pgfault"{texts.tail},scope='
        major = f'{name}{texts.container},failure_type="pgmajfault"{texts.tail},scope='
        end_minor = f"}} {usage.page_faults}{row.usage_stamp}\n"
        end_major = f"}} {usage.major_page_faults}{row.usage_stamp}\n"
        yield (
            f'{minor}"container"{end_minor}{minor}"hierarchy"{end_minor}'
            f'{major}"container"{end_major}{major}"hierarchy"{end_major}'
        )


def _tasks(name: str, page: Page) -> Iterator[str]:
    for row in page.cgroups:
        start, tasks, end = f"{name}{row.series},state=", row.load.tasks, f"{row.usage_stamp}\n"
        yield "".join(
            [f'{start}"{state}"}} {getattr(tasks, field)}{end}' for state, field in _TASK_STATES.items()]
        )


def _oom_events(name: str, page: Page) -> Iterator[str]:
    for row in page.cgroups:
        yield f"{name}{row.series}}} {row.oom_events}{row.usage_stamp}\n"


def _last_seen(name: str, page: Page) -> Iterator[str]:
    end = f"}} {page.now}{page.now_stamp}\n"
    for row in page.cgroups:
        yield f"{name}{row.series}{end}"


def _open_files(name: str, page: Page) -> Iterator[str]:
    for row in page.detailed:
        if row.details is not None and (limit := row.details.max_open_files) is not None:
            yield f'{name}{row.series},ulimit="max_open_files"}} {limit}{row.details_stamp}\n'


def _cpu_quota(name: str, page: Page) -> Iterator[str]:
    for row in page.cgroups:
        if row.limits.cpu_quota:
            yield f"{name}{row.series}}} {row.limits.cpu_quota}\n"


_CPU = (
    _load(
        "container_cpu_load_average_10s", f"Thousandths of running tasks, smoothed; {_LOAD_FLAG}", "running"
    ),
    _load(
        "container_cpu_load_d_average_10s",
        f"Thousandths of uninterruptible tasks, smoothed; {_LOAD_FLAG}",
        "uninterruptible",
    ),
    multiple("container_tasks_state", "gauge", f"Tasks by state; {_LOAD_FLAG}", _tasks),
    multiple("container_cpu_usage_seconds_total", "counter", "CPU time used, in seconds.", _cpu_usage),
    _details(
        "container_cpu_user_seconds_total",
        "counter",
        "CPU time used in user mode, in seconds.",
        lambda details: details.cpu_user / _NANOSECONDS,
    ),
    _details(
        "container_cpu_system_seconds_total",
        "counter",
        "CPU time used in kernel mode, in seconds.",
        lambda details: details.cpu_system / _NANOSECONDS,
    ),
    _throttled("container_cpu_cfs_periods_total", "Enforcement periods of the CPU quota.", "periods"),
    _throttled(
        "container_cpu_cfs_throttled_periods_total",
        "Enforcement periods in which the CPU quota was exhausted.",
        "throttled_periods",
    ),
    _throttled(
        "container_cpu_cfs_throttled_seconds_total",
        "Time for which tasks were throttled, in seconds.",
        lambda details: details.throttled / _NANOSECONDS,
    ),
    _throttled(
        "container_cpu_cfs_burst_periods_total",
        "Enforcement periods in which CPU burst was used.",
        "burst_periods",
    ),
    _throttled(
        "container_cpu_cfs_burst_seconds_total",
        "CPU time used as burst above the quota, in seconds.",
        lambda details: details.burst / _NANOSECONDS,
    ),
)
_MEMORY = (
    _usage("container_memory_cache", "gauge", "Page cache in bytes.", "cache"),
    _usage("container_memory_rss", "gauge", "Anonymous memory (RSS) in bytes.", "rss"),
    _usage("container_memory_mapped_file", "gauge", "Memory-mapped files in bytes.", "mapped_file"),
    _usage("container_memory_swap", "gauge", "Swap usage in bytes.", "swap"),
    _usage("container_memory_usage_bytes", "gauge", "Memory usage in bytes, with page cache.", "memory"),
    _usage(
        "container_memory_working_set_bytes",
        "gauge",
        "Memory usage in bytes without inactive page cache.",
        "working_set",
    ),
    _usage("container_memory_total_active_file_bytes", "gauge", "Active page cache in bytes.", "active_file"),
    _usage(
        "container_memory_total_inactive_file_bytes",
        "gauge",
        "Inactive page cache in bytes.",
        "inactive_file",
    ),
    multiple("container_memory_failures_total", "counter", "Page faults.", _memory_failures),
    _details(
        "container_memory_kernel_usage", "gauge", "Kernel memory in bytes (cgroup v1).", "kernel_memory"
    ),
    _details("container_memory_max_usage_bytes", "gauge", "Highest memory usage in bytes.", "max_memory"),
    _details(
        "container_memory_failcnt", "counter", "Number of times the memory limit was hit.", "memory_failures"
    ),
    multiple("container_oom_events_total", "counter", "Out-of-memory kills.", _oom_events),
)
_PROCESSES = (
    _details("container_processes", "gauge", "Processes.", "processes"),
    _details("container_file_descriptors", "gauge", "Open file descriptors.", "file_descriptors"),
    _details("container_sockets", "gauge", "Open sockets.", "sockets"),
    _details("container_threads", "gauge", "Threads.", "threads"),
    _details("container_threads_max", "gauge", "Limit on threads, 0 for no limit.", "max_threads"),
    multiple("container_ulimits_soft", "gauge", "Soft limits of the first process.", _open_files),
)
_SPEC = (
    _usage("container_health_state", "gauge", "Health; not measured, always -1.", lambda _: -1),
    multiple("container_last_seen", "gauge", "Time of the scrape, in seconds since 1970.", _last_seen),
    _limit(
        "container_start_time_seconds",
        "Creation time of the cgroup, in seconds since 1970.",
        lambda limits: int(limits.created),
    ),
    _limit("container_spec_cpu_period", "Enforcement period of the CPU quota in microseconds.", "cpu_period"),
    _limit("container_spec_cpu_shares", "CPU shares.", "cpu_shares"),
    multiple("container_spec_cpu_quota", "gauge", "CPU quota in microseconds per period.", _cpu_quota),
    _memory_limit("container_spec_memory_limit_bytes", "Memory limit in bytes.", attrgetter("memory_limit")),
    _memory_limit(
        "container_spec_memory_reservation_limit_bytes",
        "Memory reservation in bytes.",
        attrgetter("memory_reservation"),
    ),
    _memory_limit(
        "container_spec_memory_swap_limit_bytes", "Swap limit in bytes.", attrgetter("memory_swap_limit")
    ),
)

CGROUP_FAMILIES: tuple[Family[Page], ...] = (*_CPU, *_MEMORY, *_PROCESSES, *_SPEC)
PRESSURE_FAMILIES: tuple[Family[Page], ...] = (
    *_pressure("cpu", attrgetter("cpu_psi")),
    *_pressure("io", attrgetter("io_psi")),
    *_pressure("memory", attrgetter("memory_psi")),
)
