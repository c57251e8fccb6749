"""`python -m tests.conformance`: run the upstream node e2e suite against a kubelet in a rig of its own.

Environment: `AGENT` is `ours` (the default) or `reference`, the upstream kubelet. `FOCUS` and `SKIP` are
regular expressions on the names of specs, `PROCS` is the number of parallel processes, `RESULTS` the
directory for logs and the report. Without FOCUS and SKIP, a run is complete: every `[NodeConformance]` spec
that is not Serial, Slow, Flaky, Disruptive or Alpha, and then, in one process, the specs of statistics that
are Serial or no `[NodeConformance]` specs.

Outcomes go into the agent's column of `tests/data/conformance.tsv`. Exits with 1 when our agent fails a spec
that the upstream kubelet passes, with 2 when the suite did not run to its end, with 3 when the rig cannot be
built on this host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from pykubelet.devcluster.layout import DevClusterError, NotAvailable
from pykubelet.standalone.instance import EmbeddedError
from tests.conformance.report import FAILED, Outcome, SuiteError, read_report, summary
from tests.conformance.rig import (
    GINKGO,
    IN_NAMESPACE,
    SUITE,
    Rig,
    RigError,
    check_host,
    find_binaries,
    namespace_command,
    running_rig,
)
from tests.conformance.table import (
    OURS,
    REFERENCE,
    Table,
    TableError,
    failure_lines,
    format_table,
    load_table,
    merge,
    regressions,
)

TABLE = Path(__file__).parents[1] / "data" / "conformance.tsv"
FOCUS = r"\[NodeConformance\]"
SKIP = r"\[(Serial|Slow|Flaky|Disruptive|Alpha)\]"
STATISTICS = r"ResourceMetricsAPI|(Summary API|ContainerMetrics) .*\[Serial\]"
"""Specs of statistics that the expressions above leave out; Go's have no look-ahead for an exception."""
STATISTICS_SKIP = r"\[(Slow|Flaky|Disruptive|Alpha)\]"
PROCS = 10
RESULTS = Path("/tmp/pykubelet-conformance")
_TIMEOUT = "3h"
_SAY_EVERY = 60.0
_POLL_SECONDS = 1.0
_STALL_SECONDS = 480.0
"""Longer than any spec takes: the longest wait five minutes and clean up."""
_END_SECONDS = 150.0
"""Ginkgo waits 30 s for an interrupted spec and for each of its clean-ups."""
_NO_RIG = (
    *(ValueError, TableError, RigError, NotAvailable, DevClusterError, EmbeddedError, AssertionError),
    # The rig is built from the tests' own fixtures.
    *(pytest.fail.Exception, pytest.skip.Exception),
)
EXIT_REGRESSION, EXIT_SUITE, EXIT_RIG, EXIT_TERMINATED = 1, 2, 3, 143


@dataclass(frozen=True, slots=True)
class Pass:
    """One start of the suite: the specs, and the number of processes that run them."""

    name: str
    """Name of its report and of its log."""
    focus: str
    skip: str
    procs: int


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of one run."""

    agent: str
    passes: tuple[Pass, ...]
    results: Path
    complete: bool
    """Whether the run covers all specs of the table."""


def read_options(environ: Mapping[str, str]) -> Options:
    """Return the options of the environment. Raises ValueError with the variable that is wrong."""
    agent = environ.get("AGENT") or OURS
    if agent not in (OURS, REFERENCE):
        raise ValueError(f"AGENT={agent} is invalid: use {OURS} or {REFERENCE}")
    procs = environ.get("PROCS") or str(PROCS)
    if not procs.isdecimal() or int(procs) < 1:
        raise ValueError(f"PROCS={procs} is invalid: use a number from 1 on")
    complete = not environ.get("FOCUS") and "SKIP" not in environ
    first = Pass("suite", environ.get("FOCUS") or FOCUS, environ.get("SKIP", SKIP), int(procs))
    return Options(
        agent=agent,
        passes=(first, Pass("statistics", STATISTICS, STATISTICS_SKIP, 1)) if complete else (first,),
        results=Path(environ.get("RESULTS") or RESULTS / agent),
        complete=complete,
    )


def exit_code(agent: str, table: Table, outcomes: list[Outcome]) -> int:
    """Return the exit code of a run whose outcomes are in `table`."""
    return EXIT_REGRESSION if agent == OURS and regressions(table, outcomes) else 0


def main() -> int:
    """Entry point; returns the exit code."""
    # So that the rig is removed, whoever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        if sys.argv[1:]:
            raise ValueError(
                f"unexpected argument {sys.argv[1]}: use the variables AGENT, FOCUS, SKIP, PROCS, RESULTS"
            )
        options = read_options(os.environ)
        load_table(TABLE)  # an invalid one is reported before the run
        check_host()
        binaries = find_binaries(_say)
        if os.environ.get(IN_NAMESPACE) != "1":
            command = namespace_command(["-m", "tests.conformance"])
            os.execvpe(command[0], command, {**os.environ, IN_NAMESPACE: "1"})
        shutil.rmtree(options.results, ignore_errors=True)
        options.results.mkdir(parents=True)
        began = time.monotonic()
        with running_rig(binaries, options.agent, _say) as rig:
            try:
                stalled = {one.name: _run_suite(rig, one, options.results) for one in options.passes}
            finally:
                shutil.copy(rig.node.log, options.results / "kubelet.log")
                shutil.copy(rig.node.instance.containerd_log, options.results / "containerd.log")
        outcomes = [
            outcome
            for name, interrupted in stalled.items()
            for outcome in read_report(options.results / f"{name}.json", interrupted=interrupted)
        ]
    except _NO_RIG as err:
        return _fail(str(err), EXIT_RIG)
    except SuiteError as err:
        return _fail(str(err), EXIT_SUITE)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_TERMINATED)
    complete = options.complete and not any(stalled.values())
    table = merge(load_table(TABLE), options.agent, outcomes, complete=complete)
    TABLE.write_text(format_table(table))
    for line in failure_lines(table, options.agent, outcomes):
        print(line)
    print(f"{summary(outcomes)}, {time.monotonic() - began:.0f} s; logs in {options.results}")
    if options.agent == OURS and (worse := regressions(table, outcomes)):
        failed = sum(outcome.state == FAILED for outcome in outcomes)
        print(f"{len(worse)} of {failed} failures are specs that the upstream kubelet passes")
    return exit_code(options.agent, table, outcomes)


def _run_suite(rig: Rig, specs: Pass, results: Path) -> bool:
    """Run specs of the suite to their end; the report and the log are in the results.

    Returns whether it stalled and was interrupted: a helper of the suite loops for ever on a page of metrics
    that is not one, and ginkgo has no limit for a single spec.
    """
    work, log = results / "work", results / f"{specs.name}.log"
    work.mkdir(exist_ok=True)
    command = [
        *("setpriv", "--pdeathsig", "TERM", "--", str(rig.binaries.suite / GINKGO)),
        f"--procs={specs.procs}",
        "--no-color",
        f"--timeout={_TIMEOUT}",
        f"--focus={specs.focus}",
        *([f"--skip={specs.skip}"] if specs.skip else []),
        f"--json-report={specs.name}.json",
        f"--output-dir={results}",
        str(rig.binaries.suite / SUITE),
        *("--", *rig.suite_arguments()),
    ]
    _say(f"Running the suite in {specs.procs} processes; its log is {log}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=work, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    began = said = changed = time.monotonic()
    size, stalled = 0, False
    try:
        while process.poll() is None:
            if rig.node.process is not None and (code := rig.node.process.poll()) is not None:
                raise SuiteError(f"the kubelet ended with {code}: {rig.node.log_tail(3)}")
            if (now := time.monotonic()) - said > _SAY_EVERY:
                said = now
                _say(f"  {_finished(log)} after {now - began:.0f} s")
            if (written := log.stat().st_size) != size:
                size, changed = written, now
            elif now - changed > _STALL_SECONDS:
                _say(f"No spec finished within {_STALL_SECONDS:.0f} s: interrupting those that run")
                stalled = True
                break
            time.sleep(_POLL_SECONDS)
    finally:
        _end_group(process)
    return stalled


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End ginkgo and its test processes, if they still run; interrupted specs have time to clean up."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _finished(log: Path) -> str:
    """Return the progress in ginkgo's log: a bullet per finished spec, and FAILED with those that failed."""
    text = log.read_text(errors="replace")
    return f"{text.count('•')} specs finished, {text.count('• [FAILED]')} failed"


def _say(text: str) -> None:
    print(f"conformance: {text}", file=sys.stderr, flush=True)


def _fail(text: str, code: int) -> int:
    _say(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
