"""`pykubelet top`: usage of the pods, of one pod's containers, or of the node; once, or at an interval.

Numbers come from the Summary API on the control socket. A pod's CPU and memory are those of its cgroup, so
they include what no container of the pod accounts for (the sandbox, files in memory-backed volumes). Network
counters are since the pod's start, or with `--watch` per second between two samples.

A terminal that is watched shows as many rows and columns as fit; elsewhere the table is complete, and with
`--watch` it is printed again at every interval, below a line with the time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pykubelet.api.pod import Pod
from pykubelet.api.stats import Summary
from pykubelet.cli.client import (
    NodeClient,
    NodeError,
    SelectionError,
    choose_pod,
    draw_live,
    run_command,
)
from pykubelet.cli.node_access import select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import serialized
from pykubelet.cli.pods.usage import NO_TRAFFIC, Traffic, TrafficRates, traffic
from pykubelet.cli.pods.usage_table import (
    Column,
    UsageRow,
    View,
    columns,
    container_rows,
    node_line,
    node_rows,
    pod_rows,
    sort_key,
)
from pykubelet.cli.printers import escape_unprintable, format_columns, is_finished, status_text
from pykubelet.server.pods import NodePods

if TYPE_CHECKING:
    from rich.text import Text

PROGRAM = "pykubelet top"
NODE_KEY = ""
"""Key of the node's network counters; pods have their uid."""
_WARNING_PERCENT, _CRITICAL_PERCENT = 75, 90
_GAP = 3
_ESSENTIAL_COLUMNS = 3
"""Columns that a narrow terminal shows in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """Options of `top`."""

    pod: str | None = None
    """Name of the pod whose containers are shown."""
    node: bool = False
    """Whether the node and its system containers are shown."""
    sort: str = "cpu"
    """A key of `SORT_KEYS`."""
    output: str = "table"
    """table, wide, json, yaml or name."""
    watch: bool = False
    interval: float = 5.0
    """Seconds between two updates."""


class NoUsageYet(Exception):
    """Raised when nothing has been measured of what is to be shown; the text is one line with a remedy."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Selected usage at one time, in order."""

    rows: Sequence[UsageRow]
    columns: Sequence[Column]
    totals: str
    """Totals of the node in one line."""
    time: datetime
    detail: bool
    """Whether numbers have more digits."""
    problem: str = ""
    """Error of the last request; the rows are older then."""

    def cells(self) -> list[list[str]]:
        """Return the heading and the rows, safe for terminals."""
        rows = [[column.cell(row, self.detail) for column in self.columns] for row in self.rows]
        table = [[column.heading for column in self.columns], *rows]
        return [[escape_unprintable(cell, lines=False) for cell in row] for row in table]


@dataclass(slots=True)
class UsageReader:
    """Requests usage from the node and selects what the options name.

    Every method raises NodeError, SelectionError when no pod has the name, and NoUsageYet unless watching.
    """

    client: NodeClient
    options: TopOptions
    _rates: TrafficRates = field(default_factory=TrafficRates)

    def snapshot(self) -> Snapshot:
        """Return the selected rows."""
        options, now, cores = self.options, datetime.now(UTC), os.cpu_count()
        node, pod = self._pods()
        summary = self.client.summary()
        network = self._rates.update(summary) if options.watch else _counters(summary)
        view: View = "node" if options.node else "container" if pod is not None else "pod"
        if options.node:
            rows = node_rows(summary.node, network.get(NODE_KEY, NO_TRAFFIC), cores)
        elif pod is not None:
            stats = next((found for found in summary.pods if found.pod_ref.uid == pod.uid), None)
            rows = container_rows(pod, stats, now)
        else:
            rows = pod_rows(node, summary, network, now)
        if rows and not options.watch and not any(row.is_measured for row in rows):
            raise _no_usage_yet(pod, node, options)
        # The node's own row stays first: its sample may be older than a system container's, and less.
        first = 1 if options.node else 0
        return Snapshot(
            [*rows[:first], *sorted(rows[first:], key=lambda row: sort_key(row, options.sort))],
            columns(view, wide=options.output == "wide", rates=options.watch),
            node_line(summary.node, len(summary.pods), cores),
            now,
            detail=options.output == "wide",
        )

    def document(self) -> dict[str, Any]:
        """Return the selected part of the Summary as the node reports it, with its pods in order."""
        node, pod = self._pods()
        summary, document = self.client.summary_document()
        if self.options.node:
            return {"node": document.get("node", {})}
        rows = pod_rows(node, summary, _counters(summary), datetime.now(UTC))
        order = [
            index for index, stats in enumerate(summary.pods) if pod is None or stats.pod_ref.uid == pod.uid
        ]
        if pod is not None and not order:
            raise _no_usage_yet(pod, node, self.options)
        order.sort(key=lambda index: sort_key(rows[index], self.options.sort))
        return document | {"pods": [document["pods"][index] for index in order]}

    def _pods(self) -> tuple[NodePods, Pod | None]:
        node = self.client.pods()
        name = self.options.pod
        return node, None if name is None else choose_pod(node.pods, name, node.states)


def run_top(selection: NodeSelection, options: TopOptions) -> int:
    """Print the usage; return the exit code."""

    def work() -> int:
        reader = UsageReader(select_node(selection).client, options)
        if options.output in ("json", "yaml"):
            print(serialized(reader.document(), options.output), end="")
        elif options.watch:
            (_watch_live if sys.stdout.isatty() else _watch_plain)(reader)
        else:
            _print_once(reader.snapshot(), options)
        return 0

    return run_command(PROGRAM, work, NoUsageYet)


def _counters(summary: Summary) -> dict[str, Traffic]:
    pods = {stats.pod_ref.uid: traffic(stats.network) for stats in summary.pods}
    return {**pods, NODE_KEY: traffic(summary.node.network)}


def _no_usage_yet(pod: Pod | None, node: NodePods, options: TopOptions) -> NoUsageYet:
    retry = "try again in some seconds, or watch with -w"
    if options.node:
        return NoUsageYet(f"the node has not been measured yet: {retry}")
    if pod is None:
        return NoUsageYet(f"no pod has been measured yet: {retry}")
    status = escape_unprintable(status_text(pod, node.states.get(pod.uid, "syncing")), lines=False)
    if is_finished(pod):
        return NoUsageYet(f"pod {pod.metadata.name} is {status}: only pods that run use anything")
    return NoUsageYet(f"pod {pod.metadata.name} ({status}) has not been measured yet: {retry}")


def _print_once(snapshot: Snapshot, options: TopOptions) -> None:
    if not snapshot.rows:
        print(
            "No running pods. `pykubelet ps` lists all pods, `pykubelet run FILE` starts one", file=sys.stderr
        )
        return
    if options.output == "name":
        for row in snapshot.rows:
            name = f"{row.namespace}/{row.name}" if row.namespace else row.name
            print(escape_unprintable(name, lines=False))
        return
    if sys.stdout.isatty():
        print(snapshot.totals)
    print("\n".join(format_columns(snapshot.cells())))


def _snapshots(reader: UsageReader) -> Iterator[Snapshot]:
    """Yield usage periodically. A failed request yields the last rows and the error, the first raises."""
    snapshot = reader.snapshot()
    while True:
        yield snapshot
        time.sleep(reader.options.interval)
        try:
            snapshot = reader.snapshot()
        except (NodeError, SelectionError) as err:
            snapshot = replace(snapshot, problem=escape_unprintable(str(err).partition("\n")[0], lines=False))


def _watch_plain(reader: UsageReader) -> None:
    last_problem = ""
    for number, snapshot in enumerate(_snapshots(reader)):
        if snapshot.problem:
            if snapshot.problem != last_problem:
                print(f"{PROGRAM}: {snapshot.problem}", file=sys.stderr)
        else:
            title = f"{snapshot.time.astimezone():%Y-%m-%d %H:%M:%S} {snapshot.totals}"
            lines = [*([""] if number else []), title, *format_columns(snapshot.cells())]
            print("\n".join(lines), flush=True)
        last_problem = snapshot.problem


def _watch_live(reader: UsageReader) -> None:
    # Imported here: only terminal output needs rich.
    from rich.console import Console, Group
    from rich.text import Text

    def render(snapshot: Snapshot) -> Group:
        # The title, the heading and the last line; one more keeps the cursor inside the terminal.
        row_count = max(1, console.height - 4)
        hidden = len(snapshot.rows) - row_count
        shown = replace(snapshot, rows=snapshot.rows[:row_count])
        more = f"{hidden} more rows, " if hidden > 0 else ""
        options = reader.options
        footer = f"{more}sorted by {options.sort}, every {options.interval:g}s; Ctrl-C ends the watching"
        last = Text(snapshot.problem or footer, style="red" if snapshot.problem else "dim")
        lines = [Text(snapshot.totals), *table_lines(shown, console.width), last]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    console = Console(highlight=False)
    draw_live(map(render, _snapshots(reader)), console)


def table_lines(snapshot: Snapshot, width: int) -> list[Text]:
    """Return the table with colours, with only the first columns that fit into `width` characters."""
    from rich.text import Text

    heading, *rows = snapshot.cells()
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    count = fitting_columns(widths, width)
    lines = [Text("".join(_padded(heading, widths, count)), style="bold")]
    for row, cells in zip(snapshot.rows, rows, strict=True):
        line = Text(style="dim" if snapshot.problem else "")
        for column, cell in zip(snapshot.columns, _padded(cells, widths, count), strict=False):
            line.append(cell, style=_colour(column.percent(row)) if column.percent is not None else "")
        lines.append(line)
    return lines


def fitting_columns(widths: Sequence[int], width: int) -> int:
    """Return the number of columns that fit into `width` characters, at least the essential ones."""
    count = len(widths)
    while count > _ESSENTIAL_COLUMNS and sum(widths[:count]) + _GAP * (count - 1) > width:
        count -= 1
    return count


def _padded(cells: Sequence[str], widths: Sequence[int], count: int) -> list[str]:
    padded = [f"{cell:<{width + _GAP}}" for cell, width in zip(cells[:count], widths, strict=False)]
    return [*padded[:-1], cells[count - 1]]


def _colour(percent: float | None) -> str:
    if percent is None or percent < _WARNING_PERCENT:
        return ""
    return "red" if percent >= _CRITICAL_PERCENT else "yellow"
