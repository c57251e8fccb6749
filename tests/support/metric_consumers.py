"""Selectors of common consumers of a kubelet's metrics: `tests/data/kubelet-metric-consumers.tsv`."""

import csv
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parents[1] / "data" / "kubelet-metric-consumers.tsv"


class Consumed(NamedTuple):
    """One selector of a consumer."""

    consumer: str
    endpoint: str
    metric: str
    matchers: str
    note: str

    def selector(self, **more: str) -> str:
        """Return the selector in PromQL, with additional labels."""
        matchers = [text for text in (self.matchers, *(f'{n}="{v}"' for n, v in more.items())) if text]
        return f"{self.metric}{{{','.join(matchers)}}}"


def consumed_metrics() -> list[Consumed]:
    """Return the rows of the table."""
    with TABLE.open(newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(lines)
        return [Consumed(*line) for line in lines]
