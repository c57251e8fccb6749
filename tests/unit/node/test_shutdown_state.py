"""Files and metrics of node shutdowns, and the rejection of pods."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.admission.handler import AdmitRejection
from pykubelet.api.pod_status import ContainerStatus, PodStatus
from pykubelet.node import shutdown_state
from pykubelet.node.shutdown_state import (
    STATE_FILE,
    STATUSES_FILE,
    FinalStatuses,
    NodeShutdownState,
    ShutdownAdmission,
    ShutdownTimes,
)
from tests.support.pods import make_pod

START = datetime(2026, 5, 1, 10, 0, 0, 250_000, tzinfo=UTC)


def metrics(registry: CollectorRegistry) -> list[float | None]:
    names = ("start", "end")
    return [registry.get_sample_value(f"kubelet_graceful_shutdown_{name}_time_seconds") for name in names]


def test_admission_while_shutting_down_rejects_every_pod() -> None:
    state = NodeShutdownState()
    handler, attempt = ShutdownAdmission(state), cast(Any, None)
    assert handler.admit(attempt) is None
    assert state.problems() == []
    state.set(True)
    assert handler.admit(attempt) == AdmitRejection(
        "NodeShutdown", "Pod was rejected as the node is shutting down."
    )
    assert state.problems() == ["node is shutting down"]
    state.set(False)
    assert handler.admit(attempt) is None


async def test_times_are_in_file_and_metrics_after_restart(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    times = ShutdownTimes(tmp_path, registry)
    assert metrics(registry) == [0, 0]
    await times.start(START)
    assert json.loads((tmp_path / STATE_FILE).read_text()) == {
        "startTime": "2026-05-01T10:00:00.250000Z",
        "endTime": "0001-01-01T00:00:00Z",
    }
    assert metrics(registry) == [START.timestamp() // 1, 0]
    await times.end(START + timedelta(seconds=30))
    again = CollectorRegistry()
    ShutdownTimes(tmp_path, again)
    assert metrics(again) == [START.timestamp() // 1, START.timestamp() // 1 + 30]
    await ShutdownTimes(tmp_path).start(START)
    assert json.loads((tmp_path / STATE_FILE).read_text())["endTime"] == "0001-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"startTime":"2026-05-01T10:00:00.123456789+02:00","endTime":"0001-01-01T00:00:00Z"}',
            [1777622400, 0],
        ),
        ("{}", [0, 0]),
        ("", [0, 0]),
        ('{"startTime":"soon"}', [0, 0]),
        ("[1]", [0, 0]),
        ('{"startTime":"2026-05-', [0, 0]),
    ],
)
def test_times_of_other_writers_are_read_or_ignored(tmp_path: Path, text: str, expected: list[int]) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    registry = CollectorRegistry()
    ShutdownTimes(tmp_path, registry)
    assert metrics(registry) == expected


async def test_final_statuses_survive_restart_until_discarded(tmp_path: Path) -> None:
    final = FinalStatuses(tmp_path)
    await final.flush()
    assert not (tmp_path / STATUSES_FILE).exists()
    final.add("u1", PodStatus(phase="Failed", reason="Terminated"))
    final.handle_status(make_pod("u2"), PodStatus(phase="Failed"), None)
    await final.flush()
    assert (tmp_path / STATUSES_FILE).stat().st_mode & 0o777 == 0o600
    ended = PodStatus(
        phase="Failed",
        reason="Terminated",
        container_statuses=[ContainerStatus(name="main", restart_count=3)],
    )
    final.handle_status(make_pod("u1"), ended, None)
    await final.flush()
    after = FinalStatuses(tmp_path)
    assert dict(after) == {"u1": ended}
    after.discard("u1")
    after.discard("u1")
    await after.flush()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", '{"pods": {"u1": 5}}', "[]"])
async def test_final_statuses_unreadable_file_counts_as_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / STATUSES_FILE).write_text(text)
    final = FinalStatuses(tmp_path)
    assert not final
    final.add("u1", PodStatus(phase="Failed"))
    await final.flush()
    assert set(FinalStatuses(tmp_path)) == {"u1"}


async def test_final_statuses_too_large_file_counts_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown_state, "MAX_FILE_BYTES", 10)
    (tmp_path / STATUSES_FILE).write_text('{"pods": {}}')
    assert not FinalStatuses(tmp_path)


async def test_final_statuses_failed_write_is_retried_by_next_flush(tmp_path: Path) -> None:
    directory = tmp_path / "root"
    final = FinalStatuses(directory)
    final.add("u1", PodStatus(phase="Failed"))
    await final.flush()
    directory.mkdir()
    await final.flush()
    assert set(FinalStatuses(directory)) == {"u1"}
