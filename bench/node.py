"""A node of its own for a measurement: started as a user would, removed afterwards."""

from __future__ import annotations

import contextlib
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
    start_seconds: float
    """From the command to `/healthz` saying ok."""


@contextlib.contextmanager
def running_node(health_port: int = 10348, extra: tuple[str, ...] = ()) -> Iterator[Node]:
    """Start a node in a temporary data directory; take it down whatever happens."""
    data_dir = Path(tempfile.mkdtemp(prefix="pykb-", dir="/tmp"))  # noqa: S108: a short path, for sockets
    data_dir.rmdir()
    log = Path(f"{data_dir}.log")
    try:
        with log.open("w") as output:
            began = time.monotonic()
            agent = subprocess.Popen(
                [BIN / "pykubelet", "up", "--data-dir", data_dir, f"--healthz-port={health_port}", *extra],
                stdout=output,
                stderr=output,
            )
        try:
            _wait_healthy(agent, health_port, log)
            yield Node(agent.pid, data_dir, time.monotonic() - began)
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(30)
    finally:
        subprocess.run([BIN / "pykubelet", "down", "--data-dir", data_dir], check=False, stdout=subprocess.DEVNULL)
        log.unlink(missing_ok=True)


def _wait_healthy(agent: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if agent.poll() is not None:
            break
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1) as answer:
                if answer.read() == b"ok":
                    return
        time.sleep(0.05)
    raise RuntimeError(f"the node did not become healthy:\n{log.read_text()[-3000:]}")
