"""Rings of the charts: their values, their bounds, and their removal."""

import math

import msgspec
import pytest

from pykubelet.server.page.history import (
    AGENT,
    MAX_SERIES,
    NODE,
    SLOT_SECONDS,
    SLOTS,
    History,
    Key,
    Series,
)
from pykubelet.stats.samples import Details, Limits, NetworkInterface, Record, Target, TargetKind, Usage

START = 1_800_000_000.0


def record(path: str, kind: TargetKind, uid: str = "", container: str = "") -> Record:
    target = Target(path=path, kind=kind, pod_uid=uid, container=container)
    return Record(target=target, limits=Limits(created=0.0))


def sample(found: Record, seconds: float, *, cpu: float = 0.0, memory: int = 1) -> Record:
    found.usage = Usage(time=START + seconds, cpu=int(cpu * 1e9), memory=memory, working_set=memory)
    return found


def known(values: object) -> list[float]:
    assert values is not None
    return [value for value in values if not math.isnan(value)]  # type: ignore[attr-defined]


def interface(name: str, received: int) -> NetworkInterface:
    counters = dict.fromkeys(
        ("rx_packets", "rx_errors", "rx_dropped", "tx_packets", "tx_errors", "tx_dropped"), 0
    )
    return NetworkInterface(name=name, rx_bytes=received, tx_bytes=0, **counters)


def test_series_read_keeps_largest_value_of_each_slot_and_forgets_old_ones() -> None:
    series = Series()
    for second, value in ((0, 1.0), (1, 5.0), (2, 3.0), (10, 2.0)):
        series.add(START + second, value)
    assert known(series.read(START + 10)) == [5.0, 2.0]
    assert len(series.read(START + 10)) == SLOTS
    assert known(series.read(START + SLOTS * SLOT_SECONDS)) == [2.0]
    assert known(series.read(START + 10_000_000)) == []


def test_series_read_at_time_before_latest_value_keeps_values() -> None:
    series = Series()
    for second in (0, 10, 20):
        series.add(START + second, float(second))
    assert known(series.read(START + 10)) == [0.0, 10.0]
    assert known(series.read(START + 20)) == [0.0, 10.0, 20.0]
    series.add(START + 10, 15.0)
    assert known(series.read(START + 20)) == [0.0, 15.0, 20.0]
    series.add(START - 100_000, 1.0)
    assert known(series.read(START - 100_000)) == [1.0]


def test_series_read_fills_one_missing_slot_but_no_gap() -> None:
    series = Series()
    for second in (0, 20, 60):
        series.add(START + second, float(second))
    last = list(series.read(START + 60))[-7:]
    assert last[:3] == [0.0, 0.0, 20.0]
    assert [math.isnan(value) for value in last[3:]] == [True, True, True, False] or last[-1] == 60.0
    assert math.isnan(last[3])


def test_history_sample_gives_rates_between_two_samples() -> None:
    history, pod = History(), record("/pod", "pod", "u1")
    history.handle_sample(sample(pod, 0, cpu=1.0, memory=10))
    assert history.read(Key("u1", "", "cpu"), START) is None
    history.handle_sample(sample(pod, 10, cpu=6.0, memory=20))
    assert known(history.read(Key("u1", "", "cpu"), START + 10)) == [0.5]
    assert known(history.read(Key("u1", "", "memory"), START + 10)) == [10.0, 20.0]
    # The cgroup was replaced: its counter began again.
    history.handle_sample(sample(pod, 20, cpu=0.0, memory=20))
    assert known(history.read(Key("u1", "", "cpu"), START + 20)) == [0.5, 0.5]


def test_history_sample_records_throttling_and_network() -> None:
    history, container = History(), record("/pod/c", "container", "u1", "main")
    for second, throttled in ((0, 0), (10, 5_000_000_000)):
        container.details, container.details_time = Details(throttled=throttled), START + second
        history.handle_sample(sample(container, second))
    assert known(history.read(Key("u1", "main", "throttled"), START + 10)) == [0.5]
    for second, received in ((0, 0), (10, 1000)):
        # The bridge of the pods carries the same bytes a second time.
        history.handle_network(
            NODE, START + second, [interface("eth0", received), interface("veth1", 9 * received)]
        )
    assert known(history.read(Key(NODE, "", "received"), START + 10)) == [100.0]


def test_history_is_bounded_and_forgets_pods_that_left() -> None:
    history = History(max_series=10)
    history.add(Key(AGENT, "", "lag"), START, 0.1)
    for number in range(100):
        pod = record(f"/pod{number}", "pod", f"u{number}")
        history.handle_sample(sample(pod, 0))
        history.handle_sample(sample(pod, 10, cpu=1.0))
        history.handle_network(f"u{number}", START, [interface("eth0", 1)])
    assert len(history) == 10
    assert len(history._last) == len(history._traffic) == 10
    history.forget({"u1"}, {"/pod1"})
    assert len(history) == 3
    assert len(history._last) == 1
    assert history.read(Key("u1", "", "cpu"), START + 10) is not None
    assert history.read(Key(AGENT, "", "lag"), START) is not None


def test_history_of_restarted_container_keeps_only_samples_of_its_last_cgroup() -> None:
    history = History(max_series=10)
    for number in range(100):
        path = f"/pod/{number}"
        history.handle_sample(sample(record(path, "container", "u1", "main"), number * 10))
        history.forget({"u1"}, {path})
    assert len(history._last) == len(history._paths["u1"]) == 1
    other = record("/other", "pod", "u2")
    for second in (0, 10):
        history.handle_sample(sample(other, second, cpu=second))
    assert history.read(Key("u2", "", "cpu"), START + 10) is not None


def test_history_of_all_series_takes_less_than_3_mb() -> None:
    from tracemalloc import get_traced_memory, start, stop

    history = History()
    start()
    try:
        for number in range(MAX_SERIES + 100):
            history.add(Key(f"00000000-0000-0000-0000-{number:012}", "", "cpu"), START, 1.0)
        used = get_traced_memory()[0]
    finally:
        stop()
    assert len(history) == MAX_SERIES
    assert used < 3_000_000


@pytest.mark.parametrize("kind", ["node", "sandbox"])
def test_history_sample_of_other_cgroups_records_no_usage(kind: TargetKind) -> None:
    history, other = History(), record("/x", kind, "u1" if kind == "sandbox" else "")
    history.handle_sample(sample(other, 0))
    history.handle_sample(sample(msgspec.structs.replace(other), 10))
    assert len(history) == 0
