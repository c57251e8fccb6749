"""SIGHUP: a reload of the configuration, or the end of the terminal."""

import os
import pty
import signal
import subprocess
import sys

PROGRAM = """
import asyncio, sys
from pykubelet.cli import process
from pykubelet.config.load import load

process.is_root = lambda: True

async def agent():
    print("started", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("stopped", flush=True)

sys.exit(process.launch("kubelet", load([]), agent, on_hangup=lambda: print("reload", flush=True)))
"""


def start(terminal: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, text=True
    )


def test_launch_hangup_without_terminal_reloads_each_time_and_goes_on() -> None:
    with start(subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
            assert process.stdout.readline() == "reload\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"
        assert process.wait(timeout=30) == 0


def test_launch_hangup_with_open_terminal_reloads_and_closed_terminal_stops() -> None:
    terminal, other_end = pty.openpty()
    with start(other_end) as process:
        os.close(other_end)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "reload\n"
        os.close(terminal)
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "stopped\n"
        assert process.wait(timeout=30) == 0
