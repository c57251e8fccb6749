"""The test plugin as its tests see it: started, told to misbehave, asked what it was asked, ended."""

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
RESOURCE = "example.com/dongle"


class PluginProcess:
    """A plugin that runs, or did."""

    def __init__(self, folder: Path, kubelet: Path, *options: str) -> None:
        self.folder = folder
        self.kubelet = kubelet
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, *options: str) -> None:
        """Start it, and wait until it serves."""
        command = [sys.executable, "-m", "tests.device_plugin"]
        command += [f"--folder={self.folder}", f"--kubelet={self.kubelet}", *self._options, *options]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "serving\n"

    def kill(self) -> None:
        """End it as a crash would; like a plugin that starts anew, remove what is left of it."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
        for left in (*self.kubelet.glob("dongle*.sock"),):
            left.unlink(missing_ok=True)

    def pause(self) -> None:
        """Let it hang as a whole."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def behave(self, **behaviour: Any) -> None:
        """Tell it what it has and how to misbehave from now on."""
        new = self.folder / "behaviour.new"
        new.write_text(json.dumps(behaviour))
        new.replace(self.folder / "behaviour.json")

    def calls(self, name: str) -> list[dict[str, Any]]:
        """What it was asked by this call."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [said["request"] for said in map(json.loads, lines) if said["call"] == name]

    def registrations(self) -> list[str]:
        """What the agent said to its registrations."""
        path = self.folder / "registrations.txt"
        return path.read_text().splitlines() if path.exists() else []


@contextmanager
def plugin_process(folder: Path, kubelet: Path, *options: str) -> Iterator[PluginProcess]:
    """A plugin that runs for the time of a block."""
    plugin = PluginProcess(folder, kubelet, *options)
    plugin.start()
    try:
        yield plugin
    finally:
        plugin.kill()
