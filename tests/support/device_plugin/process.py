"""The test plugin as its tests see it: started, configured to misbehave, queried for its requests, ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.plugin_process import PluginProcess

RESOURCE = "example.com/dongle"


class DevicePluginProcess(PluginProcess):
    """A device plugin that runs, or did."""

    def __init__(self, folder: Path, kubelet: Path, *options: str) -> None:
        super().__init__("tests.support.device_plugin", folder, f"--kubelet={kubelet}", *options)
        self.kubelet = kubelet

    def kill(self) -> None:
        """End it as a crash would; like a plugin that starts again, remove what is left of it."""
        super().kill()
        for left in self.kubelet.glob("dongle*.sock"):
            left.unlink(missing_ok=True)

    def calls(self, name: str) -> list[dict[str, Any]]:
        """Requests that it has received by this call."""
        return [said["request"] for said in self.said(name)]

    def registrations(self) -> list[str]:
        """What the agent said to its registrations."""
        path = self.folder / "registrations.txt"
        return path.read_text().splitlines() if path.exists() else []


@contextmanager
def plugin_process(folder: Path, kubelet: Path, *options: str) -> Iterator[DevicePluginProcess]:
    """A plugin that runs for the time of a block."""
    plugin = DevicePluginProcess(folder, kubelet, *options)
    try:
        plugin.start()
        yield plugin
    finally:
        plugin.kill()
