"""Mutate the imperative code and report the share of mutants that container-free tests catch.

    python -m tests.mutation                       150 mutants of the packages sync and runtime
    python -m tests.mutation --sample 40 --seed 7  other ones
    python -m tests.mutation --only podworkers/workers.py --sample 0    all of some files

One process imports everything and collects the tests once. A first child of it runs them and records which
functions each test enters. Then each mutant gets a child of its own, which replaces the code of one function
in its memory and runs the tests that enter this function, the quick ones first, until one fails. No file is
ever changed, and as root everything runs in a mount namespace in which only a new /tmp can be written: a
mutant of the code that removes directories must not remove the host's. A mutant is caught when a test fails,
and when the tests take several times as long or as much memory as usual; it survives when all pass, or when
no test enters its function.

Exits with 1 when fewer than the target share are caught.
"""

import argparse
import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.mutation.operators import Mutant, codes, mutants, mutated_code

SOURCES = Path("src/pykubelet").resolve()
PACKAGES = ("podworkers", "podsync", "status", "resize", "kuberuntime")
TESTS = tuple(f"tests/unit/{package}" for package in (*PACKAGES, "admission"))
"""Where the tests are that enter these packages without containers."""

TARGET = 0.8
ENOUGH_SECONDS = 30.0
"""How much of the tests' usual time is spent on one mutant at most."""
SLOWER_TIMES = 4.0
"""A mutant whose tests take so many times as long as usual (of processor time) is caught."""
SPARE_CPU_SECONDS = 10
LONGEST_SECONDS = 120.0
"""Limit of wall-clock time for one mutant, for one that waits for ever without using the processor."""
TEST_SECONDS = 30
"""Limit of wall-clock time for one test."""
MEMORY_BYTES = 4 << 30

Place = tuple[str, str, int]
"""A function: its file, qualified name and first line."""

_CONFINED = "PYKUBELET_MUTATION_CONFINED"
_CONFINE = """set -e
mount -t tmpfs -o mode=1777 tmpfs /tmp
cut -d' ' -f2 /proc/mounts | grep -vE '^/(proc|tmp)(/|$)' | sort -u | while read -r path; do
    mount -o remount,bind,ro "$path"
done
exec "$@"
"""

_CAUGHT, _SURVIVED = 0, 1
_STDERR = os.dup(2)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the first run knows of a test."""

    number: int
    seconds: float


@dataclass
class Mutator:
    """A pytest plugin that runs the collected tests on mutants instead of once."""

    sample: Sequence[Mutant]
    workers: int
    caught: list[Mutant] = field(default_factory=list)
    survived: list[tuple[Mutant, int]] = field(default_factory=list)
    """With the number of tests that ran."""
    failed: list[str] = field(default_factory=list)
    """Tests that fail without any mutant."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run each mutant in a child, some at a time."""
        gc.unfreeze()
        functions = _loaded_functions()
        began = time.monotonic()
        entries, self.failed = _entered(session, functions)
        if self.failed:
            return True
        say(f"{len(session.items)} tests enter {len(entries)} functions; {time.monotonic() - began:.0f} s")
        running: dict[int, tuple[Mutant, int, float]] = {}
        waiting = list(reversed(self.sample))
        while waiting or running:
            while waiting and len(running) < self.workers:
                mutant = waiting.pop()
                place = (str(mutant.path), mutant.function, mutant.first_line)
                tests, seconds = _enough(entries.get(place, []))
                if not tests or place not in functions:
                    self._note(mutant, _SURVIVED, 0)
                    continue
                # Compiled here: what fails in the child counts as caught.
                work = partial(_try_mutant, session, mutated_code(mutant), functions[place], tests)
                pid = _child(work, seconds)
                running[pid] = mutant, len(tests), time.monotonic() + LONGEST_SECONDS
            for pid, status in _ended(running, lambda one: one[2]):
                mutant, count, _ = running.pop(pid)
                self._note(mutant, status, count)
        return True

    def _note(self, mutant: Mutant, status: int, tests: int) -> None:
        if status == _SURVIVED:
            self.survived.append((mutant, tests))
            say(f"SURVIVED ({f'{tests} tests' if tests else 'no test enters it'}) {mutant}")
        else:
            self.caught.append(mutant)


def say(text: str) -> None:
    """Print past pytest, which captures the output of tests."""
    os.write(_STDERR, f"{text}\n".encode())


# Children


def _child(work: Callable[[], int], seconds: float) -> int:
    """Run work in a child with limits of processor time and memory; return its process id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = _CAUGHT
    try:
        os.setpgid(0, 0)
        cpu = int(seconds * SLOWER_TIMES) + SPARE_CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        status = work()
    finally:
        os._exit(status)


def _ended(running: dict[int, Any], deadline: Callable[[Any], float]) -> Iterator[tuple[int, int]]:
    """Wait until a child ends, or kill one that takes too long; yield them with _SURVIVED or _CAUGHT."""
    while True:
        found = False
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() > deadline(running[pid]):
                os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, 0)
            if ended:
                found = True
                # Whatever its tests have started is in its process group.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                yield pid, _SURVIVED if status == _SURVIVED << 8 else _CAUGHT
        if found:
            return
        time.sleep(0.02)


def _try_mutant(
    session: pytest.Session, code: CodeType, functions: Sequence[FunctionType], tests: Sequence[Entry]
) -> int:
    for function in functions:
        function.__code__ = code
    items = [session.items[entry.number] for entry in tests]
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return _CAUGHT
    return _SURVIVED


# The first run


def _loaded_functions() -> dict[Place, list[FunctionType]]:
    """Return the functions of the mutated packages that are in memory."""
    found: dict[Place, list[FunctionType]] = defaultdict(list)
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(str(SOURCES)):
            code = one.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(one)
    return found


def _entered(
    session: pytest.Session, functions: dict[Place, list[FunctionType]]
) -> tuple[dict[Place, list[Entry]], list[str]]:
    """Run all tests in a child; return which of them enter each function, and the ids of those that fail."""
    owners: dict[CodeType, Place] = {}
    for place, found in functions.items():
        # A function inside of another one counts as that one.
        owners |= {code: place for function in found for code in codes(function.__code__)}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        pid = _child(lambda: _record(session, owners, Path(result.name)), 3600)
        os.waitpid(pid, 0)
        rows = [json.loads(line) for line in result]
    failed = [session.items[number].nodeid for number, ok, _, _ in rows if not ok]
    if len(rows) < len(session.items) and not failed:
        failed = [f"the run ended at {session.items[len(rows)].nodeid}"]
    entries: dict[Place, list[Entry]] = defaultdict(list)
    for number, _, seconds, places in rows:
        for file, name, line in places:
            entries[file, name, line].append(Entry(number, seconds))
    return entries, failed


def _record(session: pytest.Session, owners: dict[CodeType, Place], path: Path) -> int:
    with path.open("w") as output:
        for number, item in enumerate(session.items):
            following = session.items[number + 1] if number + 1 < len(session.items) else None
            seen: set[CodeType] = set()

            def trace(frame: FrameType, event: str, arg: object, seen: set[CodeType] = seen) -> None:
                if frame.f_code in owners:
                    seen.add(frame.f_code)

            failed, began = session.testsfailed, time.process_time()
            # Of calls only, since it returns nothing: lines would cost ten times as much.
            sys.settrace(trace)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            sys.settrace(None)
            places = sorted({owners[code] for code in seen})
            row = (number, session.testsfailed == failed, time.process_time() - began, places)
            output.write(json.dumps(row) + "\n")
    return 0


def _enough(entries: Sequence[Entry]) -> tuple[list[Entry], float]:
    """Choose tests for a mutant, quick ones first; return them with their usual seconds."""
    chosen: list[Entry] = []
    seconds = 0.0
    for entry in sorted(entries, key=lambda entry: (entry.seconds, entry.number)):
        if seconds > ENOUGH_SECONDS:
            break
        chosen.append(entry)
        seconds += entry.seconds
    return chosen, seconds


def confine() -> None:
    """Replace a process of root by one that can write to nothing but a /tmp of its own."""
    if os.geteuid() != 0 or os.environ.get(_CONFINED):
        return
    os.environ |= {_CONFINED: "1", "HYPOTHESIS_STORAGE_DIRECTORY": "/tmp/hypothesis"}
    command = [sys.executable, "-m", "tests.mutation", *sys.argv[1:]]
    os.execvp(
        "unshare", ["unshare", "--mount", "--propagation=private", "sh", "-c", _CONFINE, "sh", *command]
    )


def main() -> int:
    """Parse the command line, choose mutants and report."""
    confine()
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("PYKUBELET_SEED") or 1))
    parser.add_argument("--sample", type=int, default=150, help="how many mutants; 0 for all")
    parser.add_argument("--only", default="", help="only files whose path has this")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    paths = sorted(path for package in PACKAGES for path in (SOURCES / package).glob("*.py"))
    all_mutants = [mutant for path in paths if options.only in str(path) for mutant in mutants(path)]
    dice = random.Random(options.seed)
    sample = dice.sample(all_mutants, min(options.sample or len(all_mutants), len(all_mutants)))
    say(f"mutate: seed {options.seed}, {len(sample)} of {len(all_mutants)} mutants")
    mutator = Mutator(sample, options.workers)
    arguments = [
        "-o",
        "addopts=--strict-markers",
        "-o",
        f"timeout={TEST_SECONDS}",
        "-p",
        "no:terminal",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        f"--seed={options.seed}",
        "-m",
        "not machine",
    ]
    with tempfile.TemporaryDirectory(prefix="pyt-", dir="/tmp", ignore_cleanup_errors=True) as base:
        pytest.main([*arguments, f"--basetemp={base}/t", *TESTS], plugins=[mutator])
    total = len(mutator.caught) + len(mutator.survived)
    if mutator.failed or total < len(sample):
        say("These tests fail without any mutant:\n" + "\n".join(mutator.failed or ["pytest did not run"]))
        return 2
    for operator, count in Counter(mutant.operator for mutant in sample).most_common():
        caught = sum(mutant.operator == operator for mutant in mutator.caught)
        say(f"  {operator}: {caught} of {count}")
    say(
        f"mutate: {len(mutator.caught)} of {total} mutants caught ({len(mutator.caught) / max(total, 1):.0%})"
    )
    return 0 if len(mutator.caught) >= TARGET * total else 1


if __name__ == "__main__":
    sys.exit(main())
