"""The device plugins in service: they come by registration, and go when their list of devices ends.

Plugins register by a call to the agent's socket, `kubelet.sock` in the folder of device plugins, or by a
socket in the folder of all plugins (`host/plugin_registration.py`); for either the agent calls back. One
plugin serves a resource at a time: who registers later takes over, with the devices as they were until
its first list. A plugin that went away has five minutes to come back before the node forgets its resource.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

from pykubelet.api.names import is_extended_resource
from pykubelet.cri.grpc_server import GrpcError, Methods, Unary
from pykubelet.host.plugin_calls import PluginError
from pykubelet.host.plugin_registration import Plugin, RegistrationRefused
from pykubelet.logs import get_logger
from pykubelet.resources import device_plugin_pb2 as pb
from pykubelet.resources.device_metrics import DeviceMetrics
from pykubelet.resources.device_plugin import DevicePlugin, connect_plugin
from pykubelet.resources.device_table import DeviceTable
from pykubelet.tasks import TaskScope

log = get_logger(__name__)

GRACE_SECONDS = 300.0
"""How long a resource is known after its plugin went away."""

_VERSION = "v1beta1"


class DevicePlugins:
    """The plugins of one agent; what they say goes into the table.

    Plugins have tasks in the scope. `news` is awaited after each change, with the uids of the pods to
    whose devices something happened.
    """

    def __init__(
        self,
        folder: Path,
        table: DeviceTable,
        scope: TaskScope,
        metrics: DeviceMetrics,
        news: Callable[[frozenset[str]], Awaitable[None]],
    ) -> None:
        self._folder = folder
        self._table = table
        self._scope = scope
        self._metrics = metrics
        self._news = news
        self._serving: dict[str, DevicePlugin] = {}
        self._pre_start: set[str] = set()
        self._grace: dict[str, asyncio.TimerHandle] = {}
        for resource in table.resources:
            self._begin_grace(resource)

    def get(self, resource: str) -> DevicePlugin | None:
        """Give the plugin that serves a resource now."""
        return self._serving.get(resource)

    def wants_pre_start(self, resource: str) -> bool:
        """Whether a resource's plugin is to be called before each start of a container; it may be gone."""
        return resource in self._pre_start

    def methods(self) -> Methods:
        """Give what `kubelet.sock` serves."""
        return {"/v1beta1.Registration/Register": Unary(pb.RegisterRequest, self._registered)}

    def close(self) -> None:
        """Let all plugins go; the table keeps what they said."""
        for timer in self._grace.values():
            timer.cancel()
        serving, self._serving = self._serving, {}
        for plugin in serving.values():
            plugin.close()

    # A PluginHandler, for the folder of all plugins

    def validate(self, plugin: Plugin) -> None:
        """Raise RegistrationRefused if a plugin can never be taken as it is."""
        if _VERSION not in plugin.versions:
            raise RegistrationRefused(
                f"manager version, {_VERSION}, is not among plugin supported versions "
                f"[{' '.join(plugin.versions)}]"
            )
        if not is_extended_resource(plugin.name):
            raise RegistrationRefused(f"invalid name of device plugin socket: {_bad_name(plugin.name)}")

    async def register(self, plugin: Plugin) -> None:
        """Take a plugin into service; raises RegistrationRefused."""
        try:
            await self._connect(plugin.name, plugin.endpoint)
        except PluginError as err:
            raise RegistrationRefused(str(err)) from err

    async def deregister(self, plugin: Plugin) -> None:
        """Do without a plugin from now on, unless another has taken its place."""
        serving = self._serving.get(plugin.name)
        if serving is not None and serving.socket == plugin.endpoint:
            serving.close()

    # Registration

    async def _registered(self, request: pb.RegisterRequest) -> pb.Empty:
        resource = request.resource_name
        problem = ""
        if request.version != _VERSION:
            problem = (
                f'requested API version "{request.version}" is not supported by kubelet. '
                f'Supported version is ["{_VERSION}"]'
            )
        elif not is_extended_resource(resource):
            problem = _bad_name(resource)
        if problem:
            log.info("Refused a device plugin", resourceName=resource, why=problem)
            raise GrpcError("UNKNOWN", problem)
        try:
            # The endpoint is a name in the folder, whatever it looks like.
            await self._connect(resource, str(self._folder / request.endpoint.lstrip("/")))
        except PluginError as err:
            log.error(err, "Could not reach a device plugin that registered", resourceName=resource)
            raise GrpcError("UNKNOWN", str(err)) from err
        return pb.Empty()

    async def _connect(self, resource: str, socket: str) -> None:
        self._metrics.registered(resource)
        plugin = await connect_plugin(socket)
        if before := self._serving.get(resource):
            before.close()
        if timer := self._grace.pop(resource, None):
            timer.cancel()
        self._serving[resource] = plugin
        (self._pre_start.add if plugin.pre_start_required else self._pre_start.discard)(resource)
        self._scope.start(self._watch(resource, plugin), name=f"device plugin {resource}")
        log.info("Device plugin is registered", resourceName=resource, endpoint=socket)

    async def _watch(self, resource: str, plugin: DevicePlugin) -> None:
        try:
            async with aclosing(plugin.watch()) as lists:
                async for devices in lists:
                    if self._serving.get(resource) is not plugin:
                        return
                    healthy = sum(one.healthy for one in devices)
                    log.v(2).info("Devices", resourceName=resource, total=len(devices), healthy=healthy)
                    await self._news(self._table.list(resource, devices))
        except PluginError as err:
            if self._serving.get(resource) is plugin:
                log.error(err, "A device plugin went away", resourceName=resource)
        finally:
            plugin.close()
            if self._serving.get(resource) is plugin:
                del self._serving[resource]
                self._table.withdraw(resource)
                self._begin_grace(resource)
        await self._news(frozenset())

    def _begin_grace(self, resource: str) -> None:
        loop = asyncio.get_running_loop()
        self._grace[resource] = loop.call_later(GRACE_SECONDS, self._forget, resource)

    def _forget(self, resource: str) -> None:
        del self._grace[resource]
        self._pre_start.discard(resource)
        self._table.forget(resource)
        log.info("Forgot a resource whose device plugin did not come back", resourceName=resource)
        self._scope.start(self._news_of_none(), name=f"device plugin {resource} forgotten")

    async def _news_of_none(self) -> None:
        await self._news(frozenset())


def _bad_name(resource: str) -> str:
    return f'the ResourceName "{resource}" is invalid'
