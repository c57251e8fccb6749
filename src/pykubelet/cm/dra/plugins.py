"""Registered plugins of DRA drivers, their connections, and calls to them.

A driver may have several plugins at a time, while a new version replaces the old: the newest one that can be
reached is called. Each plugin has a connection that carries only reports of its devices' health; its end is
how a crash of the plugin is detected, long before a pod needs it. Pods that need an unregistered driver are
woken when it registers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from google.protobuf.message import DecodeError

from pykubelet.cm.dra import dra_health_pb2 as health_pb
from pykubelet.cm.dra import dra_pb2 as pb
from pykubelet.cm.dra.claims import ClaimError, ClaimInfo
from pykubelet.cm.dra.health import DeviceHealthCache
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
"""Timeout of a driver call, in seconds."""
HEALTH_SECONDS = 5.0
"""Seconds until an ended stream of health reports is opened again."""
RECONNECT_SECONDS = (0.2, 5.0)
"""Back-off delay before a plugin is connected again, in seconds: initial and maximum."""
_SERVICES = {
    "v1.DRAPlugin": "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/",
    "v1beta1.DRAPlugin": "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/",
}
"""gRPC path of each service that plugins can announce; the messages are the same."""
_HEALTH = "/v1alpha1.DRAResourceHealth/NodeWatchResources"


@dataclass(slots=True, eq=False)
class DriverPlugin:
    """A plugin of a DRA driver."""

    plugin: Plugin
    path: str
    """Path of its socket."""
    service: str
    metrics: DraMetrics
    connected: bool = False
    reporting: bool = False
    """Whether its stream of health reports is open and has reported."""

    @property
    def driver(self) -> str:
        """Name of the driver."""
        return self.plugin.name

    async def prepare(self, claims: Sequence[ClaimInfo]) -> pb.NodePrepareResourcesResponse:
        """Call NodePrepareResources. Raises PluginError."""
        request = pb.NodePrepareResourcesRequest(claims=map(_claim, claims))
        method = f"{self.service}NodePrepareResources"
        with self.metrics.call(self.driver, method):
            return await call_plugin(
                self.path, method, request, pb.NodePrepareResourcesResponse, timeout=CALL_SECONDS
            )

    async def unprepare(self, claims: Sequence[ClaimInfo]) -> pb.NodeUnprepareResourcesResponse:
        """Call NodeUnprepareResources. Raises PluginError."""
        request = pb.NodeUnprepareResourcesRequest(claims=map(_claim, claims))
        method = f"{self.service}NodeUnprepareResources"
        with self.metrics.call(self.driver, method):
            return await call_plugin(
                self.path, method, request, pb.NodeUnprepareResourcesResponse, timeout=CALL_SECONDS
            )


class DraPluginRegistry:
    """Registry of the plugins of DRA drivers (a PluginHandler)."""

    def __init__(
        self,
        tasks: TaskScope,
        metrics: DraMetrics | None = None,
        health: DeviceHealthCache | None = None,
    ) -> None:
        """Initialize; without `health` no reports are requested."""
        self._tasks = tasks
        self._metrics = metrics or DraMetrics()
        self._health = health
        self._plugins: dict[str, list[DriverPlugin]] = {}
        self._watches: dict[DriverPlugin, asyncio.Task[None]] = {}
        self._waiting: dict[str, set[str]] = {}
        self._listeners: list[Callable[[str, bool], None]] = []
        self._pod_listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str, bool], None]) -> None:
        """Call `listener` with a driver's name and whether it is usable, when that may have changed."""
        self._listeners.append(listener)

    def add_pod_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the UID of each pod whose missing driver has registered."""
        self._pod_listeners.append(listener)

    def get(self, driver: str) -> DriverPlugin:
        """Return the plugin to call. Raises ClaimError when the driver is not registered."""
        plugins = self._plugins.get(driver)
        if not plugins:
            raise ClaimError(f"DRA driver {driver} is not registered")
        reachable = [plugin for plugin in plugins if plugin.connected]
        return (reachable or plugins)[-1]

    def needed(self, driver: str, uid: str) -> DriverPlugin:
        """Return the plugin to call for a pod, which is woken when a missing driver registers.

        Raises ClaimError when the driver is not registered.
        """
        self._waiting.setdefault(driver, set()).add(uid)
        found = self.get(driver)
        self._done_waiting(driver, uid)
        return found

    def forget(self, uid: str) -> None:
        """Record that a pod no longer waits for any driver."""
        for driver in list(self._waiting):
            self._done_waiting(driver, uid)

    # PluginHandler

    def validate(self, plugin: Plugin) -> None:
        """Raise RegistrationRefused if a plugin's name, versions or endpoint are not supported."""
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
        """Put a plugin into service, in addition to others of its driver."""
        self.validate(plugin)
        existing = self._plugins.get(plugin.name, ())
        if any(other.plugin.endpoint == plugin.endpoint for other in existing):
            raise RegistrationRefused(
                f"endpoint {plugin.endpoint} already registered for DRA driver plugin {plugin.name}"
            )
        path = Endpoint.parse(plugin.endpoint).path
        found = DriverPlugin(plugin, path, _SERVICES[chosen_service(plugin.versions)], self._metrics)
        self._plugins.setdefault(plugin.name, []).append(found)
        self._watches[found] = self._tasks.start(self._watch(found), name=f"dra {plugin.name}")
        log.info("Registered DRA driver plugin", driver=plugin.name, endpoint=plugin.endpoint)
        self._changed(plugin.name)
        for uid in sorted(self._waiting.pop(plugin.name, ())):
            for listener in self._pod_listeners:
                listener(uid)

    async def deregister(self, plugin: Plugin) -> None:
        """Remove a plugin; other plugins of its driver stay, including older ones."""
        plugins = self._plugins.get(plugin.name, [])
        for found in [registered for registered in plugins if registered.plugin is plugin]:
            plugins.remove(found)
            self._watches.pop(found).cancel()
            found.connected = found.reporting = False
        if not plugins:
            self._plugins.pop(plugin.name, None)
        self._health_ended(plugin.name)
        self._changed(plugin.name)

    # A plugin's connection

    async def _watch(self, plugin: DriverPlugin) -> NoReturn:
        delay = RECONNECT_SECONDS[0]
        while True:
            try:
                connection = await _connected(plugin.path)
            except OSError as err:
                log.v(4).info("Failed to connect to DRA driver plugin", driver=plugin.driver, err=err)
            else:
                delay = RECONNECT_SECONDS[0]
                plugin.connected = True
                self._changed(plugin.driver)
                try:
                    await self._listen(plugin, connection)
                finally:
                    connection.close(Status("CANCELLED"))
                    plugin.connected = False
                log.v(2).info("DRA driver plugin disconnected", driver=plugin.driver, endpoint=plugin.path)
                self._changed(plugin.driver)
            await asyncio.sleep(delay)
            delay = min(2 * delay, RECONNECT_SECONDS[1])

    async def _listen(self, plugin: DriverPlugin, connection: _Connection) -> None:
        """Receive health reports until the connection ends."""
        while self._health is not None and connection.open:
            call = connection.call(_HEALTH, health_pb.NodeWatchResourcesRequest().SerializeToString())
            try:
                while (message := await call.read()) is not None:
                    plugin.reporting = True
                    self._health.on_report(
                        plugin.driver, health_pb.NodeWatchResourcesResponse.FromString(message)
                    )
            except DecodeError as err:
                log.error(err, "Failed to decode device health of DRA driver", driver=plugin.driver)
            finally:
                call.cancel()
                plugin.reporting = False
            self._health_ended(plugin.driver)
            if call.status is not None and call.status.code == "UNIMPLEMENTED":
                break
            await connection.wait_lost(HEALTH_SECONDS)
        await connection.wait_lost()

    def _health_ended(self, driver: str) -> None:
        """Drop a driver's health, unless another of its plugins still reports: it would not repeat it."""
        if self._health is not None and not any(plugin.reporting for plugin in self._plugins.get(driver, ())):
            self._health.on_reports_ended(driver)

    def _changed(self, driver: str) -> None:
        usable = any(plugin.connected for plugin in self._plugins.get(driver, ()))
        for listener in self._listeners:
            listener(driver, usable)

    def _done_waiting(self, driver: str, uid: str) -> None:
        uids = self._waiting.get(driver, set())
        uids.discard(uid)
        if not uids:
            self._waiting.pop(driver, None)


class _Connection(Connection):
    """A connection whose end can be awaited."""

    def __init__(self) -> None:
        super().__init__("localhost")
        self._lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost.set()

    async def wait_lost(self, seconds: float | None = None) -> None:
        """Wait until the connection is lost, at most for this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._lost.wait()
        except TimeoutError:
            return


def chosen_service(offered: Sequence[str]) -> str:
    """Return the preferred service of those that a plugin offers. Raises ValueError if none is supported."""
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
    if not await connection.wait_settings():
        raise ConnectionError("it does not answer as a gRPC server does")
    return connection


def _claim(record: ClaimInfo) -> pb.Claim:
    return pb.Claim(namespace=record.namespace, uid=record.uid, name=record.name)


def _quoted(text: str) -> str:
    return f'"{text}"'
