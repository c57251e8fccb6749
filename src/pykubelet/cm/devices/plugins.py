"""The device plugins in service: they come by registration, and go when their list of devices ends.

Plugins register by a call to the agent's socket, `kubelet.sock` in the folder of device plugins, or by a
socket in the folder of all plugins (`host/plugin_registration.py`); for either the agent calls back. One
plugin serves a resource at a time: who registers later takes over, with the devices as they were until
its first list. A plugin that went away has five minutes to come back before the node forgets its resource.

A device plugin as the agent sees it: a program at the other end of a socket.

One connection serves for as long as the plugin is there: its list of devices comes over it for ever, and
the end of that list is how a plugin's death is noticed. Every other call has its time, so that a plugin
that hangs fails the containers that need it and nothing else.

How often device plugins register, and how long they take to hand out devices.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from prometheus_client import CollectorRegistry, Counter, Histogram

from pykubelet.api.names import is_extended_resource
from pykubelet.cm.devices import device_plugin_pb2 as pb
from pykubelet.cm.devices.registry import Device, DeviceRegistry
from pykubelet.logs import get_logger
from pykubelet.pluginmanager.client import PluginError
from pykubelet.pluginmanager.registration import Plugin, RegistrationRefused
from pykubelet.transport.errors import from_status
from pykubelet.transport.grpc_connection import Call, Connection, Status, connect_unix
from pykubelet.transport.grpc_server import GrpcError, Methods, Unary
from pykubelet.util.metrics import SECONDS
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
CONNECT_SECONDS = 10.0
OPTIONS_SECONDS = 10.0
PREFERRED_SECONDS = 10.0
ALLOCATE_SECONDS = 120.0
"""Plugins may reset or program a device here; the reference would wait for ever, and with it all pods."""
PRE_START_SECONDS = 30.0
_AGAIN_SECONDS = 0.1
_SERVICE = "/v1beta1.DevicePlugin/"
_HEALTHY = "Healthy"
Answer = TypeVar("Answer", bound=Message)


class OptionsError(PluginError):
    """Raised when a device plugin that registers does not answer GetDevicePluginOptions."""

    def __str__(self) -> str:
        return f"failed to get device plugin options: {super().__str__()}"


class DevicePlugin:
    """A plugin that is there, until its list ends."""

    def __init__(self, socket: str, connection: Connection, options: pb.DevicePluginOptions) -> None:
        self.socket = socket
        self.pre_start_required = options.pre_start_required
        self.has_preferences = options.get_preferred_allocation_available
        self._connection = connection

    async def watch(self) -> AsyncGenerator[list[Device], None]:
        """Give the plugin's devices, and again whenever something happens to them.

        Raises PluginError when the plugin ends; there is no other end.
        """
        _check_open(self._connection)
        call = self._connection.call(f"{_SERVICE}ListAndWatch", pb.Empty().SerializeToString())
        try:
            while (message := await call.read()) is not None:
                yield read_devices(_parsed(pb.ListAndWatchResponse, message))
            raise _failure("ListAndWatch", call, "the plugin ended its list of devices")
        finally:
            call.cancel()

    async def preferred(self, available: Collection[str], required: Collection[str], size: int) -> list[str]:
        """Ask which devices the plugin would take; it may say anything. Raises PluginError."""
        request = pb.PreferredAllocationRequest()
        request.container_requests.add(
            available_deviceIDs=sorted(available),
            must_include_deviceIDs=sorted(required),
            allocation_size=size,
        )
        answer = await self._call(
            "GetPreferredAllocation", request, pb.PreferredAllocationResponse, PREFERRED_SECONDS
        )
        return list(answer.container_responses[0].deviceIDs) if answer.container_responses else []

    async def allocate(self, ids: Collection[str]) -> bytes:
        """Have devices made ready; gives the ContainerAllocateResponse. Raises PluginError."""
        request = pb.AllocateRequest()
        request.container_requests.add(devices_ids=sorted(ids))
        answer = await self._call("Allocate", request, pb.AllocateResponse, ALLOCATE_SECONDS)
        if not answer.container_responses:
            raise PluginError("Internal", "no containers return in allocation response")
        return answer.container_responses[0].SerializeToString(deterministic=True)

    async def pre_start(self, ids: Collection[str]) -> None:
        """Have devices made ready for a container that is about to start; raises PluginError."""
        request = pb.PreStartContainerRequest(devices_ids=sorted(ids))
        await self._call("PreStartContainer", request, pb.PreStartContainerResponse, PRE_START_SECONDS)

    def close(self) -> None:
        """Leave the plugin; whoever waits for it gets a PluginError."""
        self._connection.close(Status("UNAVAILABLE", "the plugin is not in service any more"))

    async def _call(self, name: str, request: Message, answer: type[Answer], timeout: float) -> Answer:
        return await _called(self._connection, name, request, answer, timeout)


async def connect_plugin(socket: str) -> DevicePlugin:
    """Reach a plugin that may still be starting, and ask what it can do; raises PluginError."""
    connection = await _connected(socket)
    try:
        options = await _called(
            connection, "GetDevicePluginOptions", pb.Empty(), pb.DevicePluginOptions, OPTIONS_SECONDS
        )
    except PluginError as err:
        connection.close(Status("CANCELLED"))
        raise OptionsError(err.code, err.message) from err
    except BaseException:
        connection.close(Status("CANCELLED"))
        raise
    return DevicePlugin(socket, connection, options)


def read_devices(answer: pb.ListAndWatchResponse) -> list[Device]:
    """Read a list as far as it makes sense: the last word on each device that has a name.

    A negative NUMA node is what the kernel says where there are none.
    """
    found = {
        one.ID: Device(
            one.ID,
            one.health == _HEALTHY,
            frozenset(node.ID for node in one.topology.nodes if node.ID >= 0),
        )
        for one in answer.devices
        if one.ID
    }
    if len(found) != len(answer.devices):
        log.info("A device plugin lists devices twice or without a name", listed=len(answer.devices))
    return list(found.values())


async def _connected(socket: str) -> Connection:
    loop = asyncio.get_running_loop()
    end = loop.time() + CONNECT_SECONDS
    while True:
        left = end - loop.time()
        try:
            return await connect_unix(socket, max(left, _AGAIN_SECONDS))
        except (OSError, ValueError) as err:
            # A path that is too long or has odd characters does not get better by waiting.
            if isinstance(err, ValueError) or left <= _AGAIN_SECONDS:
                reason = getattr(err, "strerror", None) or str(err)
                text = f"failed to dial device plugin: nobody answers at {socket}: {reason}"
                raise PluginError("Unavailable", text) from None
        await asyncio.sleep(_AGAIN_SECONDS)


async def _called(
    connection: Connection, name: str, request: Message, answer: type[Answer], timeout: float = math.inf
) -> Answer:
    _check_open(connection)
    call = connection.call(f"{_SERVICE}{name}", request.SerializeToString(), timeout=timeout)
    message = await call.answer()
    if call.status is None or call.status.code != "OK" or message is None:
        raise _failure(name, call, "the answer is empty")
    return _parsed(answer, message)


def _check_open(connection: Connection) -> None:
    if not connection.usable:
        raise PluginError("Unavailable", "the device plugin has gone away")


def _failure(name: str, call: Call, empty: str) -> PluginError:
    status = call.status or Status("UNKNOWN")
    if status.code == "OK":
        return PluginError("Internal", empty)
    failure = from_status(name, status.code, status.message)
    return PluginError(failure.code, failure.message)


def _parsed(answer: type[Answer], message: bytes) -> Answer:
    try:
        return answer.FromString(message)
    except DecodeError:
        raise PluginError("Internal", "the answer cannot be decoded") from None


class DeviceMetrics:
    """The devices of one agent."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Without a registry nobody sees the numbers."""
        self._registrations = Counter(
            "kubelet_device_plugin_registration_total",
            "Registrations of device plugins.",
            ["resource_name"],
            registry=registry,
        )
        self._allocations = Histogram(
            "kubelet_device_plugin_alloc_duration_seconds",
            "How long a device plugin took to hand out devices.",
            ["resource_name"],
            buckets=SECONDS,
            registry=registry,
        )

    def registered(self, resource: str) -> None:
        """Count a registration."""
        self._registrations.labels(resource).inc()

    @contextmanager
    def timed(self, resource: str) -> Iterator[None]:
        """Measure an allocation from here to the end of the block, however it ends."""
        began = perf_counter()
        try:
            yield
        finally:
            self._allocations.labels(resource).observe(perf_counter() - began)


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
        table: DeviceRegistry,
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
