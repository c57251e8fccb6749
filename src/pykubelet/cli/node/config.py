"""`pykubelet config print|validate|convert-flags|reload`: results of the config package, and of a reload."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pykubelet.cli.client import run_command
from pykubelet.cli.errors import print_error
from pykubelet.cli.node_access import select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.printers import escape_unprintable
from pykubelet.config.codec import to_yaml
from pykubelet.config.convert import convert_flags
from pykubelet.config.errors import ConfigError
from pykubelet.config.live import ReloadReport
from pykubelet.config.load import load


def print_effective(argv: Sequence[str]) -> int:
    """Print the effective configuration of a `kubelet` with these flags; return the exit code."""
    try:
        loaded = load(argv)
    except ConfigError as err:
        return print_error("pykubelet config print", err)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(to_yaml(loaded.config), end="")
    return 0


def validate_files(files: Sequence[Path]) -> int:
    """Validate each file separately, as `--config` would load it; return the exit code."""
    code = 0
    for file in files:
        try:
            load(["--config", str(file)])
        except ConfigError as err:
            code = print_error(str(file), err)
        else:
            print(f"{file}: ok")
    return code


def reload(selection: NodeSelection) -> int:
    """Reload the configuration of the selected node; return the exit code."""

    def work() -> int:
        report = select_node(selection).client.reload_config()
        for line in report_lines(report):
            print(escape_unprintable(line, lines=False), file=sys.stderr if report.problems else sys.stdout)
        return 1 if report.problems else 0

    return run_command("pykubelet config reload", work)


def report_lines(report: ReloadReport) -> list[str]:
    """Return the result of a reload as text."""
    if report.problems:
        return [
            "The configuration is invalid, nothing has changed:",
            *(f"  {line}" for line in report.problems),
        ]
    lines = [] if report.applied or report.other or report.unused else ["Nothing has changed."]
    if report.applied or report.other:
        lines = ["Applied:", *(f"  {change}" for change in (*report.applied, *report.other))]
    if report.unused:
        lines += ["Not used by this node:", *(f"  {change}" for change in report.unused)]
    if report.restart_required:
        lines.append("Requires a restart:")
        lines += [f"  {change} ({change.restart_reason})" for change in report.restart_required]
    return lines


def convert(argv: Sequence[str]) -> int:
    """Print the configuration file, and on standard error the remaining flags; return the exit code."""
    try:
        document, remaining, notes = convert_flags(argv)
    except ConfigError as err:
        return print_error("pykubelet config convert-flags", err)
    print(document, end="")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print("run with: kubelet --config FILE " + shlex.join(remaining), file=sys.stderr)
    return 0
