"""What runs the tests: their order, the harness that stops processes, and the mutants."""

import socket
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

from tests import durations
from tests.mutation.operators import mutants, mutated_code
from tests.support.ports import held_port

SOURCE = """
class Door:
    def __init__(self):
        self.open = False

    def pass_through(self, who, log):
        log.info("asked", who=who)
        if self.open and who != "thief":
            self.note(who)
            return 1 + 1
        return None

    def note(self, who):
        self.last = who
"""


def test_durations_expected_unknown_files_count_by_their_tests() -> None:
    kinds = [("a.py", False)] * 10 + [("b.py", True)] * 2 + [("c.py", False), ("c.py", True)]
    known = {("a.py", False): 7.5, ("c.py", True): 100.0}
    assert durations.expected(kinds, known) == {
        "a.py": 7.5,
        "b.py": 2 * durations.MACHINE_SECONDS,
        "c.py": 100.0 + durations.UNIT_SECONDS,
    }


def test_durations_saved_file_is_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "durations.tsv"
    assert durations.load(path) == {}
    durations.save({("tests/b.py", True): 3.25, ("tests/a.py", False): 0.5}, path)
    assert path.read_text() == "tests/a.py\t0.5\t0.0\ntests/b.py\t0.0\t3.2\n"
    assert durations.load(path)["tests/a.py", False] == 0.5


def test_durations_of_cluster_tests_count_as_machine() -> None:
    assert durations.kind_of("tests/cluster/test_x.py::test_y", ()) == ("tests/cluster/test_x.py", True)
    assert durations.kind_of("tests/unit/podsync/test_x.py::test_y", ("machine",))[1]
    assert not durations.kind_of("tests/unit/podsync/test_x.py::test_y", ())[1]


def test_held_port_refuses_connections_until_server_listens() -> None:
    with held_port() as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass


STOPPING = """
import os, random, subprocess, sys, time
from pathlib import Path
from tests import chaos

def state():
    return Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[0]

stopper = chaos.Stopper(random.Random(1))
sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
assert [one.pid for one in chaos.descendants(chaos.processes(), os.getpid())] == [sleeper.pid]
stopper.stop_some()
while state() != "T":
    time.sleep(0.01)
assert stopper.stops.total() == 1
stopper.stop_some()
assert stopper.stops.total() == 1, "what is stopped is not stopped again"
stopper.continue_all()
while state() == "T":
    time.sleep(0.01)
assert stopper.next_due() == float("inf")
"""

DISTURBING = """
import random, subprocess, sys
from tests import chaos

run = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); raise SystemExit(3)"])
stopper = chaos.Stopper(random.Random(1))
assert chaos.disturb(run.pid, stopper, 60) == 3
assert stopper.stops.total() >= 1
"""


@pytest.mark.parametrize("script", [STOPPING, DISTURBING])
def test_chaos_stopper_stops_only_descendants_and_continues_them(script: str) -> None:
    # In a process of its own, since this one has other children.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr


def test_mutants_change_one_function_and_no_file(tmp_path: Path) -> None:
    path = tmp_path / "door.py"
    path.write_text(SOURCE)
    found = {(one.function, one.operator, one.after) for one in mutants(path)}
    assert found == {
        ("Door.__init__", "constant changed", "self.open = True"),
        ("Door.pass_through", "condition negated", "if not (self.open and who != 'thief'):"),
        ("Door.pass_through", "operator changed", "if self.open or who != 'thief':"),
        ("Door.pass_through", "comparison changed", "if self.open and who == 'thief':"),
        ("Door.pass_through", "constant changed", "if self.open and who != 'thiefMutated':"),
        ("Door.pass_through", "nothing returned", "return None"),
        ("Door.pass_through", "operator changed", "return 1 - 1"),
        ("Door.pass_through", "constant changed", "return 2 + 1"),
        ("Door.pass_through", "constant changed", "return 1 + 2"),
        ("Door.note", "statement left out", "pass"),
    }
    assert path.read_text() == SOURCE


def test_mutated_code_replaces_code_of_loaded_function(tmp_path: Path) -> None:
    path = tmp_path / "door.py"
    path.write_text(SOURCE)
    names: dict[str, type] = {}
    exec(compile(SOURCE, str(path), "exec"), names)
    door = names["Door"]()
    door.note("friend")
    assert door.last == "friend"
    (mutant,) = [one for one in mutants(path) if one.operator == "statement left out"]
    function = names["Door"].__dict__["note"]
    assert isinstance(function, FunctionType)
    function.__code__ = mutated_code(mutant)
    door.note("enemy")
    assert door.last == "friend"
