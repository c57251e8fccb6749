"""The table of conformance results: per spec our agent's state and the upstream kubelet's, side by side.

The file is `tests/data/conformance.tsv`. A complete run replaces its agent's column, and specs that no
longer exist are dropped; a run of one pass changes and adds rows; a run of selected specs changes only rows
that the table has. The reason of a failure of the upstream kubelet is written by hand and kept while it
fails; until then it is the failure's message.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.conformance.report import FAILED, PASSED, SKIPPED, Outcome

OURS, REFERENCE = "ours", "reference"
COLUMNS = ("spec", OURS, REFERENCE, "reason")
_STATES = ("", PASSED, FAILED, SKIPPED)


class TableError(Exception):
    """Raised when the table's file does not have the expected form."""


@dataclass(frozen=True, slots=True)
class Row:
    """The states of one spec; empty where it was not run."""

    spec: str
    ours: str = ""
    reference: str = ""
    reason: str = ""
    """Why the upstream kubelet fails the spec in this rig."""


Table = Mapping[str, Row]


def committed_tables(main: Path) -> list[Path]:
    """Return the main table and those beside it that git tracks, without those of local runs."""
    command = ["git", "-C", str(main.parent), "ls-files", "-z", "--", f"{main.stem}*{main.suffix}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # without git, or not in a repository
        return [main]
    return sorted({main, *(main.parent / name for name in done.stdout.split("\0") if name)})


def load_table(path: Path) -> Table:
    """Read the table; one that does not exist is empty. Raises TableError."""
    try:
        return parse_table(path.read_text())
    except FileNotFoundError:
        return {}


def parse_table(text: str) -> Table:
    """Parse the table's text. Raises TableError with the line that is wrong."""
    rows: dict[str, Row] = {}
    for number, line in enumerate(text.splitlines()):
        cells = line.split("\t")
        if number == 0:
            if tuple(cells) != COLUMNS:
                raise TableError(f"line 1 must be {' '.join(COLUMNS)}")
            continue
        if len(cells) != len(COLUMNS) or cells[1] not in _STATES or cells[2] not in _STATES:
            raise TableError(f"line {number + 1}: not four columns with states {', '.join(_STATES[1:])}")
        if cells[0] in rows:
            raise TableError(f"line {number + 1}: duplicate spec {cells[0]!r}")
        rows[cells[0]] = Row(*cells)
    return rows


def format_table(table: Table) -> str:
    """Return the table's text, sorted by spec."""
    lines = ["\t".join(COLUMNS)]
    for spec in sorted(table):
        row = table[spec]
        lines.append("\t".join((row.spec, row.ours, row.reference, row.reason)))
    return "\n".join(lines) + "\n"


def merge(
    table: Table, agent: str, outcomes: Iterable[Outcome], *, complete: bool, selected: bool = False
) -> Table:
    """Return the table with the outcomes of a run in the column of `agent` (`ours` or `reference`).

    A complete run removes states of specs that it did not run; a run of selected specs adds no rows.
    """
    found = {outcome.spec: outcome for outcome in outcomes}
    merged = {}
    for spec in table.keys() if selected else (table.keys() | found.keys()):
        row, outcome = table.get(spec, Row(spec)), found.get(spec)
        if outcome is not None:
            row = _with_outcome(row, agent, outcome)
        elif complete:
            row = _without_state(row, agent)
        if row.ours or row.reference:
            merged[spec] = row
    return merged


def regressions(table: Table, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the failures of our agent in specs that the upstream kubelet passes."""
    return [
        outcome
        for outcome in outcomes
        if outcome.state == FAILED and table.get(outcome.spec, Row("")).reference == PASSED
    ]


def without_reference(table: Table, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the failures of our agent in specs that have not been run against the upstream kubelet."""
    return [
        outcome
        for outcome in outcomes
        if outcome.state == FAILED and not table.get(outcome.spec, Row("")).reference
    ]


def failure_lines(table: Table, agent: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line per failure, with the other agent's state in the same spec."""
    other = REFERENCE if agent == OURS else OURS
    lines = []
    for outcome in outcomes:
        if outcome.state == FAILED:
            row = table.get(outcome.spec, Row(outcome.spec))
            state = getattr(row, other) or "not run"
            place = f" ({outcome.location})" if outcome.location else ""
            lines.append(f"FAILED [{other}: {state}] {outcome.spec}: {outcome.message}{place}")
    return lines


def _with_outcome(row: Row, agent: str, outcome: Outcome) -> Row:
    if agent == OURS:
        return replace(row, ours=outcome.state)
    if outcome.state != FAILED:
        return replace(row, reference=outcome.state, reason="")
    return replace(row, reference=FAILED, reason=row.reason or outcome.message)


def _without_state(row: Row, agent: str) -> Row:
    return replace(row, ours="") if agent == OURS else replace(row, reference="", reason="")
