"""A plugin as its tests see it: started, configured to misbehave, queried for its requests, ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class PluginProcess:
    """A plugin that runs, or did; `module` is what Python runs."""

    def __init__(self, module: str, folder: Path, *options: str) -> None:
        self.folder = folder
        self._module = module
        self._options = (f"--folder={folder}", *options)
        self._process: subprocess.Popen[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, *options: str) -> None:
        """Start it, and wait until it serves."""
        command = [sys.executable, "-m", self._module, *self._options, *options]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "serving\n"

    def stop(self) -> None:
        """End it politely: its sockets go too."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would: its sockets stay, and nobody listens there."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Let it hang as a whole."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def behave(self, **behaviour: Any) -> None:
        """Tell it how to misbehave from now on; nothing is at its best."""
        new = self.folder / "behaviour.new"
        new.write_text(json.dumps(behaviour))
        new.replace(self.folder / "behaviour.json")

    def said(self, name: str = "") -> list[dict[str, Any]]:
        """Requests it has received, by this call or all: `call`, `request` and what else it recorded."""
        path = self.folder / "calls.jsonl"
        # What follows the last line break is still being written.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [said for said in map(json.loads, lines) if said["call"] == name or not name]

    def _end(self, how: int) -> None:
        if self._process is not None:
            os.kill(self._process.pid, how)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
