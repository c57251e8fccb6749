"""The table of results: merging runs into it, what counts as a regression, and the options of a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conformance.__main__ import EXIT_REGRESSION, TABLE, exit_code
from tests.conformance.report import FAILED, PASSED, SKIPPED, Outcome
from tests.conformance.table import (
    OURS,
    REFERENCE,
    Row,
    TableError,
    committed_tables,
    failure_lines,
    format_table,
    load_table,
    merge,
    parse_table,
    regressions,
    without_reference,
)

TABLED = {
    "a": Row("a", PASSED, PASSED),
    "b": Row("b", FAILED, FAILED, "no swap on this host"),
    "c": Row("c", SKIPPED, PASSED),
}


def test_format_table_round_trip_keeps_rows() -> None:
    assert parse_table(format_table(TABLED)) == TABLED


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name\tours\n", "line 1 must be spec ours reference reason"),
        ("spec\tours\treference\treason\na\tpassed\n", "line 2: not four columns"),
        ("spec\tours\treference\treason\na\tgood\tpassed\t\n", "line 2: not four columns"),
        ("spec\tours\treference\treason\na\t\tpassed\t\na\t\t\t\n", "line 3: duplicate spec 'a'"),
    ],
)
def test_parse_table_malformed_line_raises(text: str, problem: str) -> None:
    with pytest.raises(TableError, match=problem):
        parse_table(text)


def test_load_table_missing_file_is_empty(tmp_path: Path) -> None:
    assert load_table(tmp_path / "none.tsv") == {}


def test_merge_complete_run_replaces_column_of_agent() -> None:
    outcomes = [Outcome("a", FAILED, "why"), Outcome("new", PASSED)]
    assert merge(TABLED, OURS, outcomes, complete=True) == {
        "a": Row("a", FAILED, PASSED),
        "b": Row("b", "", FAILED, "no swap on this host"),
        "c": Row("c", "", PASSED),
        "new": Row("new", PASSED, ""),
    }


def test_merge_complete_runs_drop_spec_that_no_longer_exists() -> None:
    table = merge(TABLED, OURS, [Outcome("a", PASSED)], complete=True)
    table = merge(table, REFERENCE, [Outcome("a", PASSED)], complete=True)
    assert table == {"a": Row("a", PASSED, PASSED)}


def test_merge_selected_run_changes_only_known_rows() -> None:
    outcomes = [Outcome("a", FAILED, "why"), Outcome("serial", PASSED)]
    assert merge(TABLED, OURS, outcomes, complete=False, selected=True) == {
        **TABLED,
        "a": Row("a", FAILED, PASSED),
    }


def test_merge_one_pass_adds_rows_and_keeps_others() -> None:
    table = merge(TABLED, OURS, [Outcome("serial", PASSED)], complete=False)
    assert table == {**TABLED, "serial": Row("serial", PASSED)}


def test_merge_reference_failure_keeps_written_reason() -> None:
    outcomes = [Outcome("a", FAILED, "timed out"), Outcome("b", FAILED, "timed out")]
    table = merge(TABLED, REFERENCE, outcomes, complete=False)
    assert table["a"] == Row("a", PASSED, FAILED, "timed out")
    assert table["b"].reason == "no swap on this host"


def test_merge_reference_pass_drops_reason() -> None:
    table = merge(TABLED, REFERENCE, [Outcome("b", PASSED)], complete=False)
    assert table["b"] == Row("b", FAILED, PASSED)


def test_regressions_only_failures_that_reference_passes() -> None:
    outcomes = [
        Outcome("a", FAILED),
        Outcome("b", FAILED),
        Outcome("c", SKIPPED),
        Outcome("unknown", FAILED),
    ]
    assert regressions(TABLED, outcomes) == [Outcome("a", FAILED)]


def test_without_reference_failures_with_empty_reference_or_no_row() -> None:
    table = {**TABLED, "d": Row("d", FAILED), "e": Row("e", PASSED)}
    outcomes = [Outcome(spec, FAILED) for spec in ("a", "b", "c", "d", "unknown")] + [Outcome("e", PASSED)]
    assert without_reference(table, outcomes) == [Outcome("d", FAILED), Outcome("unknown", FAILED)]


def test_exit_code_depends_on_agent_and_regressions() -> None:
    failed, passed = [Outcome("a", FAILED)], [Outcome("a", PASSED), Outcome("b", FAILED)]
    assert exit_code(OURS, TABLED, failed) == EXIT_REGRESSION
    assert exit_code(OURS, TABLED, passed) == 0
    assert exit_code(REFERENCE, TABLED, failed) == 0
    assert exit_code(OURS, TABLED, [Outcome("unknown", FAILED)]) == EXIT_REGRESSION
    assert exit_code(REFERENCE, TABLED, [Outcome("unknown", FAILED)]) == 0
    assert exit_code(OURS, TABLED, [Outcome("unknown", PASSED), Outcome("other", SKIPPED)]) == 0


def test_failure_lines_show_other_agent_and_location() -> None:
    outcomes = [Outcome("a", FAILED, "why", "x.go:7"), Outcome("c", PASSED), Outcome("d", FAILED, "no")]
    assert failure_lines(TABLED, OURS, outcomes) == [
        "FAILED [reference: passed] a: why (x.go:7)",
        "FAILED [reference: not run] d: no",
    ]


def test_stored_table_reference_fails_few_specs_with_reasons() -> None:
    """Verify that the upstream kubelet fails fewer than 15 specs in the rig, each with a reason."""
    failed = [row for row in load_table(TABLE).values() if row.reference == FAILED]
    assert len(failed) < 15
    assert all(row.reason for row in failed)


def test_committed_tables_table_of_local_run_is_not_among_them(tmp_path: Path) -> None:
    tables = [tmp_path / name for name in ("results-2.tsv", "results-local.tsv", "results.tsv")]
    for table in tables:
        table.write_text("")
    assert committed_tables(tables[2]) == [tables[2]], "not in a repository"
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", tables[0].name, tables[2].name], check=True)
    assert committed_tables(tables[2]) == [tables[0], tables[2]]


@pytest.mark.parametrize("path", committed_tables(TABLE), ids=lambda path: path.name)
def test_stored_tables_no_spec_that_reference_passes_has_failed(path: Path) -> None:
    rows = load_table(path).values()
    assert rows
    assert [row.spec for row in rows if row.ours == FAILED and row.reference == PASSED] == []
    assert [row.spec for row in rows if row.ours == FAILED and not row.reference] == []
