"""The table of metrics itself, and the page's format."""

import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from pykubelet.server.metrics.registry_text import text_format
from pykubelet.util.metrics import PlainCounter
from tests.support.metrics_page import SHOWN, STATES, Page, rows, selectors


def test_metrics_table_rows_unique_and_hidden_metrics_have_reason() -> None:
    table = rows()
    assert len({(row.endpoint, row.metric) for row in table}) == len(table)
    for row in table:
        assert row.state in STATES, row
        assert row.type in ("counter", "gauge", "histogram", "*"), row
        assert row.versions in ("1.25", "1.36", "1.25 1.36", "ours"), row
        assert bool(row.why) == (row.state != "always"), row
        assert "*" not in row.metric or row.state in ("later", "never"), row


def test_consumers_selectors_name_shown_metrics_and_their_labels() -> None:
    table = {(row.endpoint, row.metric): row for row in rows()}
    found = selectors()
    assert len({selector[:4] for selector in found}) == len(found)
    for selector in found:
        matched = re.findall(r'([a-z_]+)(?:=~|!=|=)"[^"]*"(?:, |$)', selector.matchers)
        assert len(matched) == selector.matchers.count('"') / 2, selector
        name, labels = selector.metric, set(matched)
        if (selector.endpoint, name) not in table:
            name = re.sub("_(bucket|count|sum)$", "", name)
            labels.discard("le")
        row = table.get((selector.endpoint, name))
        if selector.note.startswith(("reference lacks:", "ours lacks:")):
            assert row is None or row.state not in SHOWN, selector
            continue
        assert row is not None, selector
        assert row.state in SHOWN or name == "kubelet_evictions", selector
        assert labels <= set(row.labels.split(",")), selector


def test_page_sample_with_timestamp_parsed() -> None:
    page = Page('# TYPE a gauge\na{x="1"} 2.5 1794921946342\n')
    assert page.value("a", x="1") == 2.5


def test_text_format_returns_prometheus_exposition() -> None:
    registry = CollectorRegistry()
    Counter("b_total", "With\na \\ break.", ["x"], registry=registry).labels('"\\\n').inc()
    PlainCounter("a_errors", "Plain.", registry=registry).inc(2)
    Histogram("c_seconds", "Long.", buckets=[1, 2.5], registry=registry).observe(2)
    Gauge("d", "Odd.", registry=registry).set(float("nan"))
    Gauge("e", "None.", ["x"], registry=registry)
    Gauge("f", "Big.", registry=registry).set(2.0**64)
    text = text_format(registry.collect()).decode()
    assert text == (
        "# HELP a_errors Plain.\n# TYPE a_errors counter\na_errors 2\n"
        "# HELP b_total With\\na \\\\ break.\n# TYPE b_total counter\n"
        'b_total{x="\\"\\\\\\n"} 1\n'
        "# HELP c_seconds Long.\n# TYPE c_seconds histogram\n"
        'c_seconds_bucket{le="1"} 0\nc_seconds_bucket{le="2.5"} 1\nc_seconds_bucket{le="+Inf"} 1\n'
        "c_seconds_count 1\nc_seconds_sum 2\n"
        "# HELP d Odd.\n# TYPE d gauge\nd NaN\n"
        "# HELP f Big.\n# TYPE f gauge\nf 1.8446744073709552e+19\n"
    )
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["b"].samples[0].labels == {"x": '"\\\n'}
    assert Page(text).value("c_seconds_bucket", le="2.5") == 1
