"""Results of `make pressure` as a table: per scenario and kubelet the evicted pods, and the worst latency."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.support.plane import Document

AGENTS = {"ours": "pykubelet", "upstream": "upstream"}
VICTIMS, AGENT, SCENARIO, LATENCY = "victims", "agent", "scenario", "worst-latency-ms"
"""Names of the properties of a test that the table shows."""
_REJECTED = "The node had condition"
_HEADINGS = ("scenario", "kubelet", "evicted, in order", "worst latency", "result")


def scenario_properties(item: pytest.Function) -> dict[str, str]:
    """Return the scenario of a test, and the kubelet that it runs with."""
    agent, others = "ours", []
    if (call := getattr(item, "callspec", None)) is not None:
        for part in call.id.split("-"):
            if part in AGENTS:
                agent = part
            else:
                others.append(part)
    name = (item.originalname or item.name).removeprefix("test_").replace("_", " ")
    return {SCENARIO: f"{name} ({'-'.join(others)})" if others else name, AGENT: agent}


def victims(events: Iterable[Document]) -> list[str]:
    """Return the names of the evicted pods in the order of their events, each once."""
    evicted = [
        event for event in events if event["reason"] == "Evicted" and _REJECTED not in event["message"]
    ]
    # Times are whole seconds.
    evicted.sort(key=lambda event: int(event["metadata"]["resourceVersion"]))
    return list(dict.fromkeys(event["involvedObject"]["name"] for event in evicted))


def table_lines(reports: Iterable[Any]) -> list[str]:
    """Return the table in Markdown for the reports of a run; empty if it had no such tests."""
    properties: dict[str, dict[str, object]] = {}
    failed: set[str] = set()
    for report in reports:
        if report.when == "teardown":
            properties[report.nodeid] = dict(report.user_properties)
        if report.failed:
            failed.add(report.nodeid)
    rows = []
    for nodeid in sorted(properties):
        found = properties[nodeid]
        if SCENARIO not in found:
            continue
        latency = f"{found[LATENCY]} ms" if LATENCY in found else ""
        result = "failed" if nodeid in failed else "passed"
        rows.append(
            (
                str(found[SCENARIO]),
                AGENTS[str(found[AGENT])],
                str(found.get(VICTIMS) or "none"),
                latency,
                result,
            )
        )
    return [_line(_HEADINGS), _line(["---"] * len(_HEADINGS)), *map(_line, rows)] if rows else []


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
