"""The node view of the page."""

from pykubelet.eviction.report import PressureReport, SignalReport, ThresholdReport
from pykubelet.server.page.facts import PageSettings
from pykubelet.server.page.node_view import _evictions

SETTINGS = PageSettings(node_name="n1", version="v1", started=0.0)


def test_evictions_slow_ranking_is_shown_escaped_with_its_signal() -> None:
    signals = [
        SignalReport(signal=name, resource="memory", thresholds=[ThresholdReport(kind="hard")])
        for name in ("memory.available", "allocatableMemory.available")
    ]
    assert "built-in order" not in _evictions(SETTINGS, PressureReport(signals=signals))
    signals[1].ranking_problem = 'custom ranking "<b>" is slow'
    shown = _evictions(SETTINGS, PressureReport(signals=signals))
    assert shown.count("built-in order: custom ranking ") == 1
    assert "<b>" not in shown
