"""The claims of an agent with real driver processes, and the API server's side made up."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.api.resource_claim import ResourceClaim
from pykubelet.apiserver.errors import NotFound
from pykubelet.cm.dra.claims import ClaimError
from pykubelet.cm.dra.health import DeviceHealthCache
from pykubelet.cm.dra.manager import DraManager
from pykubelet.cm.dra.metrics import DraMetrics
from pykubelet.cm.dra.plugins import DraPluginRegistry
from pykubelet.pluginmanager.registration import PluginRegistration
from pykubelet.util.tasks import TaskScope
from tests.support.dra_plugin.process import DRIVER, DriverProcess, driver_process

OTHER = "other.dra.example.com"


class Node:
    """The claims of an agent, with the API server's side made up."""

    def __init__(self, folder: Path, tasks: TaskScope) -> None:
        self.folder = folder
        self.woken: list[str] = []
        self.unwell: list[tuple[str, set[tuple[str, str]]]] = []
        self.objects: dict[str, ResourceClaim] = {}
        self.registry = CollectorRegistry()
        metrics = DraMetrics(self.registry)
        self.health = DeviceHealthCache(folder, tasks)
        self.health.add_listener(lambda driver, devices: self.unwell.append((driver, devices)))
        self.drivers = DraPluginRegistry(tasks, metrics, self.health)
        self.drivers.add_pod_listener(self.woken.append)
        self.claims = DraManager(folder, self.fetch, self.drivers, metrics=metrics, health=self.health)

    async def fetch(self, namespace: str, name: str) -> ResourceClaim:
        if name not in self.objects:
            raise NotFound(404, "NotFound", f'resourceclaims.resource.k8s.io "{name}" not found')
        return self.objects[name]

    def claim(self, name: str, *users: Pod, drivers: tuple[str, ...] = (DRIVER,), uid: str = "") -> None:
        """Have a claim that these pods may use."""
        self.objects[name] = from_document(
            ResourceClaim,
            {
                "metadata": {"name": name, "namespace": "ns", "uid": uid or f"uid-{name}"},
                "status": {
                    "allocation": {"devices": {"results": [{"driver": driver} for driver in drivers]}},
                    "reservedFor": [{"uid": user.uid} for user in users],
                },
            },
        )

    async def until(self, what: Callable[[], Any], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not what():
                await asyncio.sleep(0.01)

    async def registered(self, driver: str = DRIVER) -> None:
        await self.until(lambda: self._connected(driver))

    async def registered_anew(self, process: DriverProcess, driver: str = DRIVER, by: str = "a") -> None:
        """Wait for a plugin that was started again.

        It may be reached before it registers anew, and is gone for a moment when it does.
        """

        def told() -> int:
            return sum(call["by"] == by for call in process.calls("NotifyRegistrationStatus"))

        await self.until(lambda: told() == 2)
        await self.registered(driver)

    def _connected(self, driver: str) -> bool:
        try:
            return self.drivers.get(driver).connected
        except ClaimError:
            return False

    def state(self) -> dict[str, Any]:
        """What the file says: the claims by name."""
        data = json.loads(json.loads((self.folder / "dra_manager_state").read_text())["Data"])
        return {claim["ClaimName"]: claim for claim in data["ClaimInfoStateList"]}

    def count(self, metric: str, **labels: str) -> float:
        return self.registry.get_sample_value(metric, labels) or 0.0


@asynccontextmanager
async def agent(folder: Path) -> AsyncIterator[Node]:
    """One agent's time."""
    async with TaskScope() as tasks:
        node = Node(folder, tasks)
        registration = PluginRegistration(folder / "registry", {"DRAPlugin": node.drivers})
        tasks.start(registration.run(), name="registration")
        yield node


@asynccontextmanager
async def new_node() -> AsyncIterator[Node]:
    """An agent with a folder of its own."""
    # Sockets have short paths, and pytest's own temporary directories have long ones.
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as name:
        path = Path(name)
        (path / "registry").mkdir()
        async with agent(path) as running:
            yield running


def driver_of(node: Node, *options: str, folder: str = "driver") -> Any:
    return driver_process(node.folder / folder, node.folder / "registry", *options)


def pod_using(*claims: str, uid: str = "pod-1", requests: tuple[str, ...] = ("",)) -> Pod:
    used = [{"name": name, "request": request} for name in claims for request in requests]
    return from_document(
        Pod,
        {
            "metadata": {"name": uid, "namespace": "ns", "uid": uid},
            "spec": {
                "resourceClaims": [{"name": name, "resourceClaimName": name} for name in claims],
                "containers": [{"name": "main", "resources": {"claims": used}}, {"name": "bare"}],
            },
        },
    )


def cdi(node: Node, pod: Pod, container: int = 0) -> tuple[str, ...]:
    return node.claims.cdi_devices(pod, pod.spec.containers[container])
