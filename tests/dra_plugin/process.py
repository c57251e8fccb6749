"""The test driver as its tests see it: started, told to misbehave, asked what it was asked, ended."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DRIVER = "test.dra.example.com"
PREPARE, UNPREPARE = "NodePrepareResources", "NodeUnprepareResources"


class DriverProcess:
    """A plugin of a driver that runs, or did."""

    def __init__(self, folder: Path, registry: Path, *options: str) -> None:
        self.folder = folder
        self.registry = registry
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, *options: str) -> None:
        """Start it, and wait until it serves."""
        command = [sys.executable, "-m", "tests.dra_plugin"]
        command += [f"--folder={self.folder}", f"--registry={self.registry}", *self._options, *options]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "serving\n"

    def stop(self) -> None:
        """End it politely: its sockets go too."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would: its sockets stay, and nobody listens there."""
        self._end(signal.SIGKILL)

    def behave(self, **behaviour: Any) -> None:
        """Tell it how to misbehave from now on; nothing is at its best."""
        new = self.folder / "behaviour.new"
        new.write_text(json.dumps(behaviour))
        new.replace(self.folder / "behaviour.json")

    def calls(self, name: str = "") -> list[dict[str, Any]]:
        """What it was asked, by this call or at all: `call`, `by` and `request`."""
        path = self.folder / "calls.jsonl"
        # What follows the last line break is still being written.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [said for said in map(json.loads, lines) if said["call"] == name or not name]

    def claims(self, call: str) -> list[list[str]]:
        """The names of the claims of each such call."""
        return [[claim["name"] for claim in said["request"]["claims"]] for said in self.calls(call)]

    def prepared(self) -> list[str]:
        """The uids of the claims that are prepared now, each as often as it was."""
        path = self.folder / "prepared.json"
        found: list[str] = json.loads(path.read_text()) if path.exists() else []
        return found

    def _end(self, how: int) -> None:
        if self._process is not None:
            os.kill(self._process.pid, how)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@contextmanager
def driver_process(folder: Path, registry: Path, *options: str) -> Iterator[DriverProcess]:
    """A plugin that runs for the time of a block."""
    driver = DriverProcess(folder, registry, *options)
    driver.start()
    try:
        yield driver
    finally:
        driver.kill()
