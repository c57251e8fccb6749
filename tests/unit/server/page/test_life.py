"""The time axis of a pod."""

import re
from pathlib import Path

from pykubelet.podconfig.pod_history import TimelineEntry
from pykubelet.server.page.drawings import sparkline
from pykubelet.server.page.life import _DOTS, lanes
from tests.support.pod_view import pod_of

EVENTS = Path(__file__).parents[4] / "docs" / "reference" / "events.md"


def test_dots_are_events_that_the_kubelet_records() -> None:
    recorded = set(re.findall(r"^\| `(\w+)` \|", EVENTS.read_text(), re.MULTILINE))
    assert set(_DOTS) <= recorded
    assert "ProcessOOMKilled" in _DOTS


def test_lane_of_crash_looping_container_has_all_runs_and_separate_volumes_and_sandbox() -> None:
    start = 1_767_323_045.0  # 2026-01-02T03:04:05Z
    pod = pod_of(
        "web",
        "u1",
        status={
            "containerStatuses": [
                {
                    "name": "main",
                    "image": "i",
                    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                    "lastState": {
                        "terminated": {
                            "exitCode": 1,
                            "startedAt": "2026-01-02T03:05:05Z",
                            "finishedAt": "2026-01-02T03:05:06Z",
                        }
                    },
                }
            ]
        },
    )
    entries = [
        (0, "admission", "admitted"),
        (3, "sandbox", "create"),
        (5, "sandbox", "running as 123 with 10.1.1.1"),
        (6, "start", "main started"),
        (8, "exit", "main exited with code 1"),
        (20, "start", "main started"),
        (21, "exit", "main exited with code 0"),
        (60, "start", "main started"),
    ]
    timeline = [TimelineEntry(start + time, component, text) for time, component, text in entries]
    pod_lane, main = lanes(pod, [], timeline, start - 1, start + 100)
    assert [(s.kind, s.start - start, s.end - start) for s in main.spans] == [
        ("failed", 6, 8),
        ("ended", 20, 21),
        ("failed", 60, 61),
    ]
    assert [(s.kind, s.start - start, s.end - start) for s in pod_lane.spans[:3]] == [
        ("queued", -1, 0),
        ("volumes", 0, 3),
        ("setup", 3, 5),
    ]


def test_sparkline_draws_request_and_limit_on_its_scale() -> None:
    drawing = sparkline([1.0, 2.0], "CPU", limit=100.0, request=50.0)
    assert drawing.count("<line") == 2
    for kind, y in (("limit", "2.05"), ("request", "12.52")):
        line = next(part for part in drawing.split("<line") if f'class="{kind}"' in part)
        assert f'y1="{y}"' in line
    assert sparkline([1.0, 2.0], "CPU").count("<line") == 0
