"""The test driver as its tests see it: started, told to misbehave, asked what it was asked, ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.csi_driver.backend import run

ROOT = Path(__file__).parents[2]
DRIVER = "test.csi.example.com"


class DriverProcess:
    """A driver that runs, or did."""

    def __init__(self, folder: Path, registry: Path, *options: str) -> None:
        self.folder = folder
        self.registry = registry
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def socket(self) -> str:
        """Where it serves CSI."""
        return str(self.folder / "csi.sock")

    @property
    def volumes(self) -> Path:
        """Where it keeps its volumes."""
        return self.folder / "volumes"

    def start(self, *options: str) -> None:
        """Start it, and wait until it serves."""
        command = [sys.executable, "-m", "tests.csi_driver"]
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
        """Give what it was asked, or the requests of one method."""
        try:
            lines = (self.folder / "calls.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines]
        return [call["request"] for call in found if call["call"] == name] if name else found

    def names(self) -> list[str]:
        """Give the names of all calls about volumes, in order."""
        plain = ("GetInfo", "NotifyRegistrationStatus", "NodeGetInfo", "NodeGetCapabilities")
        return [call["call"] for call in self.calls() if call["call"] not in plain]

    def loops(self) -> list[str]:
        """Give the loop devices that are still attached to its volumes."""
        listed = run("losetup", "--noheadings", "--output", "NAME,BACK-FILE")
        return [line for line in listed.splitlines() if str(self.folder) in line]

    def _end(self, how: int) -> None:
        if self._process is not None:
            os.kill(self._process.pid, how)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


@contextmanager
def driver_process(folder: Path, registry: Path, *options: str) -> Iterator[DriverProcess]:
    """A driver that runs for the time of a block; its loop devices are gone at the end."""
    driver = DriverProcess(folder, registry, *options)
    driver.start()
    try:
        yield driver
    finally:
        driver.kill()
        for line in driver.loops():
            subprocess.run(["losetup", "--detach", line.split()[0]], check=False)


def wait_for(what: str, look: Callable[[], Any], seconds: float = 30) -> Any:
    """Give the first answer that is true."""
    deadline = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)
    return answer
