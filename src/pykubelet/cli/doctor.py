"""`pykubelet doctor`: is this machine fit to be a node, and if not, what to do.

Runs every check, whatever the others say, and prints the findings: a table for people, plain
lines into a pipe, JSON for programs. It changes nothing, and never shows a traceback.
"""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from pykubelet.cli.doctor_checks import MACHINE_CHECKS, Check, Finding, Patient, Status, warn
from pykubelet.cli.runtime_checks import RUNTIME_CHECKS

__all__ = ["CHECKS", "Finding", "Patient", "Status", "examine", "run_doctor"]

CHECKS: tuple[Check, ...] = (*MACHINE_CHECKS, *RUNTIME_CHECKS)


def run_doctor(data_dir: Path, endpoint: str | None, as_json: bool) -> int:
    """Examine this machine and print what was found; gives 1 when a node cannot work here, else 0.

    `endpoint` is the runtime to ask; without one the embedded runtime's needs are checked.
    """
    findings = examine(Patient(data_dir, endpoint))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be any bytes
    if as_json:
        print(as_document(findings))
    elif sys.stdout.isatty():
        print_table(findings)
    else:
        print("\n".join(as_lines(findings)))
    return 1 if any(finding.status is Status.FAIL for finding in findings) else 0


def examine(patient: Patient, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Run the checks; one that fails is a finding, too."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check(patient)
        # A doctor that falls ill helps nobody: whatever a check trips over, the others still count.
        except Exception as err:
            area = check.__name__.removeprefix("check_").replace("_", " ")
            what = f"could not be checked: {type(err).__name__}: {err}"
            findings.append(
                warn(area, " ".join(what.split()), "if this machine is healthy, report it as a bug")
            )
    return findings


def as_document(findings: list[Finding]) -> str:
    """Write the findings as JSON."""
    counts = Counter(finding.status for finding in findings)
    document = {
        "findings": [
            {"area": one.area, "status": one.status.value, "what": one.what, "remedy": one.remedy}
            for one in findings
        ],
        **{status.value: counts[status] for status in Status},
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def as_lines(findings: list[Finding]) -> list[str]:
    """Write a line per finding and one per remedy, for logs and pipes."""
    width = max((len(finding.area) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status.value:<5} {finding.area:<{width}}  {finding.what}")
        if finding.remedy:
            lines.append(f"{'':5} {'':{width}}  -> {finding.remedy}")
    return [*lines, summary(findings)]


def print_table(findings: list[Finding]) -> None:
    """Print a table for people."""
    # Imported here: the agent shares this package, and its memory counts.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
    table = Table("", "Area", "Finding", header_style="bold", expand=False)
    for finding in findings:
        colour = colours[finding.status]
        cell = Text(finding.what)
        if finding.remedy:
            cell.append(f"\n-> {finding.remedy}", style=colour)
        table.add_row(Text(finding.status.value, style=colour), Text(finding.area), cell)
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(summary(findings)))


def summary(findings: list[Finding]) -> str:
    """Say it in one line."""
    counts = Counter(finding.status for finding in findings)
    verdict = "a node cannot work here yet" if counts[Status.FAIL] else "this machine can be a node"
    return (
        f"{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed: {verdict}"
    )
