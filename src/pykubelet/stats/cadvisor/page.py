"""Snapshot of the records for one page of `/metrics/cadvisor`.

The page is written in chunks, and the collector updates records between them. The snapshot refers to the
immutable samples of one time, so all families of a page report the same samples. It has about 300 bytes per
record. A record without a usage sample is omitted, as is a part that was not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from pykubelet.stats.container_hints import Hints
from pykubelet.stats.exposition import label_texts, render_labels, stamp
from pykubelet.stats.samples import (
    NO_LOAD,
    CpuLoad,
    Details,
    FilesystemUsage,
    LabelTexts,
    Limits,
    MachineFacts,
    NetworkInterface,
    Record,
    Target,
    Usage,
)
from pykubelet.util.metrics import escape_label

_STEP_RECORDS = 64
"""Records after which `CadvisorPage.load` yields."""


class CgroupRow(NamedTuple):
    """Samples of a cgroup, and its labels."""

    series: str
    usage: Usage
    usage_stamp: str
    details: Details | None
    details_stamp: str
    limits: Limits
    texts: LabelTexts
    oom_events: int
    load: CpuLoad
    no_stamp: str = ""


class NetworkRow(NamedTuple):
    """Network interfaces of a pod or of the host."""

    texts: LabelTexts
    interfaces: tuple[NetworkInterface, ...]
    stamp: str


class DiskRow(NamedTuple):
    """A mounted file system, by the escaped name of its device, and the labels of its cgroup."""

    device: str
    filesystem: FilesystemUsage
    stamp: str
    texts: LabelTexts


class CadvisorPage:
    """Rows of one page, by what the families of the page read."""

    def __init__(
        self,
        *,
        machine: MachineFacts,
        filesystems: Iterable[FilesystemUsage],
        device_name: Callable[[int, int], str],
        now: float,
        has_error: bool,
        lean: bool,
        hints: Hints,
    ) -> None:
        self.machine = machine
        self.has_error = has_error
        self.now = int(now)
        self.now_stamp = stamp(now)
        self.cgroups: list[CgroupRow] = []
        self.detailed: list[CgroupRow] = []
        """Cgroups whose details were read."""
        self.throttled: list[CgroupRow] = []
        """Those of `detailed` with a CPU quota."""
        self.device_names: dict[tuple[int, int], str] = {}
        """Escaped names of block devices, by major and minor number."""
        self.network: list[NetworkRow] = []
        found = list(filesystems)
        self.filesystems = list(_disk_rows(found, render_labels(Target(path="/", kind="root"))))
        """File systems of the host, which cAdvisor reports for the root cgroup, and those of hints."""
        self.disks = [] if lean else self.filesystems
        """File systems whose device counters are reported as I/O of their cgroup."""
        self._mounted = found if hints else []
        self._hints = hints
        self._device_name = device_name
        self._lean = lean

    def load(self, records: Sequence[Record]) -> Iterator[None]:
        """Add the records, sorted as in the page; yield every few records."""
        ordered = sorted(records, key=lambda record: (record.target.container, record.target.path))
        for start in range(0, len(ordered), _STEP_RECORDS):
            for record in ordered[start : start + _STEP_RECORDS]:
                self._add(record)
            yield

    def _add(self, record: Record) -> None:
        usage, kind = record.usage, record.target.kind
        if usage is None:
            return
        texts = label_texts(record)
        if record.network and (not self._lean or kind == "sandbox"):
            self.network.append(NetworkRow(texts, record.network, stamp(record.network_time or usage.time)))
        if self._lean and kind != "container":
            return
        time, limits, details = stamp(usage.time), record.limits, record.details
        if kind == "root":
            # cAdvisor reports the host's memory as the limits of the root cgroup.
            limits = replace(
                limits,
                memory_limit=self.machine.memory,
                memory_swap_limit=self.machine.swap,
                has_memory=True,
            )
        details_time = time if record.details_time in (0.0, usage.time) else stamp(record.details_time)
        load = record.load or NO_LOAD
        row = CgroupRow(
            texts.series, usage, time, details, details_time, limits, texts, record.oom_events, load
        )
        self.cgroups.append(row)
        if kind in ("node", "pod") and (mount_points := self._hints.get(record.target.path)):
            hinted = [each for each in self._mounted if each.mount_point in mount_points]
            self.filesystems += _disk_rows(hinted, texts)
        if details is None:
            return
        self.detailed.append(row)
        if limits.cpu_quota:
            self.throttled.append(row)
        for io in details.io:
            device = io.major, io.minor
            if device not in self.device_names:
                self.device_names[device] = escape_label(self._device_name(*device))


def _disk_rows(filesystems: Iterable[FilesystemUsage], texts: LabelTexts) -> Iterator[DiskRow]:
    seen: set[str] = set()
    for filesystem in sorted(filesystems, key=lambda filesystem: filesystem.device):
        if filesystem.device not in seen:
            seen.add(filesystem.device)
            yield DiskRow(escape_label(filesystem.device), filesystem, stamp(filesystem.time), texts)
