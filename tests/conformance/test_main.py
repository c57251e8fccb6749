"""A run whose only pass is in the virtual machine: report, table and exit code, without booting it."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conformance import __main__ as conformance
from tests.conformance.guest import SECONDS
from tests.conformance.report import SuiteError, read_report
from tests.conformance.rig import GINKGO, IN_GUEST, Binaries
from tests.conformance.table import Row, format_table, load_table

SPEC = "[sig-node] Summary API should report"
OTHER = "[sig-node] Pods should run"


def spec_report(state: str) -> dict[str, Any]:
    failure = {"Message": "Timed out", "Location": {"FileName": "/x/test/e2e_node/a.go", "LineNumber": 7}}
    return {
        "ContainerHierarchyTexts": ["[sig-node] Summary API"],
        "LeafNodeText": "should report",
        "LeafNodeType": "It",
        "State": state,
        "Failure": failure if state == "failed" else {},
    }


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table of a run that boots no virtual machine and has no namespace of its own."""
    path = tmp_path / "table.tsv"
    path.write_text(format_table({OTHER: Row(OTHER, "passed", "passed")}))
    monkeypatch.setattr(conformance, "TABLE", path)
    monkeypatch.setattr(conformance, "why_not", lambda: "")
    monkeypatch.setattr(conformance, "find_binaries", lambda _: None)
    monkeypatch.setattr("sys.argv", ["conformance"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for name in ("AGENT", "FOCUS", "SKIP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PASS", "vm")
    monkeypatch.setenv("RESULTS", str(tmp_path / "results"))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *, state: str, special: list[str] | None = None) -> int:
    def write_report(results: Path) -> None:
        results.mkdir()
        report = [{"SpecialSuiteFailureReasons": special, "SpecReports": [spec_report(state)]}]
        (results / "statistics.json").write_text(json.dumps(report))

    monkeypatch.setattr(conformance, "run_in_guest", write_report)
    return conformance.main()


def test_main_vm_pass_adds_rows_and_keeps_others(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, state="passed") == 0
    assert load_table(table) == {OTHER: Row(OTHER, "passed", "passed"), SPEC: Row(SPEC, "passed")}
    assert "1 specs: 1 passed" in capsys.readouterr().out


def test_main_vm_pass_failure_that_upstream_passes_is_regression(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table.write_text(format_table({SPEC: Row(SPEC, "passed", "passed")}))
    assert run(monkeypatch, state="failed") == conformance.EXIT_REGRESSION
    output = capsys.readouterr().out
    assert f"FAILED [reference: passed] {SPEC}: Timed out (test/e2e_node/a.go:7)" in output


def test_main_vm_pass_suite_ended_early_exits_with_suite_code(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = table.read_text()
    assert run(monkeypatch, state="passed", special=["timed out"]) == conformance.EXIT_SUITE
    assert table.read_text() == before


def test_main_vm_pass_machine_failed_exits_with_suite_code(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise SuiteError("the virtual machine failed")

    monkeypatch.setattr(conformance, "run_in_guest", fail)
    assert conformance.main() == conformance.EXIT_SUITE


def test_main_vm_pass_no_virtual_machine_here_exits_with_rig_code(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conformance, "why_not", lambda: "qemu is missing")
    assert run(monkeypatch, state="passed") == conformance.EXIT_RIG
    assert "qemu is missing" in capsys.readouterr().err


def test_main_vm_pass_needs_no_rig_on_host(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Binaries:
        raise AssertionError("the rig must not be started on the host")

    monkeypatch.setattr(conformance, "check_host", fail)
    monkeypatch.setattr(conformance, "running_rig", fail)
    assert run(monkeypatch, state="passed") == 0


def test_suite_seconds_guest_ends_before_virtual_machine() -> None:
    assert conformance.suite_seconds(guest=False) == 18000
    limit = conformance.suite_seconds(guest=True) + conformance._GINKGO_SECONDS
    assert limit + conformance._END_SECONDS < SECONDS - 1000


_SLOW_GINKGO = """#!/bin/bash
for argument; do case $argument in --output-dir=*) directory=${argument#*=};; esac; done
trap "cp $directory/ready $directory/statistics.json; exit 1" TERM
touch "$directory/started"
while :; do sleep 0.05; done
"""


def test_run_suite_exceeds_time_limit_keeps_finished_specs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ginkgo = tmp_path / GINKGO
    ginkgo.write_text(_SLOW_GINKGO)
    ginkgo.chmod(0o755)
    report = [{"SpecialSuiteFailureReasons": ["Interrupted by User"], "SpecReports": [spec_report("passed")]}]
    (tmp_path / "ready").write_text(json.dumps(report))
    rig = SimpleNamespace(
        binaries=SimpleNamespace(suite=tmp_path),
        work=tmp_path,
        suite_arguments=list,
        suite_environment=lambda: dict(os.environ),
        options=IN_GUEST,
        node=SimpleNamespace(process=None),
    )

    def wait_started(_: float) -> None:
        while not (tmp_path / "started").exists():
            time.sleep(0.01)

    monkeypatch.setattr(conformance, "suite_seconds", lambda guest: 0.0)
    monkeypatch.setattr(conformance, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait_started))
    specs = conformance.Pass("statistics", "x", "", 1)
    conformance._run_suite(rig, specs, tmp_path)  # type: ignore[arg-type]
    assert (tmp_path / "statistics.stalled").exists()
    (outcome,) = read_report(tmp_path / "statistics.json", interrupted=True)
    assert (outcome.spec, outcome.state) == (SPEC, "passed")
