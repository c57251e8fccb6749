"""`python -m tests.conformance`: run the upstream node e2e suite against a kubelet in a rig of its own.

Environment: `AGENT` is `ours` (the default) or `reference`, the upstream kubelet. `FOCUS` and `SKIP` are
regular expressions on the names of specs, `PROCS` is the number of parallel processes, `RESULTS` the
directory for logs and the report; `RUNTIME` is 2 for containerd 2.x and runc from the cache. `PASS` is
`host` for the pass on this host, or `vm` for the pass in the virtual machine (`guest.py`). Without FOCUS,
SKIP and PASS, a run is complete: on this host every `[NodeConformance]` spec that is not Serial, Slow, Flaky,
Disruptive or Alpha, and then in the virtual machine, in one process, all specs of statistics. `PASS=pressure`
runs the specs of eviction, garbage collection and log rotation in the virtual machine, which takes hours and
is not part of a complete run.

Outcomes go into the agent's column of `tests/data/conformance.tsv`, of `PASS=pressure` into that of
`conformance_pressure.tsv`, of a run with RUNTIME=2 into that of `conformance-containerd2.tsv`. Exits with 1
when our agent fails a spec that the upstream kubelet passes, or of which the table has no result of the
upstream kubelet, with 2 when the suite did not run to its end, with 3 when the rig cannot be built on this
host.
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
from tests.conformance.guest import SECONDS, in_guest, run_in_guest
from tests.conformance.report import FAILED, Outcome, SuiteError, read_report, summary
from tests.conformance.rig import (
    GINKGO,
    IN_GUEST,
    IN_NAMESPACE,
    ON_HOST,
    SUITE,
    Binaries,
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
    without_reference,
)
from tests.support import newer_runtime
from tests.vm.machine import why_not

_DATA = Path(__file__).parents[1] / "data"
TABLE, PRESSURE_TABLE = _DATA / "conformance.tsv", _DATA / "conformance_pressure.tsv"
NEWER_TABLE = _DATA / "conformance-containerd2.tsv"
"""Outcomes on containerd 2.x."""
FOCUS = r"\[NodeConformance\]"
STATISTICS = r"\b(Summary API|ContainerMetrics|ResourceMetricsAPI)\b"
"""Specs of statistics, which the pass in the virtual machine runs, also those that are Serial."""
STATISTICS_SKIP = r"\[(Slow|Flaky|Disruptive|Alpha)\]"
SKIP = rf"\[(Serial|Slow|Flaky|Disruptive|Alpha)\]|{STATISTICS}"
PRESSURE = (
    r"\b(InodeEviction|ImageGCNoEviction|ImageGCTerminatedPodsContainersCleanup|MemoryAllocatableEviction\w*"
    r"|LocalStorage\w*Eviction\w*|Priority\w+EvictionOrdering\w*|ImageGarbageCollect|GarbageCollect"
    r"|ContainerLogRotation\w*|(SystemNode)?CriticalPod(WithPodLevelResources)?|OOMKiller|KubeletSeparateDiskGC"
    r"|LocalStorageCapacityIsolationFSQuotaMonitoring)\b"
)
"""Specs of pressure: they fill the disk, the memory and the process table, and restart the kubelet."""
ON_THIS_HOST, IN_VM, UNDER_PRESSURE = "host", "vm", "pressure"
PROCS = 10
RESULTS = Path("/tmp/pykubelet-conformance")
_SUITE_SECONDS = 18000.0
"""Time limit of a pass; the specs that run then are interrupted, and the report has what finished."""
_BEFORE_SUITE_SECONDS = 1800.0
"""Part of the virtual machine's time limit for its boot, the rig, and the end of interrupted specs."""
_GINKGO_SECONDS = 300.0
"""Time by which ginkgo's own limit is later: a suite that ginkgo ends has no valid report."""
_SAY_EVERY = 60.0
_POLL_SECONDS = 1.0
_STALL_SECONDS = 480.0
"""Longer than any spec takes: the longest wait five minutes and clean up."""
_STALLED = ".stalled"
"""Suffix of the file that marks an interrupted pass in the results."""
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
    in_vm: bool = False
    """Whether it runs in the virtual machine."""


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of one run."""

    agent: str
    passes: tuple[Pass, ...]
    results: Path
    table: Path
    """File of the outcomes."""
    complete: bool
    """Whether the run covers all specs of the table."""
    selected: bool
    """Whether FOCUS or SKIP choose the specs."""


def read_options(environ: Mapping[str, str]) -> Options:
    """Return the options of the environment. Raises ValueError with the variable that is wrong."""
    agent = environ.get("AGENT") or OURS
    if agent not in (OURS, REFERENCE):
        raise ValueError(f"AGENT={agent} is invalid: use {OURS} or {REFERENCE}")
    procs = environ.get("PROCS") or str(PROCS)
    if not procs.isdecimal() or int(procs) < 1:
        raise ValueError(f"PROCS={procs} is invalid: use a number from 1 on")
    where = environ.get("PASS", "")
    if where not in ("", ON_THIS_HOST, IN_VM, UNDER_PRESSURE):
        raise ValueError(f"PASS={where} is invalid: use {ON_THIS_HOST}, {IN_VM} or {UNDER_PRESSURE}")
    selected = bool(environ.get("FOCUS")) or "SKIP" in environ
    focus, skip = environ.get("FOCUS"), environ.get("SKIP")
    passes = []
    if where in ("", ON_THIS_HOST):
        passes.append(Pass("suite", focus or FOCUS, SKIP if skip is None else skip, int(procs)))
    if where == IN_VM or not (where or selected):
        vm_skip = STATISTICS_SKIP if skip is None else skip
        passes.append(Pass("statistics", focus or STATISTICS, vm_skip, 1, in_vm=True))
    if where == UNDER_PRESSURE:
        passes.append(Pass("pressure", focus or PRESSURE, skip or "", 1, in_vm=True))
    newer = newer_runtime.is_chosen(environ)
    table = PRESSURE_TABLE if where == UNDER_PRESSURE else TABLE
    return Options(
        agent=agent,
        passes=tuple(passes),
        results=Path(environ.get("RESULTS") or RESULTS / (f"{agent}-containerd2" if newer else agent)),
        table=NEWER_TABLE if newer else table,
        complete=not (where or selected),
        selected=selected,
    )


def exit_code(agent: str, table: Table, outcomes: list[Outcome]) -> int:
    """Return the exit code of a run whose outcomes are in `table`."""
    fails = agent == OURS and (regressions(table, outcomes) or without_reference(table, outcomes))
    return EXIT_REGRESSION if fails else 0


def suite_seconds(*, guest: bool) -> float:
    """Return the time limit of a pass in seconds; in the guest it ends before the virtual machine does."""
    return min(_SUITE_SECONDS, SECONDS - _BEFORE_SUITE_SECONDS) if guest else _SUITE_SECONDS


def main() -> int:
    """Entry point; returns the exit code."""
    # So that the rig is removed, whoever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        if sys.argv[1:]:
            raise ValueError(
                f"unexpected argument {sys.argv[1]}: "
                "use the variables AGENT, FOCUS, SKIP, PASS, PROCS, RESULTS, RUNTIME"
            )
        options = read_options(os.environ)
        load_table(options.table)  # an invalid one is reported before the run
        here = [one for one in options.passes if in_guest() or not one.in_vm]
        there = [one for one in options.passes if one not in here]
        if there and (reason := why_not()):
            raise RigError(reason)
        if here:
            check_host()
        binaries = find_binaries(_say)
        if here and os.environ.get(IN_NAMESPACE) != "1":
            command = namespace_command(["-m", "tests.conformance"])
            os.execvpe(command[0], command, {**os.environ, IN_NAMESPACE: "1"})
        _make_empty(options.results)
        began = time.monotonic()
        if here:
            _run_here(binaries, options, here)
        if there:
            _say("Booting the virtual machine")
            run_in_guest(_results_of(there[0], options.results))
        stalled = False
        outcomes: list[Outcome] = []
        for one in options.passes:
            directory = _results_of(one, options.results)
            interrupted = (directory / f"{one.name}{_STALLED}").exists()
            stalled |= interrupted
            outcomes += read_report(directory / f"{one.name}.json", interrupted=interrupted)
    except _NO_RIG as err:
        return _fail(str(err), EXIT_RIG)
    except SuiteError as err:
        return _fail(str(err), EXIT_SUITE)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_TERMINATED)
    complete = options.complete and not stalled
    known = load_table(options.table)
    table = merge(known, options.agent, outcomes, complete=complete, selected=options.selected)
    options.table.write_text(format_table(table))
    for line in failure_lines(table, options.agent, outcomes):
        print(line)
    print(f"{summary(outcomes)}, {time.monotonic() - began:.0f} s; logs in {options.results}")
    if options.agent == OURS and (worse := regressions(table, outcomes)):
        failed = sum(outcome.state == FAILED for outcome in outcomes)
        print(f"{len(worse)} of {failed} failures are specs that the upstream kubelet passes")
    if options.agent == OURS and (unknown := without_reference(table, outcomes)):
        print(f"{len(unknown)} failed, without a result of the reference: run the same with AGENT=reference")
    return exit_code(options.agent, table, outcomes)


def _results_of(one: Pass, results: Path) -> Path:
    """Return the directory with the report of a pass; the guest has one of its own."""
    return results / IN_VM if one.in_vm and not in_guest() else results


def _run_here(binaries: Binaries, options: Options, passes: list[Pass]) -> None:
    """Run passes in one rig on this host; their reports and logs are in the results."""
    with running_rig(binaries, options.agent, _say, IN_GUEST if in_guest() else ON_HOST) as rig:
        try:
            for one in passes:
                _run_suite(rig, one, options.results)
        finally:
            shutil.copy(rig.node.log, options.results / "kubelet.log")
            shutil.copy(rig.node.instance.containerd_log, options.results / "containerd.log")


def _make_empty(directory: Path) -> None:
    """Create a directory, or remove what is in it: in the guest it is a mount point."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _run_suite(rig: Rig, specs: Pass, results: Path) -> None:
    """Run specs of the suite to their end; the report and the log are in the results.

    A suite that stalls is interrupted, which a file in the results records: a helper of the suite loops for
    ever on a page of metrics that is not one, and ginkgo has no limit for a single spec. So is one that
    exceeds the time limit: the report has the specs that finished.
    """
    seconds = suite_seconds(guest=in_guest())
    log = results / f"{specs.name}.log"
    command = [
        *("setpriv", "--pdeathsig", "TERM", "--", str(rig.binaries.suite / GINKGO)),
        f"--procs={specs.procs}",
        "--no-color",
        f"--timeout={seconds + _GINKGO_SECONDS:.0f}s",
        f"--focus={specs.focus}",
        *([f"--skip={specs.skip}"] if specs.skip else []),
        f"--json-report={specs.name}.json",
        f"--output-dir={results}",
        str(rig.work / SUITE),
        *("--", *rig.suite_arguments()),
    ]
    _say(f"Running the suite in {specs.procs} processes; its log is {log}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=rig.work,
            env=rig.suite_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    began = said = changed = time.monotonic()
    size, limit = 0, _STALL_SECONDS * rig.options.slowness
    try:
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            if rig.node.process is not None and (code := rig.node.process.poll()) is not None:
                raise SuiteError(f"the kubelet ended with {code}: {rig.node.log_tail(3)}")
            if (now := time.monotonic()) - said > _SAY_EVERY:
                said = now
                _say(f"  {_finished(log)} after {now - began:.0f} s")
            if (written := log.stat().st_size) != size:
                size, changed = written, now
            elif now - changed > limit:
                _say(f"No spec finished within {limit:.0f} s: interrupting those that run")
                (results / f"{specs.name}{_STALLED}").touch()
                break
            if now - began > seconds:
                _say(f"The suite did not end within {seconds:.0f} s: interrupting the specs that run")
                (results / f"{specs.name}{_STALLED}").touch()
                break
    finally:
        _end_group(process)


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
