"""A node of its own for a measurement: started as a user would, removed afterwards."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Node:
    """A running `pykubelet up`."""

    pid: int
    data_dir: Path
    read_only_port: int
    start_seconds: float
    """From the command to `/healthz` saying ok."""


@contextlib.contextmanager
def data_dir() -> Iterator[Path]:
    """A data directory for one measurement; everything in it is taken down whatever happens."""
    with tempfile.TemporaryDirectory(prefix="pykb-", dir="/tmp") as parent:
        path = Path(parent) / "d"
        try:
            yield path
        finally:
            subprocess.run(
                [BIN / "pykubelet", "down", "--data-dir", path], check=False, stdout=subprocess.DEVNULL
            )


@contextlib.contextmanager
def bare_runtime(path: Path) -> Iterator[str]:
    """Run the private runtime alone, without an agent; gives the name of the shell image."""
    command = [sys.executable, "-m", "pykubelet.standalone", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            word, _, names = process.stdout.readline().partition(" ")
            if word != "ready":
                raise RuntimeError("the private runtime does not start")
            yield json.loads(names)["busybox"]
        finally:
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def running_node(
    data_dir: Path, health_port: int = 10348, read_only_port: int = 10355, extra: tuple[str, ...] = ()
) -> Iterator[Node]:
    """Start a node as a user would."""
    log = data_dir.parent / "agent.log"
    try:
        with log.open("w") as output:
            began = time.monotonic()
            agent = subprocess.Popen(
                [
                    BIN / "pykubelet",
                    "up",
                    "--data-dir",
                    data_dir,
                    f"--port={health_port + 1}",
                    f"--healthz-port={health_port}",
                    f"--read-only-port={read_only_port}",
                    *extra,
                ],
                stdout=output,
                stderr=output,
            )
        try:
            _wait_healthy(agent, health_port, log)
            yield Node(agent.pid, data_dir, read_only_port, time.monotonic() - began)
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(30)
    finally:
        log.unlink(missing_ok=True)


def _wait_healthy(agent: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if agent.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(_health(port), timeout=1) as answer:
            if answer.read() == b"ok":
                return
        time.sleep(0.05)
    raise RuntimeError(f"the node did not become healthy:\n{log.read_text()[-3000:]}")


def _health(port: int) -> str:
    return f"http://127.0.0.1:{port}/healthz"
