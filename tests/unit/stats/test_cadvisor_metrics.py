"""Text of `/metrics/cadvisor`, compared with a recording of the upstream kubelet."""

import gc
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from pykubelet.stats.cadvisor.metrics import _ALL_FAMILIES, LEAN_NAMES, cadvisor_chunks
from pykubelet.stats.exposition import MAX_CHUNK_BYTES
from pykubelet.stats.samples import Details, DeviceIo, MemoryModules, NetworkInterface, Record
from tests.support import stats_records
from tests.support.prometheus_text import Series, compare, parse, parse_families
from tests.support.stats_records import (
    FILESYSTEM,
    MACHINE,
    NOW,
    RecordedPage,
    device_name,
    node_records,
    record,
)

RECORDING = Path(__file__).parents[2] / "data" / "golden" / "stats" / "cadvisor.prom"
METRICS_TABLE = Path(__file__).parents[2] / "data" / "metrics.tsv"
ODD_NAMES = [
    'a"b',
    "a\\b",
    "a\nb",
    'a\\"\n',
    "\u00e4\u4e16\U0001f600",
    "bad\udc80\ud800byte",
    "x" * 5000,
    "a,b={}",
]


def chunks(records: Iterable[Record], **options: Any) -> list[bytes]:
    known = {"filesystems": [FILESYSTEM], "device_name": device_name, "machine": MACHINE, "now": NOW}
    return list(cadvisor_chunks(list(records), **{**known, **options}))


def page(records: Iterable[Record], **options: Any) -> str:
    return b"".join(chunks(records, **options)).decode()


def series_of(text: str, name: str) -> dict[Series, float]:
    return {series: value for series, value in parse(text).items() if series.name == name}


def replaced(records: Sequence[Record], kind: str, **changes: Any) -> list[Record]:
    return [replace(found, **changes) if found.target.kind == kind else found for found in records]


def test_cadvisor_chunks_recorded_cgroups_equal_recording() -> None:
    recorded = parse_families(RECORDING.read_text())
    source = RecordedPage(recorded)
    text = page(
        list(source.records())[::-1], filesystems=list(source.filesystems()), machine=source.machine()
    )
    found = parse_families(text)
    assert list(found) == list(recorded)
    for name, family in recorded.items():
        ours = found[name]
        assert (ours.kind, ours.label_order) == (family.kind, family.label_order), name
        assert ours.samples.keys() == family.samples.keys(), name
        for series, sample in family.samples.items():
            assert ours.samples[series].value == sample.value, series
            if name != "container_last_seen":
                assert ours.samples[series].time == sample.time, series
            assert (ours.samples[series].time is None) == (sample.time is None), series


def test_cadvisor_chunks_busy_node_labels_as_of_connected_runtime() -> None:
    text = page(node_records(1))
    memory = {series.get("id").count("/"): series for series in series_of(text, "container_memory_rss")}
    assert {
        "container": "",
        "image": "",
        "name": "",
        "namespace": "",
        "pod": "",
        "id": "/kubepods",
    }.items() == (
        dict(
            next(s for s in series_of(text, "container_memory_rss") if s.get("id") == "/kubepods").labels
        ).items()
    )
    pod = dict(memory[3].labels)
    assert (pod["container"], pod["image"], pod["name"]) == ("", "", "")
    assert (pod["namespace"], pod["pod"]) == ("production", "frontend-5d89cbd8b-00000")
    (container,) = (series for series in series_of(text, "container_memory_rss") if series.get("container"))
    assert container.get("id").endswith(container.get("name"))
    assert container.get("image").startswith("registry.example.com")
    networks = {
        series.without("id", "image", "name").labels
        for series in series_of(text, "container_network_receive_bytes_total")
    }
    assert networks == {
        (("container", ""), ("interface", "eth0"), ("namespace", ""), ("pod", "")),
        (
            ("container", ""),
            ("interface", "eth0"),
            ("namespace", "production"),
            ("pod", "frontend-5d89cbd8b-00000"),
        ),
    }
    (blkio,) = (
        series
        for series in series_of(text, "container_blkio_device_usage_total")
        if series.get("container") and series.get("operation") == "Write"
    )
    assert (blkio.get("device"), blkio.get("major"), blkio.get("minor")) == ("/dev/vda", "254", "0")
    order = parse_families(text)["container_blkio_device_usage_total"].label_order
    assert all(list(names) == sorted(names) for names in order)


def test_cadvisor_chunks_other_parser_accepts_page() -> None:
    text = page(node_records(2), has_pressure=True)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert len(samples) == len(parse(text))


def test_cadvisor_chunks_pressure_in_seconds() -> None:
    text = page(node_records(0), has_pressure=True)
    assert set(series_of(text, "container_pressure_cpu_waiting_seconds_total").values()) == {1.5}
    assert set(series_of(text, "container_pressure_io_stalled_seconds_total").values()) == {0.5}
    assert "container_pressure" not in page(node_records(0))


def test_cadvisor_chunks_device_known_to_cgroup_and_host_reported_once() -> None:
    (io,) = (found.details.io for found in node_records(0)[:1] if found.details)
    text = page(node_records(0))
    reads = series_of(text, "container_fs_reads_total")
    assert [value for series, value in reads.items() if series.get("id") == "/"] == [io[0].operations["Read"]]
    assert series_of(text, "container_fs_sector_reads_total").keys() == {
        Series("container_fs_sector_reads_total", next(s.labels for s in reads if s.get("id") == "/"))
    }


def test_cadvisor_chunks_io_cost_counters_in_seconds_where_device_has_them() -> None:
    """Verify that a device without a cost model, or without debug counters, has no series."""
    container = record("container", "/kubepods/pod1/c", container="main", pod="p", namespace="n")
    assert container.details is not None
    container.details = replace(
        container.details,
        io=(
            DeviceIo(major=254, minor=0, bytes={"Read": 1}, cost={"usage": 1_500_000, "wait": 0}),
            DeviceIo(major=254, minor=16, bytes={"Read": 1}),
        ),
    )
    text = page([container])
    cost = "container_fs_io_cost"
    (usage,) = series_of(text, f"{cost}_usage_seconds_total")
    assert usage.get("device") == "/dev/vda"
    assert [name for name, _ in usage.labels] == [
        *("container", "device", "id", "image", "name", "namespace", "pod")
    ]
    values = {series.name: value for series, value in parse(text).items() if series.name.startswith(cost)}
    assert values == {f"{cost}_usage_seconds_total": 1.5, f"{cost}_wait_seconds_total": 0}
    assert f"# TYPE {cost}_usage_seconds_total counter\n" in text


def test_cadvisor_chunks_unnamed_devices_first_reported() -> None:
    unnamed = [DeviceIo(major=7, minor=n, bytes={"Read": n}, operations={}) for n in range(3)]
    records = node_records(1)
    details = Details(io=tuple(unnamed))
    text = page(replaced(records, "container", details=details))
    found = {
        s.get("device"): v
        for s, v in series_of(text, "container_fs_reads_bytes_total").items()
        if s.get("container")
    }
    assert found == {"": 0}
    assert not any(series.get("container") for series in series_of(text, "container_fs_reads_total"))
    assert len([s for s in series_of(text, "container_blkio_device_usage_total") if s.get("container")]) == 3


def test_cadvisor_chunks_no_usage_record_omitted() -> None:
    text = page(replaced(node_records(1), "container", usage=None))
    assert not [series for series in parse(text) if series.get("container")]


def test_cadvisor_chunks_no_details_only_usage_reported() -> None:
    text = page(replaced(node_records(1), "container", details=None))
    names = {series.name for series in parse(text) if series.get("container")}
    assert "container_memory_rss" in names
    assert "container_spec_cpu_quota" in names
    assert not names & {"container_threads", "container_cpu_cfs_periods_total", "container_fs_reads_total"}


def test_cadvisor_chunks_no_cpu_time_series_omitted() -> None:
    idle = stats_records.usage(cpu=0)
    text = page(replaced(node_records(1), "container", usage=idle))
    assert not [s for s in series_of(text, "container_cpu_usage_seconds_total") if s.get("container")]


def test_cadvisor_chunks_no_memory_controller_limits_omitted() -> None:
    records = node_records(1)
    limits = replace(records[-1].limits, has_memory=False)
    text = page([replace(found, limits=limits) for found in records])
    assert [s.get("id") for s in series_of(text, "container_spec_memory_limit_bytes")] == ["/"]
    assert len(series_of(text, "container_spec_cpu_shares")) == len(records)


def test_cadvisor_chunks_large_counters_exact_as_float64() -> None:
    big = 2**64 - 1
    text = page(replaced(node_records(0), "root", usage=stats_records.usage(memory=big, cpu=big)))
    assert max(series_of(text, "container_memory_usage_bytes").values()) == float(big)
    assert max(series_of(text, "container_cpu_usage_seconds_total").values()) == float(big) / 1e9


@pytest.mark.parametrize("name", ODD_NAMES)
def test_cadvisor_chunks_odd_label_values_escaped(name: str) -> None:
    records = node_records(1)
    target = replace(records[-1].target, container=name, image=name, path=f"/{name}", pod=name)
    interface = replace(stats_records.interface("eth0"), name=name)
    odd = replace(records[-1], target=target, network=(interface,), labels=None)
    text = page([odd], filesystems=[replace(FILESYSTEM, device=name)], device_name=lambda *_: name)
    shown = name.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    for series in parse(text):
        if series.get("id") not in ("", "/"):
            labels = dict(series.labels)
            assert {labels[label] for label in ("container", "image", "pod")} == {shown}
            assert labels["id"] == f"/{shown}"
            assert labels.get("interface", shown) == labels.get("device", shown) == shown


def test_cadvisor_chunks_changed_target_labels_rendered_again() -> None:
    records = node_records(1)
    page(records)
    container = records[-1]
    cached = container.labels
    page(records)
    assert container.labels is cached
    container.target = replace(container.target, image="other")
    assert {s.get("image") for s in parse(page(records)) if s.get("container")} == {"other"}


def test_cadvisor_chunks_record_updated_between_chunks_page_consistent() -> None:
    records = node_records(30)
    source = cadvisor_chunks(
        records, filesystems=(), device_name=device_name, machine=MACHINE, now=NOW, has_pressure=True
    )
    text = b""
    for chunk in source:
        text += chunk
        if chunk:
            for found in records:
                found.usage = found.details = found.network = None
            records.clear()
    assert not compare(parse(page(node_records(30), filesystems=(), has_pressure=True)), parse(text.decode()))


def test_cadvisor_chunks_error_reported() -> None:
    values = parse(page([], filesystems=(), has_error=True))
    assert values[Series("container_scrape_error")] == 1
    assert values[Series("machine_scrape_error")] == 0


def test_cadvisor_chunks_lean_profile_tenth_of_series() -> None:
    records = node_records(30)
    whole, lean = parse(page(records, has_pressure=True)), parse(page(records, lean=True, has_pressure=True))
    assert {series.name for series in lean} == LEAN_NAMES
    assert lean.items() <= whole.items()
    assert len(lean) <= len(whole) / 9
    for series in lean:
        if series.name.startswith("container_network_"):
            assert series.get("pod")
        elif series.name in ("container_fs_usage_bytes", "container_fs_limit_bytes"):
            assert series.get("id") == "/"
        else:
            assert series.get("container")
            assert series.get("image")


def test_cadvisor_chunks_500_pods_bounded_chunks_and_memory() -> None:
    records = node_records(500)
    chunks(records)
    gc.collect()
    tracemalloc.start()
    try:
        size = 0
        for chunk in cadvisor_chunks(
            records, filesystems=(), device_name=device_name, machine=MACHINE, now=NOW, has_pressure=True
        ):
            assert len(chunk) <= MAX_CHUNK_BYTES
            size += len(chunk)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 20_000_000
    assert peak < 1_500_000, peak


def test_cadvisor_chunks_many_interfaces_and_devices_bounded_steps() -> None:
    io = tuple(replace(stats_records.IO, minor=minor) for minor in range(500))
    interfaces: tuple[NetworkInterface, ...] = tuple(stats_records.interface(f"e{n}") for n in range(1500))
    records = node_records(4)
    records = replaced(records, "sandbox", network=interfaces)
    records = [replace(found, details=Details(io=io)) for found in records]
    longest, started = 0.0, time.thread_time()
    for chunk in cadvisor_chunks(
        records, filesystems=(), device_name=lambda _, minor: f"/dev/d{minor}", machine=MACHINE, now=NOW
    ):
        assert len(chunk) <= MAX_CHUNK_BYTES
        now = time.thread_time()
        longest, started = max(longest, now - started), now
    # Generous, because other processes slow this one down; without batches it would be seconds.
    assert longest < 0.2


def test_cadvisor_chunks_modules_of_two_types_have_series_each() -> None:
    modules = (
        MemoryModules(type="Registered-DDR4", capacity=32 << 30, count=2),
        MemoryModules(type="Unbuffered-DDR3", capacity=16 << 30, count=1),
    )
    text = page([], machine=replace(MACHINE, modules=modules))
    for name, expected in {
        "machine_dimm_capacity_bytes": [32 << 30, 16 << 30],
        "machine_dimm_count": [2, 1],
    }.items():
        found = series_of(text, name)
        assert list(found.values()) == expected
        assert [series.get("type") for series in found] == ["Registered-DDR4", "Unbuffered-DDR3"]
        assert {series.get("machine_id") for series in found} == {MACHINE.machine_id}
    assert "machine_dimm" not in page([])


def test_cadvisor_families_each_row_of_the_metrics_table_has_one() -> None:
    rows = [line.split("\t") for line in METRICS_TABLE.read_text().splitlines()]
    expected = {
        (name, kind)
        for path, name, kind, _, _, state, _ in rows
        if path == "/metrics/cadvisor" and state in ("always", "event")
    }
    assert expected
    assert expected - {(family.name, family.kind) for family in _ALL_FAMILIES} == set()
