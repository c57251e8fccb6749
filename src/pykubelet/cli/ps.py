"""`pykubelet ps`: the node's pods as a table or JSON, once or updated every second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pykubelet.cli.client import NodeClient, NodeError, end_politely, guarded
from pykubelet.cli.printers import Row, columns, row
from pykubelet.server.pods import NodePods, pod_list_json
from pykubelet.standalone.instance import Instance

PROGRAM = "pykubelet ps"
HEADING = ("NAME", "NAMESPACE", "READY", "STATUS", "RESTARTS", "IP", "AGE")
GONE = "Gone"
_EVERY_SECONDS = 1.0
_GOOD = frozenset({"Running", "Completed"})
_PASSING = ("ContainerCreating", "PodInitializing", "Pending", "Terminating", "NotReady", GONE)


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
            _watch_plainly(client)
        return 0

    return guarded(PROGRAM, work)


def table_rows(node: NodePods, now: datetime) -> list[Row]:
    """Return the rows of the table, sorted by namespace and name."""
    pods = sorted(node.pods, key=lambda pod: (pod.metadata.namespace, pod.metadata.name))
    return [row(pod, node.states.get(pod.uid, "syncing"), now) for pod in pods]


def changes(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """Return the rows that are new, changed in more than their age, or gone (with status Gone)."""
    old = {(line.namespace, line.name): line for line in before}
    new = {(line.namespace, line.name): line for line in after}
    gone = [replace(line, status=GONE, ready="-", ip="-") for place, line in old.items() if place not in new]
    return gone + [
        line for place, line in new.items() if place not in old or _news(old[place]) != _news(line)
    ]


def _news(line: Row) -> Row:
    return replace(line, age="", restarts=line.restarts.partition(" ")[0])


def _print_once(node: NodePods, instance: Instance) -> None:
    if not node.pods:
        print(
            f"No pods. `pykubelet run FILE` starts one, or put a manifest into {instance.manifests}",
            file=sys.stderr,
        )
        return
    print("\n".join(columns([HEADING, *map(astuple, table_rows(node, datetime.now(UTC)))])))


@dataclass(frozen=True, slots=True)
class _Look:
    rows: Sequence[Row]
    problem: str = ""
    """Error of this request; the node may be reachable again later."""


def _looks(client: NodeClient) -> Iterator[_Look]:
    """Yield the table every second. A failed request yields the last rows and the error; the first raises."""
    rows = table_rows(client.pods(), datetime.now(UTC))
    yield _Look(rows)
    while True:
        time.sleep(_EVERY_SECONDS)
        try:
            rows = table_rows(client.pods(), datetime.now(UTC))
        except NodeError as err:
            yield _Look(rows, str(err))
        else:
            yield _Look(rows)


def _watch_plainly(client: NodeClient) -> None:
    """Print the heading once, then only changed rows."""
    shown: Sequence[Row] = []
    complaint = ""
    for number, look in enumerate(_looks(client)):
        news = [] if look.problem else changes(shown, look.rows)
        heading, *lines = columns([HEADING, *map(astuple, [*news, *look.rows])])
        for line in ([heading] if number == 0 else []) + lines[: len(news)]:
            print(line, flush=True)
        if look.problem and look.problem != complaint:
            print(f"{PROGRAM}: {look.problem}", file=sys.stderr)
        shown, complaint = look.rows, look.problem


def _watch_live(client: NodeClient) -> None:
    # Imported here: only terminal output needs rich.
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def picture(look: _Look) -> Group:
        table = Table(*HEADING, box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
        for line in look.rows:
            cells = [Text(cell) for cell in astuple(line)]
            cells[3].stylize(_colour(line))
            table.add_row(*cells, style="dim" if look.problem else "")
        return Group(
            table, Text(look.problem or "Ctrl-C ends the watching", style="red" if look.problem else "dim")
        )

    end_politely()
    console = Console(highlight=False)
    looks = _looks(client)
    with Live(picture(next(looks)), console=console, auto_refresh=False) as live:
        for look in looks:
            live.update(picture(look), refresh=True)


def _colour(line: Row) -> str:
    ready, _, total = line.ready.partition("/")
    if line.status == "Running":
        return "green" if ready == total else "yellow"
    if line.status in _GOOD:
        return "green"
    passing = line.status in _PASSING or line.status.removeprefix("Init:")[:1].isdigit()
    return "yellow" if passing else "red"
