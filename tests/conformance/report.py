"""Outcomes of specs, read from ginkgo's JSON report.

Pure: the report is a document, an outcome is passed, failed or skipped. Specs that the selection left
out are not outcomes. A report of a suite that could not start, or that ended early, raises SuiteError.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_STATES = {"passed": PASSED, "skipped": SKIPPED, "pending": SKIPPED}
"""Ginkgo's other states (failed, panicked, timedout, interrupted, aborted) are failures."""
_WORST = (SKIPPED, PASSED, FAILED)
_MESSAGE_LIMIT = 300


class SuiteError(Exception):
    """Raised when the suite as a whole did not run to its end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one spec."""

    spec: str
    """Full name, the texts of its containers included."""
    state: str
    """`passed`, `failed` or `skipped`."""
    message: str = ""
    """Cause of a failure or reason for a skip, one line."""
    location: str = ""
    """Source file and line of a failure."""
    seconds: float = 0.0


class _Location(msgspec.Struct):
    file_name: str = msgspec.field(default="", name="FileName")
    line_number: int = msgspec.field(default=0, name="LineNumber")


class _Failure(msgspec.Struct):
    message: str = msgspec.field(default="", name="Message")
    location: _Location = msgspec.field(default_factory=_Location, name="Location")


class _SpecReport(msgspec.Struct):
    containers: list[str] | None = msgspec.field(default=None, name="ContainerHierarchyTexts")
    leaf: str = msgspec.field(default="", name="LeafNodeText")
    leaf_type: str = msgspec.field(default="", name="LeafNodeType")
    state: str = msgspec.field(default="", name="State")
    run_time: int = msgspec.field(default=0, name="RunTime")
    failure: _Failure = msgspec.field(default_factory=_Failure, name="Failure")


class _SuiteReport(msgspec.Struct):
    special: list[str] | None = msgspec.field(default=None, name="SpecialSuiteFailureReasons")
    specs: list[_SpecReport] | None = msgspec.field(default=None, name="SpecReports")


def read_report(path: Path, *, interrupted: bool = False) -> list[Outcome]:
    """Return the outcomes in ginkgo's report, sorted by spec.

    With `interrupted`, the suite may have been ended early: specs that ran at that time have failed.
    Raises SuiteError when the file is missing or invalid, or when the suite did not run to its end.
    """
    try:
        content = path.read_bytes()
    except OSError as err:
        raise SuiteError(f"the suite wrote no report: {err.strerror}; see the log beside {path}") from err
    return parse_report(content, interrupted=interrupted)


def parse_report(content: bytes, *, interrupted: bool = False) -> list[Outcome]:
    """Return the outcomes in the text of a report, sorted by spec; see `read_report`."""
    try:
        suites = msgspec.json.decode(content, type=list[_SuiteReport])
    except msgspec.DecodeError as err:
        raise SuiteError(f"the suite's report is invalid: {err}") from err
    outcomes: dict[str, Outcome] = {}
    for report in (report for suite in suites for report in suite.specs or ()):
        if report.leaf_type != "It":
            if report.state not in _STATES and report.state:
                raise SuiteError(f"{report.leaf_type} failed: {one_line(report.failure.message)}")
            continue
        outcome = _outcome(report)
        if outcome is None:
            continue
        known = outcomes.get(outcome.spec)
        if known is None or _WORST.index(outcome.state) > _WORST.index(known.state):
            outcomes[outcome.spec] = outcome
    reasons = [reason for suite in suites for reason in suite.special or ()]
    if reasons and not interrupted:
        raise SuiteError("; ".join(reasons))
    if not outcomes:
        raise SuiteError("the suite ran no specs: see its log, FOCUS and SKIP")
    return sorted(outcomes.values(), key=lambda outcome: outcome.spec)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the counts of the outcomes in one line."""
    counts = {state: sum(one.state == state for one in outcomes) for state in (PASSED, FAILED, SKIPPED)}
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"{len(outcomes)} specs: {told}"


def one_line(text: str, limit: int = _MESSAGE_LIMIT) -> str:
    """Return a message of several lines as one, shortened to `limit` characters."""
    joined = " ".join(text.split())
    return joined if len(joined) <= limit else f"{joined[: limit - 1]}…"


def _outcome(report: _SpecReport) -> Outcome | None:
    state = _STATES.get(report.state, FAILED)
    message = one_line(report.failure.message)
    # A spec that the selection leaves out is skipped without a reason.
    if state == SKIPPED and not message:
        return None
    place = report.failure.location
    file = re.sub(r"^.*/(?=test/)", "", place.file_name)
    return Outcome(
        spec=one_line(" ".join([*(report.containers or ()), report.leaf]), limit=1000),
        state=state,
        message=message,
        location=f"{file}:{place.line_number}" if file else "",
        seconds=report.run_time / 1e9,
    )
