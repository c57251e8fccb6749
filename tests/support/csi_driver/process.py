"""The test driver as its tests see it: started, configured to misbehave, queried for its requests, ended."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.csi_driver.backend import run
from tests.support.plugin_process import PluginProcess

DRIVER = "test.csi.example.com"


class DriverProcess(PluginProcess):
    """A driver that runs, or did."""

    def __init__(self, folder: Path, registry: Path, *options: str) -> None:
        super().__init__("tests.support.csi_driver", folder, f"--registry={registry}", *options)
        self.registry = registry

    @property
    def socket(self) -> str:
        """Where it serves CSI."""
        return str(self.folder / "csi.sock")

    @property
    def volumes(self) -> Path:
        """Where it keeps its volumes."""
        return self.folder / "volumes"

    def calls(self, name: str = "") -> list[dict[str, Any]]:
        """Return the requests it has received, or those of one method."""
        return [call["request"] for call in self.said(name)] if name else self.said()

    def names(self) -> list[str]:
        """Return the names of all calls about volumes, in order."""
        plain = ("GetInfo", "NotifyRegistrationStatus", "NodeGetInfo", "NodeGetCapabilities")
        return [call["call"] for call in self.calls() if call["call"] not in plain]

    def loops(self) -> list[str]:
        """Return the loop devices that are still attached to its volumes."""
        listed = run("losetup", "--noheadings", "--output", "NAME,BACK-FILE")
        return [line for line in listed.splitlines() if str(self.folder) in line]

    def loops_left(self) -> list[str]:
        """Return the loop devices that stay attached.

        One that somebody else looks at just now is let go a moment later, as is one whose file system a
        container has got a copy of that is being started just now.
        """
        deadline = time.monotonic() + 30
        while (found := self.loops()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


@contextmanager
def driver_process(folder: Path, registry: Path, *options: str) -> Iterator[DriverProcess]:
    """A driver that runs for the time of a block; its loop devices are gone at the end."""
    driver = DriverProcess(folder, registry, *options)
    try:
        driver.start()
        yield driver
    finally:
        driver.kill()
        for line in driver.loops():
            subprocess.run(["losetup", "--detach", line.split()[0]], check=False)


def wait_for(what: str, look: Callable[[], Any], seconds: float = 30) -> Any:
    """Return the first true result."""
    deadline = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)
    return answer
