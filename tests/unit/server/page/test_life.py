"""The time axis of a pod."""

import re
from pathlib import Path

from pykubelet.server.page.life import _DOTS

EVENTS = Path(__file__).parents[4] / "docs" / "reference" / "events.md"


def test_dots_are_events_that_the_kubelet_records() -> None:
    recorded = set(re.findall(r"^\| `(\w+)` \|", EVENTS.read_text(), re.MULTILINE))
    assert set(_DOTS) <= recorded
    assert "ProcessOOMKilled" in _DOTS
