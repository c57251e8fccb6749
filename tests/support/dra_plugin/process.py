"""The test driver as its tests see it: started, configured to misbehave, queried for its requests, ended."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.plugin_process import PluginProcess

DRIVER = "test.dra.example.com"
PREPARE, UNPREPARE = "NodePrepareResources", "NodeUnprepareResources"


class DriverProcess(PluginProcess):
    """A plugin of a driver that runs, or did."""

    def __init__(self, folder: Path, registry: Path, *options: str) -> None:
        super().__init__("tests.support.dra_plugin", folder, f"--registry={registry}", *options)

    def calls(self, name: str = "") -> list[dict[str, Any]]:
        """Requests it has received, by this call or all: `call`, `by` and `request`."""
        return self.said(name)

    def claims(self, call: str) -> list[list[str]]:
        """The names of the claims of each such call."""
        return [[claim["name"] for claim in said["request"]["claims"]] for said in self.calls(call)]

    def prepared(self) -> list[str]:
        """The uids of the claims that are prepared now, each as often as it was."""
        path = self.folder / "prepared.json"
        found: list[str] = json.loads(path.read_text()) if path.exists() else []
        return found


@contextmanager
def driver_process(folder: Path, registry: Path, *options: str) -> Iterator[DriverProcess]:
    """A plugin that runs for the time of a block."""
    driver = DriverProcess(folder, registry, *options)
    try:
        driver.start()
        yield driver
    finally:
        driver.kill()
