"""`pykubelet pressure`: distance of the node to each eviction threshold, and the pods that would be evicted.

The kubelet measures when the command is run. A row is one threshold; DISTANCE is what may still be used
before it is met. The pod is the one that would be evicted first if only this threshold were met now.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pykubelet.api.duration import Duration
from pykubelet.cli.client import run_command
from pykubelet.cli.node_access import select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import Output, serialized
from pykubelet.cli.pods.usage import format_size
from pykubelet.cli.printers import escape_unprintable, format_columns, format_duration
from pykubelet.eviction.report import PressureReport, SignalReport, ThresholdReport

PROGRAM = "pykubelet pressure"
UNKNOWN = "<unknown>"
_HEADINGS = ["SIGNAL", "AVAILABLE", "CAPACITY", "THRESHOLD", "KIND", "DISTANCE", "STATE", "FIRST TO GO"]
_WIDE_HEADINGS = ["MEASURED", "GRACE", "MINIMUM RECLAIM"]
_BYTES = ("memory", "ephemeral-storage")


def run_pressure(selection: NodeSelection, output: Output = Output.TABLE) -> int:
    """Print the report, or with `name` the signals; return the exit code."""

    def work() -> int:
        report = select_node(selection).client.pressure()
        if output in (Output.JSON, Output.YAML):
            print(serialized(msgspec.to_builtins(report), output), end="")
        elif output == Output.NAME:
            for signal in report.signals:
                print(escape_unprintable(signal.signal, lines=False))
        else:
            print("\n".join(lines(report, wide=output == Output.WIDE)))
        return 0

    return run_command(PROGRAM, work)


def lines(report: PressureReport, *, wide: bool = False) -> list[str]:
    """Return the report as text: conditions, the table of thresholds, and why each pod comes first."""
    title = f"Node conditions: {', '.join(report.conditions) or 'no pressure'}"
    if not report.signals:
        return [title, "No eviction thresholds are configured: set evictionHard or evictionSoft"]
    headings = [*_HEADINGS, *(_WIDE_HEADINGS if wide else ())]
    rows = [
        [*_row(signal, threshold), *(_more(signal, threshold) if wide else ())]
        for signal in report.signals
        for threshold in signal.thresholds
    ]
    table = format_columns([headings, *rows])
    return [title, "", *table, *_reasons(report.signals), *_ranking_problems(report.signals)]


def _amount(signal: SignalReport, value: int | None) -> str:
    if value is None:
        return UNKNOWN
    if signal.resource not in _BYTES:
        return str(value)
    return f"-{format_size(-value)}" if value < 0 else format_size(value)


def _more(signal: SignalReport, threshold: ThresholdReport) -> list[str]:
    """Return the cells of `-o wide`."""
    age = f"{format_duration(signal.age_seconds)} ago" if signal.age_seconds is not None else UNKNOWN
    grace = (
        str(Duration.from_seconds(threshold.grace_period_seconds)) if threshold.kind == "soft" else "<none>"
    )
    return [age, grace, _amount(signal, threshold.min_reclaim)]


def _row(signal: SignalReport, threshold: ThresholdReport) -> list[str]:
    victim = signal.first_victim
    return [
        signal.signal,
        _amount(signal, signal.available),
        _amount(signal, signal.capacity),
        _amount(signal, threshold.value),
        threshold.kind,
        _amount(signal, threshold.distance),
        _state(signal, threshold),
        f"{victim.namespace}/{victim.name}" if victim is not None else "<none>",
    ]


def _state(signal: SignalReport, threshold: ThresholdReport) -> str:
    if signal.available is None:
        return "not measured"
    if not threshold.is_met:
        return "reclaiming" if threshold.met_for_seconds is not None else "ok"
    if threshold.kind == "hard":
        return "met"
    elapsed = format_duration(threshold.met_for_seconds or 0)
    grace = Duration.from_seconds(threshold.grace_period_seconds)
    return f"met for {elapsed} of {grace}"


def _ranking_problems(signals: Iterable[SignalReport]) -> list[str]:
    """Return why the order of eviction is the built-in one although a custom ranking is installed."""
    found: dict[str, list[str]] = {}
    for signal in signals:
        if signal.ranking_problem:
            found.setdefault(signal.ranking_problem, []).append(signal.signal)
    lines = [
        escape_unprintable(f"Built-in order for {', '.join(names)}: {problem}", lines=False)
        for problem, names in found.items()
    ]
    return ["", *lines] if lines else []


def _reasons(signals: Iterable[SignalReport]) -> list[str]:
    """Return why each pod would be evicted first, once per pod and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for signal in signals:
        if (victim := signal.first_victim) is not None:
            key = f"{victim.namespace}/{victim.name}", victim.reason
            found.setdefault(key, []).append(signal.signal)
    if not found:
        return ["", "No pod could be evicted: static and critical pods never are"]
    lines = [
        escape_unprintable(f"{name}, for {', '.join(names)}: {reason}", lines=False)
        for (name, reason), names in found.items()
    ]
    return ["", *lines]
