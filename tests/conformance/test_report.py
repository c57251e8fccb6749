"""Reading ginkgo's report: which specs count, and how a suite that did not run is told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.report import (
    FAILED,
    PASSED,
    SKIPPED,
    Outcome,
    SuiteError,
    one_line,
    parse_report,
    read_report,
    summary,
)


def spec(name: str, state: str, message: str = "", **more: Any) -> dict[str, Any]:
    failure = {"Message": message} if message else {}
    return {
        "ContainerHierarchyTexts": ["[sig-node] Pods"],
        "LeafNodeText": name,
        "LeafNodeType": "It",
        "State": state,
        "RunTime": 1_500_000_000,
        "Failure": failure,
        **more,
    }


def report(*specs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps([{"SuiteDescription": "E2eNode Suite", "SpecReports": list(specs), **more}]).encode()


def test_parse_report_each_state_becomes_outcome() -> None:
    states = ("passed", "failed", "panicked", "timedout", "interrupted", "aborted")
    found = parse_report(report(*(spec(state, state, "why") for state in states)))
    assert {one.spec.rpartition(" ")[2]: one.state for one in found} == {
        "passed": PASSED,
        **dict.fromkeys(states[1:], FAILED),
    }


def test_parse_report_skipped_spec_counts_only_with_reason() -> None:
    found = parse_report(report(spec("left out", "skipped"), spec("here", "skipped", "needs swap")))
    assert found == [Outcome("[sig-node] Pods here", SKIPPED, "needs swap", seconds=1.5)]


def test_parse_report_failure_has_location_and_one_line() -> None:
    location = {"FileName": "/root/go/pkg/mod/k8s.io/kubernetes@v1.36.3/test/e2e/x.go", "LineNumber": 7}
    failure = {"Message": "expected\n    true\nto be false", "Location": location}
    (found,) = parse_report(report(spec("a", "failed", Failure=failure)))
    assert (found.message, found.location) == ("expected true to be false", "test/e2e/x.go:7")


def test_parse_report_duplicate_name_keeps_worst_state() -> None:
    found = parse_report(report(spec("a", "failed", "no"), spec("a", "passed"), spec("b", "passed")))
    assert [(one.spec[-1], one.state) for one in found] == [("a", FAILED), ("b", PASSED)]


def test_parse_report_failed_before_suite_raises() -> None:
    before = spec("", "failed", "node is\nnot ready", LeafNodeType="SynchronizedBeforeSuite")
    with pytest.raises(SuiteError, match="SynchronizedBeforeSuite failed: node is not ready"):
        parse_report(report(before, spec("a", "skipped")))


def test_parse_report_interrupted_suite_raises() -> None:
    with pytest.raises(SuiteError, match="Interrupted by Timeout"):
        parse_report(report(spec("a", "passed"), SpecialSuiteFailureReasons=["Interrupted by Timeout"]))


def test_parse_report_suite_interrupted_on_purpose_has_outcomes() -> None:
    specs = (spec("a", "passed"), spec("hung", "interrupted", "Interrupted by User"))
    document = report(*specs, SpecialSuiteFailureReasons=["Interrupted by User"])
    found = parse_report(document, interrupted=True)
    assert [(one.spec.rpartition(" ")[2], one.state) for one in found] == [("a", PASSED), ("hung", FAILED)]


def test_parse_report_no_spec_run_raises() -> None:
    with pytest.raises(SuiteError, match="ran no specs"):
        parse_report(report(spec("left out", "skipped")))


@pytest.mark.parametrize("content", [b"", b"{}", b'[{"SpecReports": 7}]'])
def test_parse_report_invalid_document_raises(content: bytes) -> None:
    with pytest.raises(SuiteError, match="invalid"):
        parse_report(content)


def test_read_report_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="wrote no report"):
        read_report(tmp_path / "report.json")


def test_summary_counts_each_state() -> None:
    outcomes = [Outcome("a", PASSED), Outcome("b", PASSED), Outcome("c", FAILED), Outcome("d", SKIPPED)]
    assert summary(outcomes) == "4 specs: 2 passed, 1 failed, 1 skipped"


def test_one_line_long_text_is_shortened() -> None:
    assert one_line("a  b\n\tc") == "a b c"
    assert one_line("x" * 20, limit=10) == "x" * 9 + "…"
