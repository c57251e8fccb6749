"""Text of `/metrics/resource`, compared with a recording of the upstream kubelet."""

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.stats.resource_metrics import resource_chunks
from pykubelet.stats.samples import Limits, Record, Target, TargetKind, Usage
from tests.support import stats_records
from tests.support.prometheus_text import Family, Series, parse, parse_families
from tests.support.stats_records import NOW, node_records

RECORDING = Path(__file__).parents[2] / "data" / "golden" / "stats" / "resource.prom"


def page(records: Iterable[Record], *, has_error: bool = False, show_hidden: bool = False) -> str:
    chunks = resource_chunks(list(records), has_error=has_error, show_hidden=show_hidden)
    return b"".join(chunks).decode()


def recorded_records(families: dict[str, Family]) -> Iterable[Record]:
    kinds: dict[str, TargetKind] = {"node": "root", "pod": "pod", "container": "container"}
    for prefix, kind in kinds.items():
        for series, cpu in families[f"{prefix}_cpu_usage_seconds_total"].samples.items():
            values = {
                name: family.samples.get(Series(name, series.labels)) for name, family in families.items()
            }
            memory = values[f"{prefix}_memory_working_set_bytes"]
            started = values["container_start_time_seconds"]
            assert memory is not None
            yield Record(
                target=Target(
                    path="/",
                    kind=kind,
                    namespace=series.get("namespace"),
                    pod=series.get("pod"),
                    container=series.get("container"),
                    created=started.value if started else 0.0,
                ),
                limits=Limits(created=0),
                usage=Usage(
                    time=(cpu.time or 0) / 1000,
                    cpu=round(cpu.value * 1e9),
                    memory=0,
                    working_set=round(memory.value),
                ),
            )


def test_resource_chunks_recorded_usage_equal_recording() -> None:
    recorded = parse_families(RECORDING.read_text())
    found = parse_families(page(list(recorded_records(recorded))[::-1]))
    assert list(found) == list(recorded)
    for name, family in recorded.items():
        ours = found[name]
        assert (ours.kind, ours.label_order) == (family.kind, family.label_order)
        assert list(ours.samples) == list(family.samples)
        for series, sample in family.samples.items():
            assert ours.samples[series].value == sample.value
            assert (ours.samples[series].time is None) == (sample.time is None)
            if "swap" not in name:
                assert ours.samples[series].time == sample.time


def test_resource_chunks_busy_node_pods_and_containers_reported() -> None:
    values = parse(page(node_records(2, containers=2)))
    assert len([series for series in values if series.name == "container_cpu_usage_seconds_total"]) == 4
    assert len([series for series in values if series.name == "pod_cpu_usage_seconds_total"]) == 2
    assert values[Series("node_cpu_usage_seconds_total")] == 44.525764729
    assert values[Series("resource_scrape_error")] == 0


def test_resource_chunks_replaced_container_newest_reported() -> None:
    new = node_records(1)[-1]
    target = replace(new.target, created=NOW - 1000, runtime_id="old", path="/old")
    old = replace(new, target=target, usage=stats_records.usage(cpu=1), labels=None)
    for records in ([old, new], [new, old]):
        values = parse(page(records))
        assert [v for s, v in values.items() if s.name == "container_cpu_usage_seconds_total"] == [
            44.525764729
        ]


def test_resource_chunks_no_usage_record_omitted() -> None:
    records = [replace(found, usage=None) for found in node_records(1)]
    assert parse(page(records)) == {Series("resource_scrape_error"): 0}


def test_resource_chunks_unlimited_swap_limit_omitted() -> None:
    container = node_records(1)[-1]
    limits = replace(container.limits, memory_swap_limit=2**64 - 1)
    names = {series.name for series in parse(page([replace(container, limits=limits)]))}
    assert "container_swap_usage_bytes" in names
    assert "container_swap_limit_bytes" not in names


def test_resource_chunks_unknown_creation_time_omitted() -> None:
    container = node_records(1)[-1]
    container.target = replace(container.target, created=0.0)
    assert "container_start_time_seconds" not in page([container])


def test_resource_chunks_error_only_error_reported() -> None:
    assert parse(page([], has_error=True)) == {Series("resource_scrape_error"): 1}


def test_resource_chunks_show_hidden_deprecated_metric_reported() -> None:
    families = parse_families(page([], has_error=True, show_hidden=True))
    assert list(families) == ["resource_scrape_error", "scrape_error"]
    assert families["scrape_error"].samples[Series("scrape_error")].value == 1


def sandbox_stats(sandbox_id: str, *container_ids: str) -> pb.PodSandboxStats:
    def value(number: int) -> pb.UInt64Value:
        return pb.UInt64Value(value=number)

    def container(container_id: str) -> pb.ContainerStats:
        swap = pb.SwapUsage(timestamp=4_000_000_000, swap_usage_bytes=value(5), swap_available_bytes=value(7))
        return pb.ContainerStats(
            attributes=pb.ContainerAttributes(id=container_id),
            cpu=pb.CpuUsage(timestamp=1_500_000_000, usage_core_nano_seconds=value(2_000_000_000)),
            swap=swap,
        )

    return pb.PodSandboxStats(
        attributes=pb.PodSandboxAttributes(id=sandbox_id),
        linux=pb.LinuxPodSandboxStats(
            memory=pb.MemoryUsage(timestamp=3_000_000_000, working_set_bytes=value(9)),
            containers=[container(container_id) for container_id in container_ids],
        ),
    )


def test_resource_chunks_sandboxes_of_runtime_replace_samples() -> None:
    records = node_records(2, containers=2)
    pod = [record.target for record in records if record.target.pod.endswith("00000")]
    (sandbox,) = (target.runtime_id for target in pod if target.kind == "sandbox")
    containers = [target.runtime_id for target in pod if target.kind == "container"]
    # A container that was not sampled yet has no usage of its own.
    records = [
        replace(record, usage=None) if record.target.kind == "container" else record for record in records
    ]
    stats = {sandbox: sandbox_stats(sandbox, *containers)}
    text = b"".join(resource_chunks(records, sandboxes=stats)).decode()
    families = parse_families(text)
    samples = {
        name: [
            (series.get("container"), sample.value, sample.time) for series, sample in family.samples.items()
        ]
        for name, family in families.items()
        if not name.startswith(("node_", "resource_"))
    }
    names = [target.container for target in pod if target.kind == "container"]
    assert samples == {
        "container_cpu_usage_seconds_total": [(name, 2.0, 1500) for name in names],
        "container_start_time_seconds": [(name, NOW - 90, None) for name in names],
        "container_swap_limit_bytes": [(name, 12.0, 4000) for name in names],
        "container_swap_usage_bytes": [(name, 5.0, 4000) for name in names],
        "pod_memory_working_set_bytes": [("", 9.0, 3000)],
        "pod_swap_usage_bytes": [("", 10.0, 4000)],
    }
    assert parse(text)[Series("node_cpu_usage_seconds_total")] == 44.525764729
