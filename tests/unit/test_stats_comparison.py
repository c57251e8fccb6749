"""The comparison of statistics finds what it is for: a comparison that cannot fail is worthless."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.stats_comparison import (
    Difference,
    Exposition,
    Rule,
    Series,
    compare,
    compare_expositions,
    parse_exposition,
    parse_summary,
)

PAGE = """\
# HELP container_cpu_usage_seconds_total Cumulative cpu time
# TYPE container_cpu_usage_seconds_total counter
container_cpu_usage_seconds_total{container="main",id="/a",pod="burner"} 3.5 1794979977503
container_cpu_usage_seconds_total{container="",id="/",pod=""} 100 1794979970000
# TYPE machine_cpu_cores gauge
machine_cpu_cores 2
"""
BURNER = Series("container_cpu_usage_seconds_total", (("container", "main"), ("id", "/a"), ("pod", "burner")))
CORES = Series("machine_cpu_cores")


def page(text: str = PAGE, **values: float) -> Exposition:
    """Return the page, with other values of the burner (`burner`) or of the cores (`cores`)."""
    found = parse_exposition(text)
    if "burner" in values:
        found.samples[BURNER] = values["burner"]
    if "cores" in values:
        found.samples[CORES] = values["cores"]
    return found


def kinds(differences: list[Difference]) -> list[str]:
    return [difference.kind for difference in differences]


# Parsing


def test_parse_exposition_page_returns_values_types_and_times() -> None:
    found = page()
    assert found.samples[BURNER] == 3.5
    assert found.samples[CORES] == 2
    assert found.types == {"container_cpu_usage_seconds_total": "counter", "machine_cpu_cores": "gauge"}
    assert found.times[BURNER] == 1794979977.503
    assert CORES not in found.times
    assert found.oldest() == 1794979970.0


def test_parse_exposition_labels_in_other_order_is_same_series() -> None:
    other = parse_exposition('container_cpu_usage_seconds_total{pod="burner",container="main",id="/a"} 1\n')
    assert set(other.samples) == {BURNER}


def test_parse_exposition_escaped_and_braced_values_are_kept() -> None:
    (series,) = parse_exposition(r'a{b="x\"}, y=\\",c="{}"} NaN' + "\n").samples
    assert series.labels == (("b", r"x\"}, y=\\"), ("c", "{}"))


@pytest.mark.parametrize("line", ["a{b=} ", "a 1 2 3", "a", "1a 1", "a\t1"])
def test_parse_exposition_bad_line_raises(line: str) -> None:
    with pytest.raises(ValueError, match="not a sample"):
        parse_exposition(line)


def test_parse_exposition_repeated_series_or_metric_raises() -> None:
    with pytest.raises(ValueError, match="twice"):
        parse_exposition("a 1\na 2\n")
    with pytest.raises(ValueError, match="twice"):
        parse_exposition("# TYPE a gauge\n# TYPE a gauge\n")


# Expositions


def test_compare_same_page_has_no_differences() -> None:
    assert compare_expositions(page(), page(), page()) == []


def test_compare_missing_series_is_reported() -> None:
    ours = page()
    del ours.samples[BURNER]
    assert compare_expositions(page(), ours, page()) == [Difference("missing", BURNER)]


def test_compare_extra_series_is_reported_unless_explained() -> None:
    ours = page()
    extra = Series("pod_emptydir_bytes", (("pod", "burner"),))
    ours.samples[extra] = 1.0
    assert compare_expositions(page(), ours, page()) == [Difference("extra", extra)]
    explained = Rule("pod_emptydir_.*", "upstream has none (kubernetes #69507)", extra=True)
    assert compare_expositions(page(), ours, page(), [explained]) == []


def test_compare_series_that_upstream_has_once_is_neither_missing_nor_extra() -> None:
    without = page()
    del without.samples[BURNER]
    assert compare_expositions(without, page(burner=1), page()) == []
    assert compare_expositions(page(), page(burner=9), without) == []
    assert compare_expositions(page(), without, without) == []


@pytest.mark.parametrize(("changed", "told"), [("pod", "holder"), ("id", "/b"), ("container", "")])
def test_compare_wrong_label_value_is_reported_with_both_values(changed: str, told: str) -> None:
    ours = page()
    value = ours.samples.pop(BURNER)
    labels = tuple((name, told if name == changed else text) for name, text in BURNER.labels)
    ours.samples[Series(BURNER.name, labels)] = value
    (found,) = compare_expositions(page(), ours, page())
    assert (found.kind, found.series) == ("label", BURNER)
    assert found.detail == f'{changed}="{told}", not "{dict(BURNER.labels)[changed]}"'


@pytest.mark.parametrize(
    "labels",
    [BURNER.labels[1:], (*BURNER.labels, ("namespace", "default"))],
    ids=["without-a-label", "with-another-label"],
)
def test_compare_wrong_label_names_are_reported(labels: tuple[tuple[str, str], ...]) -> None:
    ours = page()
    ours.samples[Series(BURNER.name, labels)] = ours.samples.pop(BURNER)
    assert kinds(compare_expositions(page(), ours, page())) == ["label"]


def test_compare_many_different_labels_is_missing_and_extra() -> None:
    ours = page()
    other = Series(BURNER.name, (("container", "x"), ("id", "/y"), ("pod", "z")))
    ours.samples[other] = ours.samples.pop(BURNER)
    assert sorted(kinds(compare_expositions(page(), ours, page()))) == ["extra", "missing"]


def test_compare_wrong_type_is_reported() -> None:
    ours = page(PAGE.replace("total counter", "total gauge"))
    assert kinds(compare_expositions(page(), ours, page())) == ["type"]


# Values


@pytest.mark.parametrize(
    ("value", "right"), [(3.4, False), (3.5, True), (3.7, True), (4, True), (4.1, False)]
)
def test_compare_counter_must_lie_between_upstreams(value: float, right: bool) -> None:
    found = compare_expositions(page(burner=3.5), page(burner=value), page(burner=4.0))
    assert kinds(found) == ([] if right else ["value"])


@pytest.mark.parametrize(("value", "right"), [(1.7, False), (1.75, True), (2.25, True), (2.3, False)])
def test_compare_gauge_in_tolerance_is_right(value: float, right: bool) -> None:
    rule = Rule("machine_.*", "fluctuates", relative=0.1, absolute=0.05)
    found = compare_expositions(page(), page(cores=value), page(), [rule])
    assert kinds(found) == ([] if right else ["value"])


def test_compare_nan_is_never_right() -> None:
    assert kinds(compare_expositions(page(), page(cores=float("nan")), page())) == ["value"]


def test_compare_rule_with_labels_is_not_for_other_series() -> None:
    rule = Rule(BURNER.name, "its pod", labels={"pod": "holder"}, any_value=True)
    assert kinds(compare_expositions(page(), page(burner=9), page(), [rule])) == ["value"]
    rule = replace(rule, labels={"pod": "burner"})
    assert compare_expositions(page(), page(burner=9), page(), [rule]) == []


def test_compare_any_value_still_requires_the_series() -> None:
    ours = page()
    del ours.samples[CORES]
    assert kinds(
        compare_expositions(page(), ours, page(), [Rule(".*", "since the start", any_value=True)])
    ) == ["missing"]


def test_compare_ignored_series_are_left_out_on_both_sides() -> None:
    rule = Rule(".*", "of the crash loop", labels={"pod": "burner"}, ignored=True)
    ours = page()
    del ours.samples[BURNER]
    assert compare_expositions(page(), ours, page(), [rule]) == []
    assert compare_expositions(ours, page(), ours, [rule]) == []


# The Summary API


def summary(**pod: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "cpu": {"time": "2026-11-18T05:33:00Z", "usageCoreNanoSeconds": 5},
        "rootfs": {"usedBytes": 7},
    }
    return {
        "node": {"nodeName": "n1", "systemContainers": [{"name": "pods", "memory": {"rssBytes": 3}}]},
        "pods": [
            {
                "podRef": {"name": "p", "namespace": "t", "uid": "1"},
                "containers": [container],
                "network": {"name": "eth0", "interfaces": [{"name": "eth0", "rxBytes": 9}]},
                "volume": [{"name": "disk", "usedBytes": 4, "pvcRef": {"name": "claim", "namespace": "t"}}],
                **pod,
            }
        ],
    }


def test_parse_summary_names_elements_of_lists_by_labels() -> None:
    found = parse_summary(summary())
    pod, main = ("pod", "t/p"), ("container", "main")
    assert found[Series("node.nodeName")] == "n1"
    assert found[Series("node.systemContainers.memory.rssBytes", (("systemContainers", "pods"),))] == 3
    assert found[Series("pods.containers.cpu.usageCoreNanoSeconds", (pod, main))] == 5
    assert found[Series("pods.containers.cpu.time", (pod, main))] == 1794979980
    assert found[Series("pods.network.interfaces.rxBytes", (pod, ("interface", "eth0")))] == 9
    assert found[Series("pods.volume.pvcRef.name", (pod, ("volume", "disk")))] == "claim"


def test_compare_summaries_null_is_not_a_time() -> None:
    wrong = summary()
    wrong["pods"][0]["containers"][0]["cpu"]["time"] = None
    before = parse_summary(summary())
    assert kinds(compare(before, parse_summary(wrong), before)) == ["value"]
    assert kinds(compare(parse_summary(wrong), before, parse_summary(wrong))) == ["value"]


def test_compare_summaries_reports_missing_extra_and_wrong_fields() -> None:
    before = parse_summary(summary())
    assert compare(before, parse_summary(summary()), before) == []
    wrong = summary(swap={"swapUsageBytes": 0})
    wrong["pods"][0]["containers"][0]["rootfs"] = {"usedBytes": 8}
    wrong["pods"][0]["containers"][0]["cpu"].pop("usageCoreNanoSeconds")
    wrong["node"]["nodeName"] = "n2"
    found = compare(before, parse_summary(wrong), before)
    assert {(difference.kind, difference.series.name) for difference in found} == {
        ("extra", "pods.swap.swapUsageBytes"),
        ("missing", "pods.containers.cpu.usageCoreNanoSeconds"),
        ("value", "pods.containers.rootfs.usedBytes"),
        ("value", "node.nodeName"),
    }


def test_compare_summaries_container_of_other_name_is_reported() -> None:
    wrong = summary()
    wrong["pods"][0]["containers"][0]["name"] = "other"
    before = parse_summary(summary())
    assert set(kinds(compare(before, parse_summary(wrong), before))) == {"label"}
