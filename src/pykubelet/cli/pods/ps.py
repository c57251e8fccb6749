"""`pykubelet ps`: the node's pods as a table or JSON, once or updated every second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime

import msgspec

from pykubelet.api.stats import PodStats
from pykubelet.cli.client import NodeError, draw_live, run_command
from pykubelet.cli.node_access import Node, select_node
from pykubelet.cli.offline import node_pods
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import Output, serialized
from pykubelet.cli.pods.usage import MISSING, format_cpu, format_memory, pod_nano_cores, pod_working_set
from pykubelet.cli.printers import Row, escape_unprintable, format_columns, pod_row
from pykubelet.server.pods import NodePods, pod_list_json

PROGRAM = "pykubelet ps"
HEADING = ("NAME", "NAMESPACE", "READY", "STATUS", "RESTARTS", "IP", "AGE")
WIDE_HEADING = (*HEADING, "CPU(cores)", "MEMORY(bytes)")
_USAGE_SECONDS = 5.0
"""Seconds for which usage is not requested again while watching."""
REMOVED_STATUS = "Gone"
_POLL_SECONDS = 1.0
_GOOD = frozenset({"Running", "Completed"})
_TRANSIENT_STATUSES = (
    "ContainerCreating",
    "PodInitializing",
    "Pending",
    "Terminating",
    "NotReady",
    REMOVED_STATUS,
)


def run_ps(selection: NodeSelection, *, watch: bool = False, output: Output = Output.TABLE) -> int:
    """Print the pods; return the exit code."""

    def work() -> int:
        node = select_node(selection)
        table = _Table(node, output is Output.WIDE)
        if output in (Output.JSON, Output.YAML):
            pods = node_pods(node, PROGRAM).pods
            print(serialized(msgspec.json.decode(pod_list_json(pods)), output), end="")
        elif output is Output.NAME:
            for row in table.rows():
                print(escape_unprintable(f"pod/{row.namespace}/{row.name}", lines=False))
        elif not watch:
            _print_once(table, node)
        elif sys.stdout.isatty():
            _watch_live(table)
        else:
            _watch_plain(table)
        return 0

    return run_command(PROGRAM, work)


class _Table:
    """Table of the node's pods; a wide one has their usage, `-` if the node does not report it."""

    def __init__(self, node: Node, wide: bool) -> None:
        self._node = node
        self._client = node.client
        self._is_first = True
        self._wide = wide
        self._usage: dict[str, PodStats] = {}
        self._usage_time = -_USAGE_SECONDS
        self.heading = WIDE_HEADING if wide else HEADING

    def rows(self) -> list[Row]:
        """Request the pods and return their rows. Raises NodeError."""
        # Only the first request falls back to the runtime: a watch survives a restart of the kubelet.
        node = node_pods(self._node, PROGRAM) if self._is_first else self._client.pods()
        self._is_first = False
        if self._wide and node.pods and time.monotonic() - self._usage_time >= _USAGE_SECONDS:
            self._usage = self._client.pod_usage()
            self._usage_time = time.monotonic()
        return table_rows(node, datetime.now(UTC), self._usage)

    def cells(self, row: Row) -> tuple[str, ...]:
        """Return the cells of a row."""
        return astuple(row)[: len(self.heading)]


def table_rows(node: NodePods, now: datetime, usage: Mapping[str, PodStats]) -> list[Row]:
    """Return the rows of the table, sorted by namespace and name; `usage` is by uid."""
    rows = []
    for pod in sorted(node.pods, key=lambda pod: (pod.metadata.namespace, pod.metadata.name)):
        row = pod_row(pod, node.states.get(pod.uid, "syncing"), now)
        stats = usage.get(pod.uid)
        cpu, memory = format_cpu(pod_nano_cores(stats)), format_memory(pod_working_set(stats))
        rows.append(replace(row, cpu=cpu, memory=memory))
    return rows


def changes(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """Return the rows that are new, changed in more than age and usage, or gone (with status Gone)."""
    old = {(line.namespace, line.name): line for line in before}
    new = {(line.namespace, line.name): line for line in after}
    removed = [
        replace(
            line,
            status=REMOVED_STATUS,
            ready="-",
            ip="-",
            cpu=line.cpu and MISSING,
            memory=line.memory and MISSING,
        )
        for key, line in old.items()
        if key not in new
    ]
    return removed + [
        line for key, line in new.items() if key not in old or _state_of(old[key]) != _state_of(line)
    ]


def _state_of(line: Row) -> Row:
    return replace(line, age="", restarts=line.restarts.partition(" ")[0], cpu="", memory="")


def _print_once(table: _Table, node: Node) -> None:
    rows = table.rows()
    if not rows:
        path = node.manifests
        hint = f" `pykubelet run FILE` starts one, or put a manifest into {path}" if path is not None else ""
        print(f"No pods.{hint}", file=sys.stderr)
        return
    print("\n".join(format_columns([table.heading, *map(table.cells, rows)])))


@dataclass(frozen=True, slots=True)
class _Snapshot:
    rows: Sequence[Row]
    problem: str = ""
    """Error of this request; the node may be reachable again later."""


def _snapshots(table: _Table) -> Iterator[_Snapshot]:
    """Yield the table every second. A failed request yields the last rows and the error; the first raises."""
    rows = table.rows()
    yield _Snapshot(rows)
    while True:
        time.sleep(_POLL_SECONDS)
        try:
            rows = table.rows()
        except NodeError as err:
            yield _Snapshot(rows, str(err))
        else:
            yield _Snapshot(rows)


def _watch_plain(table: _Table) -> None:
    """Print the heading once, then only changed rows."""
    shown: Sequence[Row] = []
    last_problem = ""
    for number, snapshot in enumerate(_snapshots(table)):
        changed = [] if snapshot.problem else changes(shown, snapshot.rows)
        heading, *lines = format_columns([table.heading, *map(table.cells, [*changed, *snapshot.rows])])
        for line in ([heading] if number == 0 else []) + lines[: len(changed)]:
            print(line, flush=True)
        if snapshot.problem and snapshot.problem != last_problem:
            print(f"{PROGRAM}: {snapshot.problem}", file=sys.stderr)
        shown, last_problem = snapshot.rows, snapshot.problem


def _watch_live(table: _Table) -> None:
    # Imported here: only terminal output needs rich.
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    def render(snapshot: _Snapshot) -> Group:
        grid = Table(*table.heading, box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
        for line in snapshot.rows:
            cells = [Text(escape_unprintable(cell, lines=False)) for cell in table.cells(line)]
            cells[3].stylize(_colour(line))
            grid.add_row(*cells, style="dim" if snapshot.problem else "")
        return Group(
            grid,
            Text(snapshot.problem or "Ctrl-C ends the watching", style="red" if snapshot.problem else "dim"),
        )

    draw_live(map(render, _snapshots(table)), Console(highlight=False))


def _colour(line: Row) -> str:
    ready, _, total = line.ready.partition("/")
    if line.status == "Running":
        return "green" if ready == total else "yellow"
    if line.status in _GOOD:
        return "green"
    is_transient = line.status in _TRANSIENT_STATUSES or line.status.removeprefix("Init:")[:1].isdigit()
    return "yellow" if is_transient else "red"
