"""What `bench/stats.py` counts as the processor time of a scrape."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench import processes, stats

HELD, SCRAPE, BACKGROUND = 0.003, 0.005, 0.002
"""Seconds of processor time: per second for the pods, per scrape, and per second after a scrape."""


class Kubelet:
    """A kubelet that continues to refresh what it serves for 90 s after each scrape."""

    pid = 1

    def __init__(self) -> None:
        self.now = self.cpu = 0.0
        self._refreshes_until = 0.0

    def sleep(self, seconds: float) -> None:
        refreshed = min(max(self._refreshes_until - self.now, 0.0), seconds)
        self.cpu += HELD * seconds + BACKGROUND * refreshed
        self.now += seconds

    def get(self, *_: object) -> tuple[int, int]:
        self.cpu += SCRAPE
        self._refreshes_until = self.now + 90.0
        self.sleep(0.01)
        return 200, 1000


def test_scrape_path_work_in_background_is_part_of_window_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kubelet: Any = Kubelet()
    clock = SimpleNamespace(sleep=kubelet.sleep, monotonic=lambda: kubelet.now)
    for module in (processes, stats):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "cpu_seconds", lambda _: kubelet.cpu)
    for name in ("pss_mb", "rss_mb"):
        monkeypatch.setattr(processes, name, lambda _: 0.0)
    monkeypatch.setattr(stats, "_get", kubelet.get)
    connection: Any = None
    found = stats._scrape_path(kubelet, connection, "/stats/summary", 0)
    assert found is not None
    per_interval = BACKGROUND * stats._INTERVAL_SECONDS
    assert found.window_cpu == pytest.approx(SCRAPE + per_interval, rel=0.02)
