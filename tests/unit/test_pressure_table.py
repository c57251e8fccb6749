"""The table of `make pressure`, from reports of a run of pytest."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.pressure_table import AGENT, LATENCY, SCENARIO, VICTIMS, table_lines, victims

pytest_plugins = ["pytester"]
HEAD = [
    "| scenario | kubelet | evicted, in order | worst latency | result |",
    "| --- | --- | --- | --- | --- |",
]


def event(name: str, version: int, reason: str = "Evicted", message: str = "The node was low") -> Any:
    return {
        "reason": reason,
        "message": message,
        "involvedObject": {"name": name},
        "metadata": {"resourceVersion": str(version)},
    }


def report(nodeid: str, when: str, failed: bool, properties: Any) -> Any:
    return SimpleNamespace(nodeid=nodeid, when=when, failed=failed, user_properties=list(properties.items()))


def test_victims_in_order_of_events_without_rejected_pods() -> None:
    rejected = event("late", 3, message="Pod was rejected: The node had condition: [DiskPressure]. ")
    events = [event("b", 10), event("a", 9), rejected, event("c", 1, "Killing"), event("b", 11)]
    assert victims(events) == ["a", "b"]


def test_table_lines_one_row_per_scenario_and_kubelet() -> None:
    hog = {SCENARIO: "hog", AGENT: "ours", VICTIMS: "a, b"}
    hostile = {SCENARIO: "hostile", AGENT: "upstream", VICTIMS: "", LATENCY: 12.5}
    reports = [
        report("2", "setup", False, {}),
        report("2", "call", True, {}),
        report("2", "teardown", False, hostile),
        report("1", "teardown", False, hog),
        report("other", "teardown", False, {}),
    ]
    assert table_lines(reports) == [
        *HEAD,
        "| hog | pykubelet | a, b |  | passed |",
        "| hostile | upstream | none | 12.5 ms | failed |",
    ]
    assert table_lines(reports[-1:]) == []


_CONFTEST = """
import pytest
from tests.conftest import pytest_terminal_summary
from tests.support.pressure_table import VICTIMS, scenario_properties

@pytest.fixture(autouse=True)
def record(request):
    request.node.user_properties.extend(scenario_properties(request.node).items())
    yield
    request.node.user_properties.append((VICTIMS, "hog"))
"""
_TESTS = """
import pytest

@pytest.mark.parametrize("notified", [1, 2], ids=["monitoring", "kernel-notification"])
@pytest.mark.parametrize("program", [1, 2], ids=["ours", "upstream"])
def test_eviction_memory_hog(program, notified):
    pass

def test_eviction_alone(record_property):
    record_property("worst-latency-ms", 3.5)
    assert False
"""


def test_run_writes_table_to_file_and_terminal(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRESSURE_TABLE", str(tmp_path / "table.md"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makeconftest(_CONFTEST)
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "-p", "no:randomly")
    rows = [
        "| eviction alone | pykubelet | hog | 3.5 ms | failed |",
        "| eviction memory hog (monitoring) | pykubelet | hog |  | passed |",
        "| eviction memory hog (kernel-notification) | pykubelet | hog |  | passed |",
        "| eviction memory hog (monitoring) | upstream | hog |  | passed |",
        "| eviction memory hog (kernel-notification) | upstream | hog |  | passed |",
    ]
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[:2] == HEAD
    assert sorted(lines[2:]) == sorted(rows)
    assert all(line in result.outlines for line in lines)
