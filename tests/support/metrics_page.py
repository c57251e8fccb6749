"""Pages of metrics as a scraper reads them, and the table of those that there are and that there will be.

`tests/data/metrics.tsv` has every metric of the reference, of v1.25 and v1.36 (recorded, and from its
sources), with what this agent does about it, and those that the reference does not have ("ours"). States:

- always: shown by any agent that has run a pod; cluster: by a node of a cluster;
- event: shown once what it counts has happened, or where it was asked for;
- later: not yet; never: not of this agent. Both say why.

Rows of `ours` are of metrics that the reference does not have.

`tests/data/kubelet-metric-consumers.tsv` has a row per selector by which a common consumer (metrics-server,
the rules, alerts and dashboards of kubernetes-mixin, …) selects series of a kubelet. A dashboard's variable
and a label that is grouped by is a matcher `label!=""`. The notes begin with `event:` where a node has the
series only after something has happened, with `reference lacks:` where the reference does not have them
either, and with `ours lacks:` where only the reference has them.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parents[1] / "data" / "metrics.tsv"
CONSUMERS = Path(__file__).parents[1] / "data" / "kubelet-metric-consumers.tsv"
STATES = ("always", "cluster", "event", "later", "never")
SHOWN = ("always", "cluster", "event")
_SAMPLE = re.compile(r"([a-z_0-9]+)(?:\{(.*)\})? (\S+)(?: -?\d+)?")
_LABEL = re.compile(r'([a-z_A-Z0-9]+)="((?:[^"\\]|\\.)*)"')


class Row(NamedTuple):
    """One metric of the table."""

    endpoint: str
    metric: str
    type: str
    labels: str
    versions: str
    state: str
    why: str


def rows() -> list[Row]:
    with TABLE.open(newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(lines)
        return [Row(*line) for line in lines]


class Selector(NamedTuple):
    """One selector of a consumer; `matchers` are as in PromQL, without braces."""

    consumer: str
    endpoint: str
    metric: str
    matchers: str
    note: str


def selectors() -> list[Selector]:
    with CONSUMERS.open(newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(lines)
        return [Selector(*line) for line in lines]


class Page:
    """What one scrape gave."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self.samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                assert name not in self.types, f"{name} is there twice"
                self.types[name] = kind
            elif not line.startswith("#"):
                parts = _SAMPLE.fullmatch(line)
                assert parts, line
                self.samples.append((parts[1], dict(_LABEL.findall(parts[2] or "")), float(parts[3])))

    def values(self, name: str, /, **labels: str) -> list[float]:
        """The values of the series of this very name that have these labels."""
        return [v for n, found, v in self.samples if n == name and labels.items() <= found.items()]

    def value(self, name: str, /, **labels: str) -> float:
        """The value of the one series."""
        (value,) = self.values(name, **labels)
        return value

    def total(self, name: str, /, **labels: str) -> float:
        """The sum of all series of a name; zero when there are none."""
        return sum(self.values(name, **labels))

    def labels(self, metric: str) -> str:
        """The names of a metric's labels, as the table has them."""
        kind = self.types[metric]
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names = {
            label
            for name, found, _ in self.samples
            for label in found
            if name in [metric + suffix for suffix in suffixes]
            and not (kind == "histogram" and label == "le")
        }
        return ",".join(sorted(names))

    def bounds(self, metric: str) -> str:
        """The upper bounds of a histogram's buckets, in order."""
        bounds = (found["le"] for name, found, _ in self.samples if name == f"{metric}_bucket")
        return " ".join(dict.fromkeys(bounds))


def differences(page: Page, endpoint: str, *states: str) -> Iterator[str]:
    """Say what of a page is not as the table has it; metrics of these states must be there."""
    table = {row.metric: row for row in rows() if row.endpoint == endpoint}
    for name, kind in page.types.items():
        row = table.get(name)
        if row is None or row.state not in SHOWN:
            yield f"{name} is not in the table as one that is shown"
        elif (kind, page.labels(name)) != (row.type, row.labels):
            yield f"{name} is a {kind} of {page.labels(name)!r}, not a {row.type} of {row.labels!r}"
    for row in table.values():
        if row.state in states and row.metric not in page.types:
            yield f"{row.metric} is missing"
