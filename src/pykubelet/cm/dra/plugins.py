"""The drivers of resource claims that have registered on this node.

A driver may have several plugins at a time, while a new version takes over from the old: the newest that can
be reached is asked. Each plugin has a connection that carries nothing but news of its devices' health; its
end is how a plugin's death is noticed, long before somebody needs it. Pods that need a driver which is not
there are woken when it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from google.protobuf.message import DecodeError

from pykubelet.cm.dra import dra_health_pb2 as health_pb
from pykubelet.cm.dra import dra_pb2 as pb
from pykubelet.cm.dra.claims import ClaimError, ClaimInfo
from pykubelet.cm.dra.metrics import DraMetrics
from pykubelet.logs import get_logger
from pykubelet.pluginmanager.client import call_plugin
from pykubelet.pluginmanager.registration import Plugin, RegistrationRefused
from pykubelet.transport.endpoint import Endpoint
from pykubelet.transport.errors import EndpointError
from pykubelet.transport.grpc_connection import Connection, Status
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
PLUGIN_TYPE = "DRAPlugin"
CALL_SECONDS = 45.0
"""How long a driver may take for one call."""
HEALTH_SECONDS = 5.0
"""When to ask again for news of health that have ended."""
RECONNECT_SECONDS = (0.2, 5.0)
"""The pause before a plugin is tried again: first, and at most."""
_SERVICES = {
    "v1.DRAPlugin": "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/",
    "v1beta1.DRAPlugin": "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/",
}
"""What plugins say that they serve, and where that is; the messages are the same."""
_HEALTH = "/v1alpha1.DRAResourceHealth/NodeWatchResources"


class DeviceHealthListener(Protocol):
    """Whoever wants to know how devices are."""

    def told(self, driver: str, answer: health_pb.NodeWatchResourcesResponse) -> None:
        """Take a driver's newest list."""

    def ended(self, driver: str) -> None:
        """Take note that a driver tells no more."""


@dataclass(slots=True, eq=False)
class DriverPlugin:
    """One plugin of a driver."""

    plugin: Plugin
    path: str
    """Of its socket."""
    service: str
    metrics: DraMetrics
    connected: bool = False
    tells: bool = False
    """Whether it has told of its devices' health, and goes on."""

    @property
    def driver(self) -> str:
        """The driver's name."""
        return self.plugin.name

    async def prepare(self, claims: Sequence[ClaimInfo]) -> pb.NodePrepareResourcesResponse:
        """Have claims made ready; raises PluginError."""
        request = pb.NodePrepareResourcesRequest(claims=map(_claim, claims))
        method = f"{self.service}NodePrepareResources"
        with self.metrics.call(self.driver, method):
            return await call_plugin(
                self.path, method, request, pb.NodePrepareResourcesResponse, timeout=CALL_SECONDS
            )

    async def unprepare(self, claims: Sequence[ClaimInfo]) -> pb.NodeUnprepareResourcesResponse:
        """Have undone what was made ready; raises PluginError."""
        request = pb.NodeUnprepareResourcesRequest(claims=map(_claim, claims))
        method = f"{self.service}NodeUnprepareResources"
        with self.metrics.call(self.driver, method):
            return await call_plugin(
                self.path, method, request, pb.NodeUnprepareResourcesResponse, timeout=CALL_SECONDS
            )


class DraPluginRegistry:
    """Takes plugins of drivers into service (a PluginHandler), and gives the one to ask."""

    def __init__(
        self,
        tasks: TaskScope,
        metrics: DraMetrics | None = None,
        health: DeviceHealthListener | None = None,
        wake: Callable[[str], None] = lambda uid: None,
    ) -> None:
        """`health` is None where nobody wants to know; `wake` has a pod's worker look again."""
        self._tasks = tasks
        self._metrics = metrics or DraMetrics()
        self._health = health
        self.wake = wake
        self._plugins: dict[str, list[DriverPlugin]] = {}
        self._watches: dict[DriverPlugin, asyncio.Task[None]] = {}
        self._waiting: dict[str, set[str]] = {}
        self._listeners: list[Callable[[str, bool], None]] = []

    def listen(self, listener: Callable[[str, bool], None]) -> None:
        """Call this with a driver's name when it may have become usable, or not usable, which is said."""
        self._listeners.append(listener)

    def get(self, driver: str) -> DriverPlugin:
        """Give the plugin to ask; raises ClaimError when the driver is not there."""
        plugins = self._plugins.get(driver)
        if not plugins:
            raise ClaimError(f"DRA driver {driver} is not registered")
        reachable = [one for one in plugins if one.connected]
        return (reachable or plugins)[-1]

    def needed(self, driver: str, uid: str) -> DriverPlugin:
        """Give the plugin to ask for a pod; where there is none, the pod is woken when there is."""
        self._waiting.setdefault(driver, set()).add(uid)
        found = self.get(driver)
        self._done_waiting(driver, uid)
        return found

    def forget(self, uid: str) -> None:
        """Take note that a pod waits for no driver any more."""
        for driver in list(self._waiting):
            self._done_waiting(driver, uid)

    # As a PluginHandler

    def validate(self, plugin: Plugin) -> None:
        """Refuse a plugin that cannot be spoken to."""
        where = f"DRA driver plugin {plugin.name} at endpoint {plugin.endpoint}"
        if not plugin.name:
            raise RegistrationRefused("DRA driver name is empty")
        try:
            chosen_service(plugin.versions)
        except ValueError as err:
            raise RegistrationRefused(f"invalid supported gRPC versions of {where}: {err}") from err
        try:
            Endpoint.parse(plugin.endpoint)
        except EndpointError as err:
            raise RegistrationRefused(f"{where}: {err}") from err

    async def register(self, plugin: Plugin) -> None:
        """Take a plugin into service, beside others of its driver."""
        self.validate(plugin)
        beside = self._plugins.get(plugin.name, ())
        if any(one.plugin.endpoint == plugin.endpoint for one in beside):
            raise RegistrationRefused(
                f"endpoint {plugin.endpoint} already registered for DRA driver plugin {plugin.name}"
            )
        path = Endpoint.parse(plugin.endpoint).path
        found = DriverPlugin(plugin, path, _SERVICES[chosen_service(plugin.versions)], self._metrics)
        self._plugins.setdefault(plugin.name, []).append(found)
        self._watches[found] = self._tasks.start(self._watch(found), name=f"dra {plugin.name}")
        log.info("DRA driver is registered", driver=plugin.name, endpoint=plugin.endpoint)
        self._changed(plugin.name)
        for uid in sorted(self._waiting.pop(plugin.name, ())):
            self.wake(uid)

    async def deregister(self, plugin: Plugin) -> None:
        """Do without a plugin; others of its driver stay, also one that was there first."""
        plugins = self._plugins.get(plugin.name, [])
        for found in [one for one in plugins if one.plugin is plugin]:
            plugins.remove(found)
            self._watches.pop(found).cancel()
            found.connected = found.tells = False
        if not plugins:
            self._plugins.pop(plugin.name, None)
        self._health_ended(plugin.name)
        self._changed(plugin.name)

    # A plugin's connection

    async def _watch(self, plugin: DriverPlugin) -> NoReturn:
        pause = RECONNECT_SECONDS[0]
        while True:
            try:
                connection = await _connected(plugin.path)
            except OSError as err:
                log.v(4).info("Cannot reach a DRA driver", driver=plugin.driver, err=err)
            else:
                pause = RECONNECT_SECONDS[0]
                plugin.connected = True
                self._changed(plugin.driver)
                try:
                    await self._listen(plugin, connection)
                finally:
                    connection.close(Status("CANCELLED"))
                    plugin.connected = False
                log.v(2).info("Lost a DRA driver", driver=plugin.driver, endpoint=plugin.path)
                self._changed(plugin.driver)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RECONNECT_SECONDS[1])

    async def _listen(self, plugin: DriverPlugin, connection: _Connection) -> None:
        """Take news of health until the connection ends."""
        while self._health is not None and connection.open:
            call = connection.call(_HEALTH, health_pb.NodeWatchResourcesRequest().SerializeToString())
            try:
                while (message := await call.read()) is not None:
                    plugin.tells = True
                    self._health.told(plugin.driver, health_pb.NodeWatchResourcesResponse.FromString(message))
            except DecodeError as err:
                log.error(err, "Cannot read what a DRA driver tells of its devices", driver=plugin.driver)
            finally:
                call.cancel()
                plugin.tells = False
            self._health_ended(plugin.driver)
            if call.status is not None and call.status.code == "UNIMPLEMENTED":
                break
            await connection.wait_lost(HEALTH_SECONDS)
        await connection.wait_lost()

    def _health_ended(self, driver: str) -> None:
        """Forget what a driver said, unless another plugin of it goes on telling: it would not repeat it."""
        if self._health is not None and not any(one.tells for one in self._plugins.get(driver, ())):
            self._health.ended(driver)

    def _changed(self, driver: str) -> None:
        usable = any(one.connected for one in self._plugins.get(driver, ()))
        for listener in self._listeners:
            listener(driver, usable)

    def _done_waiting(self, driver: str, uid: str) -> None:
        uids = self._waiting.get(driver, set())
        uids.discard(uid)
        if not uids:
            self._waiting.pop(driver, None)


class _Connection(Connection):
    """A connection whose end can be waited for."""

    def __init__(self) -> None:
        super().__init__("localhost")
        self._lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost.set()

    async def wait_lost(self, seconds: float | None = None) -> None:
        """Wait for the end, at most for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._lost.wait()
        except TimeoutError:
            return


def chosen_service(offered: Sequence[str]) -> str:
    """Give the service to use out of those that a plugin offers; raises ValueError when none will do."""
    if not offered:
        raise ValueError("empty list of supported gRPC services (aka supported versions)")
    for service in _SERVICES:
        if service in offered:
            return service
    ours, theirs = " ".join(map(_quoted, _SERVICES)), " ".join(map(_quoted, offered))
    raise ValueError(
        f"none of services supported by the plugin ([{theirs}]) are supported by the kubelet ([{ours}])"
    )


async def _connected(path: str) -> _Connection:
    _, connection = await asyncio.get_running_loop().create_unix_connection(_Connection, path)
    if not await connection.greeted():
        raise ConnectionError("it does not answer as a gRPC server does")
    return connection


def _claim(record: ClaimInfo) -> pb.Claim:
    return pb.Claim(namespace=record.namespace, uid=record.uid, name=record.name)


def _quoted(text: str) -> str:
    return f'"{text}"'
