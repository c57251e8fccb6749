"""Tables of listing commands that are updated until Ctrl-C (`-w`).

On a terminal the table is drawn in the place of the previous one. Elsewhere the heading is printed once, then
each row that is new, has changed, or is gone. A failed request does not end the watch, because the kubelet or
its runtime may be restarted: the last rows stay, with the error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pykubelet.cli.client import draw_live
from pykubelet.cli.printers import escape_unprintable, format_columns

GONE = "Gone"
INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class WatchedRow:
    """A row of a watched table."""

    key: tuple[str, ...]
    """Identity of what the row shows."""
    cells: tuple[str, ...]
    state: tuple[str, ...]
    """What counts as a change: the cells without ages."""


@dataclass(frozen=True, slots=True)
class Watch:
    """A table to watch; `read` requests its rows."""

    program: str
    heading: tuple[str, ...]
    read: Callable[[], Sequence[WatchedRow]]
    errors: tuple[type[Exception], ...]
    """Errors of `read` after which the watch goes on; those of the first request end it."""
    status_column: int
    """Column that shows that a row is gone."""
    interval: float = INTERVAL_SECONDS


@dataclass(frozen=True, slots=True)
class _Snapshot:
    rows: Sequence[WatchedRow]
    problem: str = ""


def watch_table(watch: Watch) -> None:
    """Show a table until interrupted. Raises what `read` raises at its first call."""
    if sys.stdout.isatty():
        _watch_live(watch)
    else:
        _watch_plain(watch)


def changed_cells(
    before: Sequence[WatchedRow], after: Sequence[WatchedRow], status_column: int
) -> list[tuple[str, ...]]:
    """Return the cells of the rows that are gone, then of those that are new or have changed."""
    old = {row.key: row for row in before}
    new = {row.key for row in after}
    gone = [_gone(row.cells, status_column) for row in before if row.key not in new]
    return gone + [row.cells for row in after if row.key not in old or old[row.key].state != row.state]


def _gone(cells: tuple[str, ...], status_column: int) -> tuple[str, ...]:
    return (*cells[:status_column], GONE, *cells[status_column + 1 :])


def _snapshots(watch: Watch) -> Iterator[_Snapshot]:
    rows = watch.read()
    yield _Snapshot(rows)
    while True:
        time.sleep(watch.interval)
        try:
            rows = watch.read()
        except watch.errors as err:
            yield _Snapshot(rows, str(err))
        else:
            yield _Snapshot(rows)


def _watch_plain(watch: Watch) -> None:
    shown: Sequence[WatchedRow] = []
    problem = ""
    for number, snapshot in enumerate(_snapshots(watch)):
        changed = [] if snapshot.problem else changed_cells(shown, snapshot.rows, watch.status_column)
        # The other rows only determine the widths.
        rows = [watch.heading, *changed, *(row.cells for row in snapshot.rows)]
        heading, *lines = format_columns(rows)
        for line in ([heading] if number == 0 else []) + lines[: len(changed)]:
            print(line, flush=True)
        if snapshot.problem and snapshot.problem != problem:
            text = escape_unprintable(snapshot.problem, lines=False)
            print(f"{watch.program}: {text}", file=sys.stderr, flush=True)
        shown, problem = snapshot.rows, snapshot.problem


def _watch_live(watch: Watch) -> None:
    # Imported here: only terminal output needs rich.
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    def render(snapshot: _Snapshot) -> Group:
        grid = Table(*watch.heading, box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
        for row in snapshot.rows:
            cells = [Text(escape_unprintable(cell, lines=False)) for cell in row.cells]
            grid.add_row(*cells, style="dim" if snapshot.problem else "")
        problem = escape_unprintable(snapshot.problem, lines=False)
        return Group(
            grid, Text(problem or "Ctrl-C ends the watching", style="red" if snapshot.problem else "dim")
        )

    draw_live(map(render, _snapshots(watch)), Console(highlight=False))
