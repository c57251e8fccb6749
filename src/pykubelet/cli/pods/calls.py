"""`pykubelet top --calls`: the kubelet's calls to the container runtime and the API server since its start.

Numbers, mean durations and errors come from the kubelet's metrics, which the control socket serves; the page
shows the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pykubelet.cli.client import NodeClient, NodeError, run_command
from pykubelet.cli.node_access import select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import Output, print_listing
from pykubelet.cli.watch import Watch, WatchedRow, watch_table

PROGRAM = "pykubelet top"
HEADING = ("TARGET", "CALL", "COUNT", "MEAN", "ERRORS")
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class _Target:
    """What is called, and the metrics of the calls."""

    name: str
    durations: str
    """Name of the histogram of durations in seconds."""
    label: str
    """Label with the name of the call."""
    errors: str = ""
    """Name of the counter of errors; empty if errors are not counted by call."""


TARGETS = (
    _Target(
        "runtime",
        "kubelet_runtime_operations_duration_seconds",
        "operation_type",
        "kubelet_runtime_operations_errors_total",
    ),
    _Target("api-server", "rest_client_request_duration_seconds", "verb"),
)


@dataclass(frozen=True, slots=True)
class CallStats:
    """All calls of one operation."""

    target: str
    operation: str
    count: int
    seconds: float
    """Total duration."""
    errors: int | None
    """None if errors are not counted."""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row."""
        mean = f"{self.seconds / self.count * 1000:.1f}ms" if self.count else UNKNOWN
        errors = UNKNOWN if self.errors is None else str(self.errors)
        return self.target, self.operation, str(self.count), mean, errors

    def document(self) -> dict[str, object]:
        """Return the numbers as plain values."""
        return {
            "target": self.target,
            "operation": self.operation,
            "count": self.count,
            "seconds": round(self.seconds, 6),
            "errors": self.errors,
        }


def run_calls(selection: NodeSelection, output: Output, *, watch: bool = False) -> int:
    """Print the calls, with `watch` until interrupted; return the exit code."""

    def work() -> int:
        client = select_node(selection).client
        if watch:
            column = HEADING.index("COUNT")
            watch_table(Watch(PROGRAM, HEADING, lambda: _rows(client), (NodeError,), column))
        calls = read_calls(client)
        print_listing(
            output,
            document=lambda: {"calls": [call.document() for call in calls]},
            names=(f"{call.target}/{call.operation}" for call in calls),
            heading=HEADING,
            rows=[call.cells() for call in calls],
            empty="No calls since the kubelet started.",
        )
        return 0

    return run_command(PROGRAM, work)


def _rows(client: NodeClient) -> Sequence[WatchedRow]:
    return [WatchedRow(call.cells()[:2], call.cells(), call.cells()) for call in read_calls(client)]


def read_calls(client: NodeClient) -> list[CallStats]:
    """Return the calls of the running kubelet, the longest in total first. Raises NodeError."""
    status, body = client.document("/metrics")
    if status != 200:
        raise NodeError(
            f"the node does not serve its metrics (status {status}): it may be of an older version"
        )
    return calls_of(body.decode(errors="replace").split("\n"))


def calls_of(lines: Iterable[str]) -> list[CallStats]:
    """Return the calls in lines of the Prometheus text format."""
    # Imported here: other commands start faster without it.
    from prometheus_client.parser import text_string_to_metric_families

    names = {
        name: (target, kind)
        for target in TARGETS
        for name, kind in (
            (f"{target.durations}_count", "count"),
            (f"{target.durations}_sum", "sum"),
            (target.errors, "errors"),
        )
        if name
    }
    # Most of the text is buckets and other metrics.
    chosen = "".join(f"{line}\n" for line in lines if line.partition("{")[0] in names)
    counts: Counter[tuple[str, str]] = Counter()
    errors: Counter[tuple[str, str]] = Counter()
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(chosen):
        for sample in family.samples:
            target, kind = names[sample.name]
            key = target.name, sample.labels.get(target.label, "")
            if kind == "count":
                counts[key] += int(sample.value)
            elif kind == "sum":
                sums[key] += sample.value
            else:
                errors[key] += int(sample.value)
    counted = {target.name for target in TARGETS if target.errors}
    found = [
        CallStats(
            name,
            operation,
            count,
            sums[name, operation],
            errors[name, operation] if name in counted else None,
        )
        for (name, operation), count in counts.items()
    ]
    order = [target.name for target in TARGETS]
    return sorted(found, key=lambda call: (order.index(call.target), -call.seconds, call.operation))
