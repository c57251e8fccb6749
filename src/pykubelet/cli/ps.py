"""`pykubelet ps`: the node's pods as a table or JSON, once or updated every second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pykubelet.cli.client import NodeClient, NodeError, exit_on_sigterm, run_command
from pykubelet.cli.printers import Row, format_columns, pod_row
from pykubelet.server.pods import NodePods, pod_list_json
from pykubelet.standalone.instance import Instance

PROGRAM = "pykubelet ps"
HEADING = ("NAME", "NAMESPACE", "READY", "STATUS", "RESTARTS", "IP", "AGE")
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


def run_ps(data_dir: Path, *, watch: bool, as_json: bool) -> int:
    """Print the pods; return the exit code."""

    def work() -> int:
        client = NodeClient(Instance.at(data_dir))
        if as_json:
            print(msgspec.json.format(pod_list_json(client.pods().pods), indent=2).decode())
        elif not watch:
            _print_once(client.pods(), Instance.at(data_dir))
        elif sys.stdout.isatty():
            _watch_live(client)
        else:
            _watch_plain(client)
        return 0

    return run_command(PROGRAM, work)


def table_rows(node: NodePods, now: datetime) -> list[Row]:
    """Return the rows of the table, sorted by namespace and name."""
    pods = sorted(node.pods, key=lambda pod: (pod.metadata.namespace, pod.metadata.name))
    return [pod_row(pod, node.states.get(pod.uid, "syncing"), now) for pod in pods]


def changes(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """Return the rows that are new, changed in more than their age, or gone (with status Gone)."""
    old = {(line.namespace, line.name): line for line in before}
    new = {(line.namespace, line.name): line for line in after}
    removed = [
        replace(line, status=REMOVED_STATUS, ready="-", ip="-") for key, line in old.items() if key not in new
    ]
    return removed + [
        line for key, line in new.items() if key not in old or _without_age(old[key]) != _without_age(line)
    ]


def _without_age(line: Row) -> Row:
    return replace(line, age="", restarts=line.restarts.partition(" ")[0])


def _print_once(node: NodePods, instance: Instance) -> None:
    if not node.pods:
        print(
            f"No pods. `pykubelet run FILE` starts one, or put a manifest into {instance.manifests}",
            file=sys.stderr,
        )
        return
    print("\n".join(format_columns([HEADING, *map(astuple, table_rows(node, datetime.now(UTC)))])))


@dataclass(frozen=True, slots=True)
class _Snapshot:
    rows: Sequence[Row]
    problem: str = ""
    """Error of this request; the node may be reachable again later."""


def _snapshots(client: NodeClient) -> Iterator[_Snapshot]:
    """Yield the table every second. A failed request yields the last rows and the error; the first raises."""
    rows = table_rows(client.pods(), datetime.now(UTC))
    yield _Snapshot(rows)
    while True:
        time.sleep(_POLL_SECONDS)
        try:
            rows = table_rows(client.pods(), datetime.now(UTC))
        except NodeError as err:
            yield _Snapshot(rows, str(err))
        else:
            yield _Snapshot(rows)


def _watch_plain(client: NodeClient) -> None:
    """Print the heading once, then only changed rows."""
    shown: Sequence[Row] = []
    last_problem = ""
    for number, snapshot in enumerate(_snapshots(client)):
        changed = [] if snapshot.problem else changes(shown, snapshot.rows)
        heading, *lines = format_columns([HEADING, *map(astuple, [*changed, *snapshot.rows])])
        for line in ([heading] if number == 0 else []) + lines[: len(changed)]:
            print(line, flush=True)
        if snapshot.problem and snapshot.problem != last_problem:
            print(f"{PROGRAM}: {snapshot.problem}", file=sys.stderr)
        shown, last_problem = snapshot.rows, snapshot.problem


def _watch_live(client: NodeClient) -> None:
    # Imported here: only terminal output needs rich.
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def render(snapshot: _Snapshot) -> Group:
        table = Table(*HEADING, box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
        for line in snapshot.rows:
            cells = [Text(cell) for cell in astuple(line)]
            cells[3].stylize(_colour(line))
            table.add_row(*cells, style="dim" if snapshot.problem else "")
        return Group(
            table,
            Text(snapshot.problem or "Ctrl-C ends the watching", style="red" if snapshot.problem else "dim"),
        )

    exit_on_sigterm()
    console = Console(highlight=False)
    snapshots = _snapshots(client)
    with Live(render(next(snapshots)), console=console, auto_refresh=False) as live:
        for snapshot in snapshots:
            live.update(render(snapshot), refresh=True)


def _colour(line: Row) -> str:
    ready, _, total = line.ready.partition("/")
    if line.status == "Running":
        return "green" if ready == total else "yellow"
    if line.status in _GOOD:
        return "green"
    is_transient = line.status in _TRANSIENT_STATUSES or line.status.removeprefix("Init:")[:1].isdigit()
    return "yellow" if is_transient else "red"
