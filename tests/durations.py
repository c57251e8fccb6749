"""Order of the test files by their known duration, and the file that these durations are kept in.

pytest-xdist hands whole files to its workers (`--dist=loadfile --no-loadscope-reorder`), in the order of
the items. With the longest first, the workers finish together: what is left for the end is short.

`make durations` runs all tests and rewrites `tests/data/test-durations.tsv`: seconds of a file's tests with
the `machine` marker (or in tests/cluster) and of its others, which `make unit` runs alone. Tests of a file
that is not listed count as long as tests of their kind usually take.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "data" / "test-durations.tsv"

UNIT_SECONDS = 0.05
"""Assumed duration of a test that needs no containers."""

MACHINE_SECONDS = 6.0
"""Assumed duration of a test with real containers."""

_CLUSTER = "tests/cluster/"

Kind = tuple[str, bool]
"""A file's path from the project's root, and whether its tests with real containers are meant."""


def load(path: Path = FILE) -> dict[Kind, float]:
    """Return the known seconds per file and kind of test."""
    known: dict[Kind, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, unit, machine = line.split("\t")
        known[name, False], known[name, True] = float(unit), float(machine)
    return known


def save(known: Mapping[Kind, float], path: Path = FILE) -> None:
    """Write the seconds per file and kind of test, sorted by path."""
    names = sorted({name for name, _ in known})
    lines = [
        f"{name}\t{known.get((name, False), 0):.1f}\t{known.get((name, True), 0):.1f}\n" for name in names
    ]
    path.write_text("".join(lines))


def expected(kinds: Iterable[Kind], known: Mapping[Kind, float]) -> dict[str, float]:
    """Return the seconds that each file is expected to take, given the kind of each test in it."""
    counts: dict[Kind, int] = defaultdict(int)
    for kind in kinds:
        counts[kind] += 1
    seconds: dict[str, float] = defaultdict(float)
    for (name, machine), count in counts.items():
        each = MACHINE_SECONDS if machine else UNIT_SECONDS
        seconds[name] += known.get((name, machine), 0.0) or count * each
    return seconds


def order(items: list[pytest.Item], *, cluster_last: bool, longest_first: bool) -> None:
    """Sort items in place, file by file."""
    kinds = [kind_of(item.nodeid, item.keywords) for item in items]
    seconds = expected(kinds, load()) if longest_first else {}

    def key(item: pytest.Item) -> tuple[bool, float, str]:
        name = item.nodeid.partition("::")[0]
        return cluster_last and name.startswith(_CLUSTER), -seconds.get(name, 0.0), name if seconds else ""

    items.sort(key=key)


def kind_of(nodeid: str, keywords: Iterable[str]) -> Kind:
    """Return the file of a test, and whether it needs real containers."""
    name = nodeid.partition("::")[0]
    return name, name.startswith(_CLUSTER) or "machine" in keywords


class Recorder:
    """A pytest plugin that adds up the durations of a run and saves them at its end."""

    def __init__(self, path: Path = FILE) -> None:
        self._path = path
        self._seconds: dict[Kind, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of a test's setup, call or teardown."""
        self._seconds[kind_of(report.nodeid, report.keywords)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Replace what this run has measured, keep the rest, and drop files that are gone."""
        known = {kind: seconds for kind, seconds in load(self._path).items() if Path(kind[0]).exists()}
        save(known | {kind: round(seconds, 1) for kind, seconds in self._seconds.items()}, self._path)
