import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubelet.linux.systemd import (
    WatchdogError,
    extend_timeout,
    feed_watchdog,
    notify,
    ready,
    stopping,
    watchdog_interval,
)


@pytest.fixture(params=["path", "abstract"])
def systemd(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@pykubelet-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        sock.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield sock


def test_notify_sends_state_to_notify_socket(systemd: socket.socket) -> None:
    ready()
    assert systemd.recv(100) == b"READY=1"
    stopping()
    assert systemd.recv(100) == b"STOPPING=1"
    extend_timeout(35.5)
    assert systemd.recv(100) == b"EXTEND_TIMEOUT_USEC=35500000"
    assert notify("STATUS=naïve")
    assert systemd.recv(100) == "STATUS=naïve".encode()


def test_notify_without_socket_returns_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    ready()
    stopping()
    assert notify("READY=1") is False
    assert notify("READY=1", {"NOTIFY_SOCKET": ""}) is False
    with pytest.raises(FileNotFoundError):
        notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "none")})


def test_ready_broken_socket_is_logged_and_not_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    logger = logging.getLogger("pykubelet.linux.systemd")
    logger.addHandler(caplog.handler)
    try:
        ready()
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.records[0].message == "Failed to notify systemd"


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": ""}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "77"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "78"}, None),
        ({"WATCHDOG_USEC": "1000001"}, 0.5000005),
    ],
)
def test_watchdog_interval_is_half_of_watchdog_usec(environ: dict[str, str], seconds: float | None) -> None:
    assert watchdog_interval(environ, 77 if "WATCHDOG_PID" in environ else None) == seconds


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WATCHDOG_USEC": "soon"}, "not a number"),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "me"}, "not a number"),
        ({"WATCHDOG_USEC": "0"}, "not a time"),
        ({"WATCHDOG_USEC": "-5"}, "not a time"),
        ({"WATCHDOG_USEC": "1000000"}, "too short"),
    ],
)
def test_watchdog_interval_invalid_settings_raises(environ: dict[str, str], words: str) -> None:
    with pytest.raises(WatchdogError, match=words):
        watchdog_interval(environ)


class Systemd:
    """Notes when it heard what; `deaf` times a send fails."""

    def __init__(self, deaf: int = 0) -> None:
        self.heard: list[tuple[float, str]] = []
        self.deaf = deaf

    def send(self, state: str) -> bool:
        if self.deaf:
            self.deaf -= 1
            raise ConnectionRefusedError
        self.heard.append((asyncio.get_running_loop().time(), state))
        return True


async def feed_for(seconds: float, systemd: Systemd, unwell: Iterator[str | None]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await feed_watchdog(10, lambda: next(unwell), systemd.send)


@pytest.mark.looptime(start=0)
async def test_feed_watchdog_healthy_pings_every_interval() -> None:
    systemd = Systemd()
    await feed_for(25, systemd, iter([None] * 9))
    assert systemd.heard == [(0, "WATCHDOG=1"), (10, "WATCHDOG=1"), (20, "WATCHDOG=1")]


@pytest.mark.looptime(start=0)
async def test_feed_watchdog_unhealthy_sends_no_ping() -> None:
    systemd = Systemd()
    await feed_for(35, systemd, iter([None, "syncloop: hangs", "syncloop: hangs", None]))
    assert [when for when, _ in systemd.heard] == [0, 30]


@pytest.mark.looptime(start=0)
async def test_feed_watchdog_failed_ping_is_retried_once() -> None:
    systemd = Systemd(deaf=1)
    await feed_for(5, systemd, iter([None] * 9))
    assert [when for when, _ in systemd.heard] == [1]
    systemd = Systemd(deaf=2)
    start = asyncio.get_running_loop().time()
    await feed_for(15, systemd, iter([None] * 9))
    assert [when - start for when, _ in systemd.heard] == [11]


async def test_feed_watchdog_real_socket_receives_pings(systemd: socket.socket) -> None:
    systemd.settimeout(45)
    feeding = asyncio.create_task(feed_watchdog(0.2, lambda: None))
    for _ in range(2):
        assert await asyncio.to_thread(systemd.recv, 100) == b"WATCHDOG=1"
    feeding.cancel()
