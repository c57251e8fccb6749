"""A kernel that permits no further thread (pids.max)."""

import threading
from typing import NoReturn

import pytest


def forbid_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each start of a thread fail until the end of the test."""

    def fail(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
