"""`pykubelet pressure` with a node that returns a scripted report."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from pykubelet.cli.node.pressure import lines, run_pressure
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import Output
from pykubelet.eviction.report import PressureReport, SignalReport, ThresholdReport, VictimReport
from pykubelet.server.manifests import pressure_routes
from pykubelet.standalone.instance import Instance
from tests.support.cli_node import answering
from tests.support.pod_view import ScriptedView

GI = 1 << 30
HOSTILE = "x\x1b[2J"
REPORT = PressureReport(
    conditions=["MemoryPressure"],
    signals=[
        SignalReport(
            signal="memory.available",
            resource="memory",
            available=GI,
            capacity=4 * GI,
            age_seconds=0.1,
            thresholds=[
                ThresholdReport(kind="hard", value=GI // 2, distance=GI // 2),
                ThresholdReport(
                    kind="soft",
                    value=2 * GI,
                    distance=-GI,
                    grace_period_seconds=90,
                    is_met=True,
                    met_for_seconds=20,
                ),
            ],
            first_victim=VictimReport(namespace="ns", name=HOSTILE, uid="u", reason="uses too much"),
        ),
        SignalReport(
            signal="nodefs.inodesFree",
            resource="inodes",
            available=90,
            capacity=100,
            thresholds=[ThresholdReport(kind="hard", value=5, distance=85, met_for_seconds=3)],
        ),
        SignalReport(signal="pid.available", resource="pids", thresholds=[ThresholdReport(kind="hard")]),
    ],
)


def test_lines_thresholds_have_distance_state_and_victim() -> None:
    found = lines(REPORT)
    assert found[0] == "Node conditions: MemoryPressure"
    cells = [line.split("  ") for line in found]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in cells]
    assert rows[3][0:7] == ["memory.available", "1.0Gi", "4.0Gi", "512Mi", "hard", "512Mi", "ok"]
    assert rows[4][3:7] == ["2.0Gi", "soft", "-1.0Gi", "met for 20s of 1m30s"]
    assert rows[5][0:7] == ["nodefs.inodesFree", "90", "100", "5", "hard", "85", "reclaiming"]
    assert rows[6][1:] == [
        "<unknown>",
        "<unknown>",
        "<unknown>",
        "hard",
        "<unknown>",
        "not measured",
        "<none>",
    ]
    assert "\x1b" not in "".join(found)
    assert found[-1].endswith("for memory.available: uses too much")


def test_lines_no_thresholds_has_remedy() -> None:
    assert lines(PressureReport())[-1].startswith("No eviction thresholds are configured: set")


def test_lines_no_victim_is_explained() -> None:
    report = PressureReport(signals=REPORT.signals[1:])
    assert lines(report)[-1] == "No pod could be evicted: static and critical pods never are"


def test_lines_slow_ranking_is_reported_once_with_its_signals() -> None:
    signals = [replace(signal, ranking_problem=f'ranking "{HOSTILE}" is slow') for signal in REPORT.signals]
    found = lines(PressureReport(signals=signals))
    assert found[-1].startswith("Built-in order for memory.available, nodefs.inodesFree, pid.available: ")
    assert found[-1].endswith("is slow")
    assert "\x1b" not in found[-1]


def test_lines_wide_has_age_grace_and_reclaim() -> None:
    found = [line.split() for line in lines(REPORT, wide=True)]
    assert found[2][-4:] == ["MEASURED", "GRACE", "MINIMUM", "RECLAIM"]
    assert found[3][-4:] == ["0s", "ago", "<none>", "0"]
    assert found[4][-4:] == ["0s", "ago", "1m30s", "0"]
    assert found[6][-3:] == ["<unknown>", "<none>", "0"]


async def test_run_pressure_json_is_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def report() -> PressureReport:
        return REPORT

    instance = Instance.at(tmp_path)
    async with answering(instance, ScriptedView(), pressure_routes(report)):
        assert await asyncio.to_thread(run_pressure, NodeSelection(tmp_path), Output.JSON) == 0
        printed = capsys.readouterr().out
        assert await asyncio.to_thread(run_pressure, NodeSelection(tmp_path), Output.YAML) == 0
        assert yaml.safe_load(capsys.readouterr().out) == json.loads(printed)
        assert await asyncio.to_thread(run_pressure, NodeSelection(tmp_path), Output.NAME) == 0
        assert capsys.readouterr().out.split() == [signal.signal for signal in REPORT.signals]
    found = json.loads(printed)
    assert found["signals"][0]["thresholds"][1]["metForSeconds"] == 20
    assert found["conditions"] == ["MemoryPressure"]


@pytest.mark.looptime
async def test_pressure_routes_hanging_measurement_is_bounded() -> None:
    async def hang() -> PressureReport:
        await asyncio.Event().wait()
        raise AssertionError

    (route,) = pressure_routes(hang)
    response = await route.handler(None)  # type: ignore[arg-type]
    assert response.status == 503


@pytest.mark.looptime
async def test_pressure_routes_many_clients_share_slow_report() -> None:
    """Verify that concurrent clients respond in time, each with measurements made after its request."""
    clock, began = asyncio.get_running_loop().time, list[float]()

    async def slow() -> PressureReport:
        began.append(clock())
        await asyncio.sleep(2.5)
        return PressureReport(conditions=[str(len(began))])

    async def request(delay: float) -> tuple[int, bytes]:
        await asyncio.sleep(delay)
        response: Any = await route.handler(None)  # type: ignore[arg-type]
        return response.status, response.body

    (route,) = pressure_routes(slow)
    responses = await asyncio.gather(*map(request, (0.0, 0.5, 1.0, 1.5, 2.0, 2.4, 4.0)))
    assert [status for status, _ in responses] == [200] * 7
    found = [json.loads(body)["conditions"][0] for _, body in responses]
    assert found == ["1", "2", "2", "2", "2", "2", "3"]
    assert began == pytest.approx([0.0, 2.5, 5.0], abs=0.1)


async def test_run_pressure_older_node_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with answering(Instance.at(tmp_path), ScriptedView()):
        assert await asyncio.to_thread(run_pressure, NodeSelection(tmp_path)) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "is it of another version" in error
