"""Text of `/metrics/cadvisor`, whole or in the lean profile.

The whole page has the series of the upstream kubelet. The lean profile has only those that the common
dashboards and alerts read, about a tenth: of containers CPU, throttling, memory and I/O, of sandboxes the
network, of the host the usage of file systems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pykubelet.stats.cadvisor.devices import DEVICE_FAMILIES
from pykubelet.stats.cadvisor.families import CGROUP_FAMILIES, PRESSURE_FAMILIES
from pykubelet.stats.cadvisor.page import CadvisorPage
from pykubelet.stats.container_hints import NO_HINTS, Hints
from pykubelet.stats.exposition import Family, chunks
from pykubelet.stats.samples import FilesystemUsage, MachineFacts, Record

LEAN_NAMES = frozenset(
    {
        *("container_cpu_usage_seconds_total", "container_cpu_cfs_periods_total"),
        *("container_cpu_cfs_throttled_periods_total", "container_memory_working_set_bytes"),
        *("container_memory_rss", "container_memory_cache", "container_memory_swap"),
        *("container_fs_reads_total", "container_fs_writes_total"),
        *("container_fs_reads_bytes_total", "container_fs_writes_bytes_total"),
        *("container_fs_usage_bytes", "container_fs_limit_bytes"),
        *(
            f"container_network_{direction}_{counter}_total"
            for direction in ("receive", "transmit")
            for counter in ("bytes", "packets", "packets_dropped")
        ),
    }
)
"""Metrics that the kubernetes-mixin, prometheus-adapter and OpenCost read from `/metrics/cadvisor`."""


def _sorted(*families: Family[CadvisorPage]) -> tuple[Family[CadvisorPage], ...]:
    return tuple(sorted(families, key=lambda family: family.name))


_FAMILIES = _sorted(*CGROUP_FAMILIES, *DEVICE_FAMILIES)
_ALL_FAMILIES = _sorted(*_FAMILIES, *PRESSURE_FAMILIES)
_LEAN_FAMILIES = tuple(family for family in _FAMILIES if family.name in LEAN_NAMES)


def cadvisor_chunks(
    records: Sequence[Record],
    *,
    filesystems: Sequence[FilesystemUsage],
    device_name: Callable[[int, int], str],
    machine: MachineFacts,
    now: float,
    has_pressure: bool = False,
    has_error: bool = False,
    lean: bool = False,
    machine_only: bool = False,
    hints: Hints = NO_HINTS,
) -> Iterator[bytes]:
    """Yield the page in chunks of at most `MAX_CHUNK_BYTES`; the first ones may be empty.

    The caller may run other tasks after each chunk; a step between two of them takes about a millisecond.
    `has_pressure` adds pressure stall information (cgroup v2). `machine_only` omits everything but the
    constants of the host: the runtime provides the rest. `hints` are file systems of cgroups.
    """
    page = CadvisorPage(
        machine=machine,
        filesystems=filesystems,
        device_name=device_name,
        now=now,
        has_error=has_error,
        lean=lean,
        hints=hints,
    )
    for _ in page.load(records):
        yield b""
    families = _LEAN_FAMILIES if lean else _ALL_FAMILIES if has_pressure else _FAMILIES
    if machine_only:
        families = tuple(family for family in families if family.name.startswith("machine_"))
    yield from chunks(families, page)
