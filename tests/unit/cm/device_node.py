"""A device manager that serves, with real plugin processes, and the rest of an agent made up."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pykubelet.api.pod import Pod
from pykubelet.cm.devices.manager import DeviceManager
from pykubelet.cm.topology.hints import ANYWHERE, TopologyHint
from tests.support.device_plugin.process import RESOURCE, plugin_process
from tests.support.pod_resources import pod_of

TWO = ("--device=d1", "--device=d2")


class Pods:
    """The pods that there are, as the rest of an agent would know them."""

    def __init__(self) -> None:
        self.uids: set[str] | None = set()
        self.running: set[tuple[str, str]] = set()

    def active(self) -> set[str] | None:
        return self.uids

    def running_before(self, uid: str) -> set[str]:
        return {container for one, container in self.running if one == uid}


class Node:
    """A manager that serves, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods = Pods()
        self.told: list[frozenset[str]] = []
        self.breath = 0.0
        """Real seconds that threads get between two looks, for tests in which the loop's time is made up."""
        self.manager = DeviceManager(folder, (0, 1), self.pods, changed=self._changed)

    def _changed(self, uids: frozenset[str]) -> None:
        self.told.append(uids)

    async def until(self, what: Callable[[], Any], seconds: float = 60, pause: float = 0.01) -> None:
        async with asyncio.timeout(seconds):
            while not self._look(what):
                await asyncio.sleep(pause)

    def _look(self, what: Callable[[], Any]) -> Any:
        time.sleep(self.breath)
        return what()

    async def offers(self, capacity: int, allocatable: int | None = None, resource: str = RESOURCE) -> None:
        wanted = (capacity, capacity if allocatable is None else allocatable)
        await self.until(lambda: self.numbers(resource) == wanted)

    def numbers(self, resource: str = RESOURCE) -> tuple[int, int] | None:
        capacity, allocatable, _ = self.manager.amounts()
        return (int(capacity[resource]), int(allocatable[resource])) if resource in capacity else None

    async def admit(self, pod: Pod, chosen: TopologyHint = ANYWHERE) -> None:
        if self.pods.uids is not None:
            self.pods.uids.add(pod.metadata.uid)
        for container in (*pod.spec.init_containers, *pod.spec.containers):
            if (waiting := self.manager.allocate(pod, container, chosen)) is not None:
                await waiting

    def ids(self, pod: Pod, container: str = "c0") -> str:
        held = self.manager.held(pod.metadata.uid, container)
        return ",".join(held.get(RESOURCE, {}))

    def checkpoint(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "kubelet_internal_checkpoint").read_text())["Data"]
        return found


@asynccontextmanager
async def node_in(folder: Path) -> AsyncIterator[Node]:
    node = Node(folder / "device-plugins")
    async with node.manager.serving():
        yield node


def wanting(count: int, **spec: Any) -> Pod:
    return pod_of({"limits": {RESOURCE: str(count)}}, **spec)


def plugin_in(folder: Path, *options: str) -> Any:
    return plugin_process(folder / "plugin", folder / "device-plugins", *options)
