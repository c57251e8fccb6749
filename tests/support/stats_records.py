"""Records of statistics: those of a busy node, and those that a recorded page was written from."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from pykubelet.stats.samples import (
    Details,
    DeviceIo,
    DiskIo,
    FilesystemUsage,
    Limits,
    MachineFacts,
    NetworkInterface,
    Psi,
    PsiLine,
    Record,
    Target,
    Usage,
)
from tests.support.prometheus_text import Family, Sample, Series

NOW = 1794921953.138
MACHINE = MachineFacts(
    machine_id="3d12",
    system_uuid="3d12",
    boot_id="c80e",
    cores=2,
    physical_cores=2,
    sockets=1,
    memory=25 << 30,
)
FILESYSTEM = FilesystemUsage(
    time=NOW,
    device="/dev/vda",
    major=254,
    minor=0,
    capacity=270 << 30,
    available=200 << 30,
    used=70 << 30,
    inodes=1 << 24,
    inodes_free=1 << 23,
    io=DiskIo(reads=530366, writes=868766, io_ms=233464),
)
IO = DeviceIo(major=254, minor=0, bytes={"Read": 4096, "Write": 8192}, operations={"Read": 1, "Write": 2})
PRESSURE = Psi(some=PsiLine(total=1_500_000), full=PsiLine(total=500_000))


def device_name(major: int, minor: int) -> str:
    return "/dev/vda" if (major, minor) == (254, 0) else ""


def usage(**changes: Any) -> Usage:
    numbers = dict.fromkeys(("rss", "cache", "mapped_file", "active_file", "inactive_file"), 3_514_368)
    known = {"time": NOW - 5.25, "cpu": 44_525_764_729, "memory": 38_576_128, "working_set": 35_143_680}
    pressure = dict.fromkeys(("cpu_psi", "memory_psi", "io_psi"), PRESSURE)
    return Usage(**{**known, **numbers, **pressure, "page_faults": 182541, **changes})


def record(kind: Any, path: str, *, network: tuple[str, ...] | None = None, **names: Any) -> Record:
    target = Target(path=path, kind=kind, **names)
    return Record(
        target=target,
        limits=Limits(
            created=NOW - 100, cpu_shares=1024, cpu_period=100_000, cpu_quota=10_000, memory_limit=1 << 27
        ),
        usage=usage(),
        nano_cores=1,
        details=Details(cpu_user=33_830_000_000, processes=3, max_open_files=1024, io=(IO,)),
        details_time=NOW - 5.25,
        network=None if network is None else tuple(interface(name) for name in network),
        network_time=NOW - 5.25,
    )


def interface(name: str) -> NetworkInterface:
    names = ("bytes", "packets", "errors", "dropped")
    return NetworkInterface(
        name=name, **{f"{way}_{counter}": 12345 for way in ("rx", "tx") for counter in names}
    )


def node_records(pods: int, containers: int = 1) -> list[Record]:
    """Return the records of a node: the root, QoS cgroups, and a cgroup, sandbox and containers per pod."""
    records = [record("root", "/", network=("eth0",))]
    records += [record("node", path) for path in ("/kubepods", "/kubepods/burstable", "/kubepods/besteffort")]
    for number in range(pods):
        uid = f"1dfdd3bd-f9c5-49b8-85bf-4782da43{number:04x}"
        names: dict[str, Any] = {
            "namespace": "production",
            "pod": f"frontend-5d89cbd8b-{number:05}",
            "pod_uid": uid,
        }
        path = f"/kubepods/burstable/pod{uid}"
        records.append(record("pod", path, **names))
        sandbox = f"{number:08x}" + "ab" * 28
        image = "registry.k8s.io/pause:3.10"
        records.append(
            record(
                "sandbox", f"{path}/{sandbox}", network=("eth0",), runtime_id=sandbox, image=image, **names
            )
        )
        for index in range(containers):
            runtime_id = f"{number:08x}{index:04x}" + "cd" * 26
            records.append(
                record(
                    "container",
                    f"{path}/{runtime_id}",
                    runtime_id=runtime_id,
                    container=f"server-{index}",
                    image="registry.example.com/team/frontend:v1.42.0",
                    created=NOW - 90,
                    **names,
                )
            )
    return records


_ROOT = "/"


class RecordedPage:
    """The samples of a recorded `/metrics/cadvisor` page as the readers return them."""

    def __init__(self, families: dict[str, Family]) -> None:
        self._by_cgroup: dict[str, dict[Series, Sample]] = defaultdict(dict)
        self._all: dict[Series, Sample] = {}
        for family in families.values():
            self._all.update(family.samples)
            for series, sample in family.samples.items():
                if series.get("id"):
                    self._by_cgroup[series.get("id")][series] = sample

    def machine(self) -> MachineFacts:
        """Return the recorded constants of the host."""
        (cores,) = (series for series in self._all if series.name == "machine_cpu_cores")
        (version,) = (series for series in self._all if series.name == "cadvisor_version_info")
        return MachineFacts(
            machine_id=cores.get("machine_id"),
            system_uuid=cores.get("system_uuid"),
            boot_id=cores.get("boot_id"),
            kernel_version=version.get("kernelVersion"),
            os_version=version.get("osVersion"),
            cores=self._constant("machine_cpu_cores"),
            physical_cores=self._constant("machine_cpu_physical_cores"),
            sockets=self._constant("machine_cpu_sockets"),
            memory=self._constant("machine_memory_bytes"),
            swap=self._constant("machine_swap_bytes"),
        )

    def filesystems(self) -> Iterator[FilesystemUsage]:
        """Yield the recorded file systems."""
        root = self._by_cgroup[_ROOT]
        for limit in [series for series in root if series.name == "container_fs_limit_bytes"]:
            values = {
                series.name.removeprefix("container_fs_"): sample.value
                for series, sample in root.items()
                if series.get("device") == limit.get("device")
            }

            def whole(name: str, factor: float = 1, values: dict[str, float] = values) -> int:
                return round(values[name] * factor)

            yield FilesystemUsage(
                time=(root[limit].time or 0) / 1000,
                device=limit.get("device"),
                major=0,
                minor=0,
                capacity=whole("limit_bytes"),
                available=0,
                used=whole("usage_bytes"),
                inodes=whole("inodes_total"),
                inodes_free=whole("inodes_free"),
                io=DiskIo(
                    reads=whole("reads_total"),
                    reads_merged=whole("reads_merged_total"),
                    sectors_read=whole("sector_reads_total"),
                    read_ms=whole("read_seconds_total", 1e9),
                    writes=whole("writes_total"),
                    writes_merged=whole("writes_merged_total"),
                    sectors_written=whole("sector_writes_total"),
                    write_ms=whole("write_seconds_total", 1e9),
                    in_progress=whole("io_current"),
                    io_ms=whole("io_time_seconds_total", 1e9),
                    weighted_io_ms=whole("io_time_weighted_seconds_total", 1e9),
                ),
            )

    def records(self) -> Iterator[Record]:
        """Yield the recorded cgroups."""
        for path, samples in self._by_cgroup.items():
            yield self._record(path, samples)

    def _record(self, path: str, samples: dict[Series, Sample]) -> Record:
        names = next(iter(samples))
        first = {series.name: sample for series, sample in reversed(samples.items())}

        def whole(name: str, factor: float = 1) -> int:
            return round(first[name].value * factor) if name in first else 0

        def faults(kind: str) -> int:
            return round(
                next(
                    sample.value
                    for series, sample in samples.items()
                    if series.get("failure_type") == kind and series.get("scope") == "container"
                )
            )

        time = (first["container_memory_rss"].time or 0) / 1000
        memory = "container_memory_"
        return Record(
            target=Target(
                path=path,
                kind="root" if path == _ROOT else "pod" if names.get("pod") else "node",
                namespace=names.get("namespace"),
                pod=names.get("pod"),
            ),
            limits=Limits(
                created=first["container_start_time_seconds"].value,
                cpu_shares=whole("container_spec_cpu_shares"),
                cpu_period=whole("container_spec_cpu_period"),
                cpu_quota=whole("container_spec_cpu_quota"),
                memory_limit=whole("container_spec_memory_limit_bytes") or (1 << 63) - 4096,
                memory_reservation=whole("container_spec_memory_reservation_limit_bytes") or (1 << 63) - 4096,
                memory_swap_limit=whole("container_spec_memory_swap_limit_bytes"),
            ),
            usage=Usage(
                time=time,
                cpu=whole("container_cpu_usage_seconds_total", 1e9),
                memory=whole(memory + "usage_bytes"),
                working_set=whole(memory + "working_set_bytes"),
                rss=whole(memory + "rss"),
                cache=whole(memory + "cache"),
                mapped_file=whole(memory + "mapped_file"),
                active_file=whole(memory + "total_active_file_bytes"),
                inactive_file=whole(memory + "total_inactive_file_bytes"),
                swap=whole(memory + "swap"),
                page_faults=faults("pgfault"),
                major_page_faults=faults("pgmajfault"),
            ),
            details=Details(
                cpu_user=whole("container_cpu_user_seconds_total", 1e9),
                cpu_system=whole("container_cpu_system_seconds_total", 1e9),
                periods=whole("container_cpu_cfs_periods_total"),
                throttled_periods=whole("container_cpu_cfs_throttled_periods_total"),
                throttled=whole("container_cpu_cfs_throttled_seconds_total", 1e9),
                max_memory=whole(memory + "max_usage_bytes"),
                memory_failures=whole(memory + "failcnt"),
                kernel_memory=whole(memory + "kernel_usage"),
                threads=whole("container_threads"),
                max_threads=whole("container_threads_max"),
                processes=whole("container_processes"),
                file_descriptors=whole("container_file_descriptors"),
                sockets=whole("container_sockets"),
                max_open_files=whole("container_ulimits_soft") if "container_ulimits_soft" in first else None,
            ),
            details_time=time,
            network=tuple(self._interfaces(samples)) or None,
            network_time=time,
            oom_events=whole("container_oom_events_total"),
        )

    def _interfaces(self, samples: dict[Series, Sample]) -> Iterator[NetworkInterface]:
        for name in dict.fromkeys(series.get("interface") for series in samples):
            if not name:
                continue
            found = {s.name: round(v.value) for s, v in samples.items() if s.get("interface") == name}
            counters = {
                f"{short}_{counter}": found[f"container_network_{way}_{upstream}_total"]
                for short, way in (("rx", "receive"), ("tx", "transmit"))
                for counter, upstream in (
                    ("bytes", "bytes"),
                    ("packets", "packets"),
                    ("errors", "errors"),
                    ("dropped", "packets_dropped"),
                )
            }
            yield NetworkInterface(name=name, **counters)

    def _constant(self, name: str) -> int:
        (value,) = (sample.value for series, sample in self._all.items() if series.name == name)
        return round(value)
