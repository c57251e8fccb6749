"""Run tests with real containers while random processes of the run are stopped and continued.

    python -m tests.chaos                                       ten minutes of all of them, in a random order
    python -m tests.chaos --seconds 120 tests/machine/podworkers/test_faults.py
    python -m tests.chaos --seed 7                              the same files and the same dice again

About three times a second two processes get SIGSTOP: the agent, containerd, its shims, the control plane, the
helper processes of tests, or pytest's workers; for 0.15 s on average, and for 1 to 3 s at times. What passes
only when everything happens at its usual pace fails then. Processes in containers are left alone.

The harness is the subreaper of the run, so that all of it, daemons included, descends from the harness and
nothing else does. Each process is signalled through a file descriptor of its own, never by a number that
another process may have by now. Whatever ends the harness, short of SIGKILL, continues all of them. When the
time is over the tests in progress end undisturbed and the rest is skipped.
"""

import argparse
import ctypes
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = ("tests/machine", "tests/cluster")
"""Where the tests with real containers are."""

ROUNDS_PER_SECOND = 3.0
STOPS_PER_ROUND = 2
SHORT_SECONDS = 0.12
"""Mean of the short stops; with the long ones the mean is 0.15 s."""
LONG_SECONDS = (1.0, 3.0)
LONG_SHARE = 0.015

GRACE_SECONDS = 600.0
"""How long tests in progress may go on after the time is over."""

_END = "PYKUBELET_CHAOS_END"
"""Environment variable with the time (seconds since 1970) after which no test starts."""
_PR_SET_CHILD_SUBREAPER = 36
_NAMES = ("containerd", "kube-apiserver", "kube-controller", "kube-scheduler", "etcd", "kubelet", "python")
"""How the names of the processes to stop begin."""


# The harness


@dataclass(frozen=True, slots=True)
class Process:
    """A process as /proc shows it."""

    pid: int
    parent: int
    name: str


def processes() -> dict[int, Process]:
    """Return all processes of this machine by their ids."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                # The name is in parentheses and may have any character.
                head, _, rest = (folder / "stat").read_text().rpartition(")")
                found[int(folder.name)] = Process(
                    int(folder.name), int(rest.split()[1]), head.partition("(")[2]
                )
    return found


def descendants(all_processes: Mapping[int, Process], root: int) -> Iterator[Process]:
    """Yield the processes to choose from: those below the root, down to the shims and not into containers."""
    children: dict[int, list[Process]] = {}
    for process in all_processes.values():
        children.setdefault(process.parent, []).append(process)
    waiting = [root]
    while waiting:
        for process in children.get(waiting.pop(), ()):
            if process.name.startswith(_NAMES):
                yield process
            if not process.name.startswith("containerd-shim"):
                waiting.append(process.pid)


@dataclass
class Stopper:
    """Stops processes below this one at random, and continues each when its time has come."""

    dice: random.Random
    stops: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    _stopped: dict[int, tuple[float, int]] = field(default_factory=dict)
    """When to continue a process, and its pidfd, by its id."""

    def stop_some(self) -> None:
        """Stop two processes that run."""
        below = sorted(descendants(processes(), os.getpid()), key=lambda process: process.pid)
        running = [process for process in below if process.pid not in self._stopped]
        for process in self.dice.sample(running, min(STOPS_PER_ROUND, len(running))):
            long = self.dice.random() < LONG_SHARE
            seconds = self.dice.uniform(*LONG_SECONDS) if long else self.dice.expovariate(1 / SHORT_SECONDS)
            self._stop(process, min(seconds, LONG_SECONDS[1]))

    def _stop(self, process: Process, seconds: float) -> None:
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            return
        # The number may have passed to another process before it was opened.
        now = processes().get(process.pid)
        if now is None or (now.parent, now.name) != (process.parent, process.name):
            os.close(descriptor)
            return
        self._stopped[process.pid] = time.monotonic() + seconds, descriptor
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
        self.stops[process.name] += 1
        self.seconds += seconds

    def continue_due(self, now: float) -> None:
        """Continue the processes whose time has come."""
        for pid, (due, descriptor) in list(self._stopped.items()):
            if due <= now:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)
                os.close(descriptor)
                del self._stopped[pid]

    def next_due(self) -> float:
        """Return when the next process is to be continued (monotonic clock)."""
        return min((due for due, _ in self._stopped.values()), default=float("inf"))

    def continue_all(self) -> None:
        """Continue all processes."""
        self.continue_due(float("inf"))


def disturb(run: int, stopper: Stopper, seconds: float) -> int:
    """Stop and continue processes until the run (a process id) ends; return its exit status.

    Nothing is stopped after `seconds`; a run that goes on for long after that is interrupted.
    """
    end = time.monotonic() + seconds
    next_round = time.monotonic()
    try:
        while (status := _reaped(run)) is None:
            now = time.monotonic()
            stopper.continue_due(now)
            if now >= end:
                stopper.continue_all()
                if now >= end + GRACE_SECONDS:
                    os.kill(run, signal.SIGINT)
                    end = now
                time.sleep(0.2)
                continue
            if now >= next_round:
                stopper.stop_some()
                next_round = now + stopper.dice.uniform(0.5, 1.5) / ROUNDS_PER_SECOND
            time.sleep(max(0.005, min(next_round, stopper.next_due()) - time.monotonic()))
    finally:
        stopper.continue_all()
    return status


def _reaped(run: int) -> int | None:
    """Reap what has ended, orphans included; return the exit status of the run when it is among them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == run:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def main() -> int:
    """Parse the command line, run the tests and disturb them."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument(
        "--seed", type=int, default=int(os.environ.get("PYKUBELET_SEED") or secrets.randbelow(2**32))
    )
    parser.add_argument("--seconds", type=float, default=600, help="after which no test starts any more")
    parser.add_argument("tests", nargs="*", default=TESTS, help="files, folders or ids of tests")
    options = parser.parse_args()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    stopper = Stopper(random.Random(options.seed))
    print(f"chaos: seed {options.seed}, {options.seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="pyt-", dir="/tmp", ignore_cleanup_errors=True) as base:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rfE",
            "-p",
            "tests.chaos",
            f"--seed={options.seed}",
        ]
        command += ["--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder", f"--basetemp={base}/t"]
        command += ["-m", "machine", *options.tests]
        environment = {**os.environ, _END: str(time.time() + options.seconds)}
        # Its exit status is had by _reaped.
        # In a session of its own: the kernel sends SIGHUP to a process group with stopped processes whose
        # last link to its session has ended.
        run = subprocess.Popen(command, env=environment, start_new_session=True).pid
        status = -1
        try:
            status = disturb(run, stopper, options.seconds)
        finally:
            if status == -1:
                with suppress(ProcessLookupError):
                    os.kill(run, signal.SIGINT)
                while _reaped(run) is None:
                    time.sleep(0.1)
    kinds = ", ".join(f"{name} {count}" for name, count in stopper.stops.most_common())
    print(f"chaos: {stopper.stops.total()} stops, {stopper.seconds:.0f} s in all: {kinds}")
    if status:
        again = f"make chaos PYKUBELET_SEED={options.seed} SECONDS={options.seconds:.0f}"
        print(f"chaos: failed with seed {options.seed}; again: {again}", file=sys.stderr)
    return status


# The plugin of the run


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Put the files into an order of the seed, after all other plugins had their say."""
    yield
    names = sorted({item.nodeid.partition("::")[0] for item in items})
    random.Random(config.option.seed).shuffle(names)
    items.sort(key=lambda item: names.index(item.nodeid.partition("::")[0]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip what begins after the end."""
    if time.time() > float(os.environ[_END]):
        pytest.skip("the time of this run is over")


if __name__ == "__main__":
    sys.exit(main())
