"""Quantities and network rates of the command line, and the Summary that it decodes."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import from_document, from_json
from pykubelet.api.stats import NetworkStats, Summary
from pykubelet.cli.pods.usage import (
    NO_TRAFFIC,
    Traffic,
    TrafficRates,
    container_storage,
    format_cpu,
    format_memory,
    format_rate,
    format_share,
    format_size,
    memory_capacity,
    pod_nano_cores,
    pod_working_set,
    share,
    traffic,
)
from tests.support.summary_documents import network_document, summary_document

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
KI, MI, GI = 1 << 10, 1 << 20, 1 << 30
TIME = datetime(2026, 11, 17, 13, 25, 46, tzinfo=UTC)


@pytest.mark.parametrize(
    ("nanos", "brief", "detailed"),
    [
        (None, "-", "-"),
        (0, "0m", "0.0m"),
        (1, "1m", "0.0m"),
        (12_000_000, "12m", "12.0m"),
        (12_000_001, "13m", "12.0m"),
        (99_961_312, "100m", "100.0m"),
        (2_500_000_000, "2500m", "2500.0m"),
    ],
)
def test_format_cpu_nanocores_as_kubectl_top(nanos: int | None, brief: str, detailed: str) -> None:
    assert (format_cpu(nanos), format_cpu(nanos, detail=True)) == (brief, detailed)


@pytest.mark.parametrize(
    ("size", "brief", "detailed"),
    [
        (None, "-", "-"),
        (0, "0Mi", "0"),
        (MI - 1, "0Mi", "1.0Mi"),
        (20_549_632, "19Mi", "19.6Mi"),
        (5 * GI, "5120Mi", "5.0Gi"),
    ],
)
def test_format_memory_bytes_as_kubectl_top(size: int | None, brief: str, detailed: str) -> None:
    assert (format_memory(size), format_memory(size, detail=True)) == (brief, detailed)


@pytest.mark.parametrize(
    ("size", "brief", "detailed"),
    [
        (None, "-", "-"),
        (0, "0", "0"),
        (1023, "1023B", "1023B"),
        (KI, "1.0Ki", "1.0Ki"),
        (24_576, "24Ki", "24.0Ki"),
        (1_245_184, "1.2Mi", "1.2Mi"),
        (1023 * KI, "1023Ki", "1023.0Ki"),
        (MI - 1, "1.0Mi", "1.0Mi"),
        (MI - 100, "1.0Mi", "1023.9Ki"),
        (270_553_174_016, "252Gi", "252.0Gi"),
        ((1 << 64) - 1, "16Ei", "16.0Ei"),
        (1 << 80, "1048576Ei", "1048576.0Ei"),
    ],
)
def test_format_size_bytes_in_largest_unit(size: int | None, brief: str, detailed: str) -> None:
    assert (format_size(size), format_size(size, detail=True)) == (brief, detailed)


@given(st.integers(min_value=0, max_value=(1 << 64) - 1), st.booleans())
def test_format_size_any_size_is_short_and_near(size: int, detail: bool) -> None:
    text = format_size(size, detail=detail)
    assert len(text) <= 8
    number = text.rstrip("BKMGTPEi")
    unit = text[len(number) :]
    power = ("B", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei").index(unit or "B")
    assert float(number) * 1024**power == pytest.approx(size, rel=0.051)


@pytest.mark.parametrize(
    ("used", "total", "brief", "detailed"),
    [
        (None, 10, "-", "-"),
        (10, None, "-", "-"),
        (10, 0, "-", "-"),
        (0, 10, "0%", "0.0%"),
        (99, 1000, "9%", "9.9%"),
        (30, 10, "300%", "300.0%"),
    ],
)
def test_format_share_of_total_or_missing(
    used: int | None, total: int | None, brief: str, detailed: str
) -> None:
    percent = share(used, total)
    assert (format_share(percent), format_share(percent, detail=True)) == (brief, detailed)


def test_format_rate_bytes_per_second() -> None:
    assert [format_rate(rate) for rate in (None, 0, 300, 1536 * KI)] == ["-", "0/s", "300B/s", "1.5Mi/s"]


def test_summary_recorded_document_decoded() -> None:
    summary = from_json(Summary, (GOLDEN / "stats/summary.json").read_bytes())
    assert summary.node.node_name == "vm"
    assert memory_capacity(summary.node.memory) == 23_500_906_496 + 1_775_611_904
    holder = summary.pods[0]
    assert (holder.pod_ref.name, pod_nano_cores(holder), pod_working_set(holder)) == ("holder", 0, 20_549_632)
    assert holder.ephemeral_storage is not None
    assert holder.ephemeral_storage.used_bytes == 28_672
    assert container_storage(holder.containers[0]) == 24_576
    assert memory_capacity(holder.containers[0].memory) == 128 * MI


@pytest.mark.parametrize(
    "pod",
    [
        {},
        {"containers": [{"name": "c", "cpu": {}, "memory": {}}]},
        {"network": {"time": None, "name": ""}, "new": {"a": [1]}},
    ],
)
def test_summary_missing_values_are_none(pod: dict[str, Any]) -> None:
    summary = from_document(Summary, summary_document([pod], cpu={"time": None}))
    assert all(pod_nano_cores(pod) is None and pod_working_set(pod) is None for pod in summary.pods)
    assert TrafficRates().update(summary) == {}


def test_summary_missing_reference_is_error_with_path() -> None:
    document = summary_document([{}])
    del document["pods"][0]["podRef"]["uid"]
    with pytest.raises(ValueError, match=r"`uid` - at `pods\[0\]\.podRef`"):
        from_document(Summary, document)


def test_pod_stats_without_own_values_sums_containers() -> None:
    containers = [
        {"name": "a", "cpu": {"usageNanoCores": 5}, "memory": {"workingSetBytes": 7}},
        {"name": "b", "cpu": {"usageNanoCores": 6}},
    ]
    (pod,) = from_document(Summary, summary_document([{"containers": containers}])).pods
    assert (pod_nano_cores(pod), pod_working_set(pod)) == (11, 7)


def _summary(seconds: float, received: int, sent: int) -> Summary:
    time = (TIME + timedelta(seconds=seconds)).isoformat()
    network = {"time": time, "rxBytes": received, "txBytes": sent}
    return from_document(Summary, summary_document([{"podRef": {"uid": "u"}, "network": network}]))


def test_traffic_rates_between_samples() -> None:
    rates = TrafficRates()
    assert rates.update(_summary(0, 100, 100)) == {"u": NO_TRAFFIC}
    assert rates.update(_summary(10, 1100, 100)) == {"u": Traffic(100, 0)}
    # The same sample again, and one that is older.
    assert rates.update(_summary(10, 1100, 100)) == {"u": Traffic(100, 0)}
    assert rates.update(_summary(5, 600, 100)) == {"u": Traffic(100, 0)}
    # A counter that decreased.
    assert rates.update(_summary(20, 50, 200)) == {"u": Traffic(None, 10)}
    assert rates.update(_summary(30, 60, 200)) == {"u": Traffic(1, 0)}
    # A pod that is not reported for a time starts again.
    assert rates.update(from_document(Summary, summary_document())) == {}
    assert rates.update(_summary(40, 70, 200)) == {"u": NO_TRAFFIC}


def test_traffic_without_default_interface_sums_interfaces() -> None:
    network = from_document(
        NetworkStats, network_document({"interfaces": [{"rxBytes": 1, "txBytes": 2}, {"rxBytes": 3}]})
    )
    assert traffic(network) == Traffic(4, 2)
    assert traffic(None) == NO_TRAFFIC
