"""Device plugins: registration, calls, device lists and metrics.

Plugins register by a call to `kubelet.sock` in the directory of device plugins, or by a socket in the
directory of all plugins (`pluginmanager/registration.py`); in both cases the kubelet connects back. One
plugin serves a resource at a time: a later registration replaces the earlier one, and the devices stay as
they were until its first list. The resource of a plugin that disconnected is removed after GRACE_SECONDS.

Each plugin has one connection. Its ListAndWatch stream stays open, and the end of that stream is how a crash
of the plugin is detected. All other calls have a timeout, so that a plugin that hangs fails only the
containers that need it.
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
from pykubelet.transport.grpc_server import GrpcError, Methods, UnaryMethod
from pykubelet.util.metrics import SECONDS
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
CONNECT_SECONDS = 10.0
OPTIONS_SECONDS = 10.0
PREFERRED_SECONDS = 10.0
ALLOCATE_SECONDS = 120.0
"""Seconds; plugins may reset or program a device here. Upstream waits without limit, blocking all pods."""
PRE_START_SECONDS = 30.0
_RETRY_SECONDS = 0.1
_SERVICE = "/v1beta1.DevicePlugin/"
_HEALTHY = "Healthy"
Response = TypeVar("Response", bound=Message)


class OptionsError(PluginError):
    """Raised when a registering device plugin fails GetDevicePluginOptions."""

    def __str__(self) -> str:
        return f"failed to get device plugin options: {super().__str__()}"


class DevicePlugin:
    """A connected device plugin, until its ListAndWatch stream ends."""

    def __init__(self, socket: str, connection: Connection, options: pb.DevicePluginOptions) -> None:
        self.socket = socket
        self.pre_start_required = options.pre_start_required
        self.has_preferences = options.get_preferred_allocation_available
        self._connection = connection

    async def watch(self) -> AsyncGenerator[list[Device], None]:
        """Yield the plugin's devices, initially and after each change.

        Raises PluginError when the stream ends; it never ends otherwise.
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
        """Call GetPreferredAllocation and return its devices, not validated. Raises PluginError."""
        request = pb.PreferredAllocationRequest()
        request.container_requests.add(
            available_deviceIDs=sorted(available),
            must_include_deviceIDs=sorted(required),
            allocation_size=size,
        )
        response = await self._call(
            "GetPreferredAllocation", request, pb.PreferredAllocationResponse, PREFERRED_SECONDS
        )
        return list(response.container_responses[0].deviceIDs) if response.container_responses else []

    async def allocate(self, ids: Collection[str]) -> bytes:
        """Call Allocate and return the serialized ContainerAllocateResponse. Raises PluginError."""
        request = pb.AllocateRequest()
        request.container_requests.add(devices_ids=sorted(ids))
        response = await self._call("Allocate", request, pb.AllocateResponse, ALLOCATE_SECONDS)
        if not response.container_responses:
            raise PluginError("Internal", "no containers return in allocation response")
        return response.container_responses[0].SerializeToString(deterministic=True)

    async def pre_start(self, ids: Collection[str]) -> None:
        """Call PreStartContainer. Raises PluginError."""
        request = pb.PreStartContainerRequest(devices_ids=sorted(ids))
        await self._call("PreStartContainer", request, pb.PreStartContainerResponse, PRE_START_SECONDS)

    def close(self) -> None:
        """Close the connection; pending calls raise PluginError."""
        self._connection.close(Status("UNAVAILABLE", "the plugin is not in service any more"))

    async def _call(
        self, name: str, request: Message, response_type: type[Response], timeout: float
    ) -> Response:
        return await _called(self._connection, name, request, response_type, timeout)


async def connect_plugin(socket: str) -> DevicePlugin:
    """Connect to a plugin that may still be starting, and get its options. Raises PluginError."""
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


def read_devices(response: pb.ListAndWatchResponse) -> list[Device]:
    """Parse a device list: the last entry of each device; devices without an ID are dropped.

    A negative NUMA node is the kernel's value for no node.
    """
    found = {
        device.ID: Device(
            device.ID,
            device.health == _HEALTHY,
            frozenset(node.ID for node in device.topology.nodes if node.ID >= 0),
        )
        for device in response.devices
        if device.ID
    }
    if len(found) != len(response.devices):
        log.info("Ignored duplicate or unnamed devices of device plugin", listed=len(response.devices))
    return list(found.values())


async def _connected(socket: str) -> Connection:
    loop = asyncio.get_running_loop()
    end = loop.time() + CONNECT_SECONDS
    while True:
        left = end - loop.time()
        try:
            return await connect_unix(socket, max(left, _RETRY_SECONDS))
        except (OSError, ValueError) as err:
            # A path that is too long or has invalid characters is not worth a retry.
            if isinstance(err, ValueError) or left <= _RETRY_SECONDS:
                reason = getattr(err, "strerror", None) or str(err)
                text = f"failed to dial device plugin: nobody answers at {socket}: {reason}"
                raise PluginError("Unavailable", text) from None
        await asyncio.sleep(_RETRY_SECONDS)


async def _called(
    connection: Connection,
    name: str,
    request: Message,
    response_type: type[Response],
    timeout: float = math.inf,
) -> Response:
    _check_open(connection)
    call = connection.call(f"{_SERVICE}{name}", request.SerializeToString(), timeout=timeout)
    message = await call.wait_response()
    if call.status is None or call.status.code != "OK" or message is None:
        raise _failure(name, call, "the answer is empty")
    return _parsed(response_type, message)


def _check_open(connection: Connection) -> None:
    if not connection.usable:
        raise PluginError("Unavailable", "the device plugin has gone away")


def _failure(name: str, call: Call, empty: str) -> PluginError:
    status = call.status or Status("UNKNOWN")
    if status.code == "OK":
        return PluginError("Internal", empty)
    failure = from_status(name, status.code, status.message)
    return PluginError(failure.code, failure.message)


def _parsed(response_type: type[Response], message: bytes) -> Response:
    try:
        return response_type.FromString(message)
    except DecodeError:
        raise PluginError("Internal", "the answer cannot be decoded") from None


class DeviceMetrics:
    """Metrics of device plugins."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Initialize; without a registry the metrics are not exported."""
        self._registrations = Counter(
            "kubelet_device_plugin_registration_total",
            "Registrations of device plugins.",
            ["resource_name"],
            registry=registry,
        )
        self._allocations = Histogram(
            "kubelet_device_plugin_alloc_duration_seconds",
            "Duration of device plugin allocations in seconds.",
            ["resource_name"],
            buckets=SECONDS,
            registry=registry,
        )

    def registered(self, resource: str) -> None:
        """Count a registration."""
        self._registrations.labels(resource).inc()

    @contextmanager
    def timed(self, resource: str) -> Iterator[None]:
        """Observe the duration of the block as an allocation, also if it fails."""
        started_at = perf_counter()
        try:
            yield
        finally:
            self._allocations.labels(resource).observe(perf_counter() - started_at)


GRACE_SECONDS = 300.0
"""Seconds until a resource is removed after its plugin disconnected."""
_VERSION = "v1beta1"


class DevicePlugins:
    """Device plugins of the node; their devices are stored in `registry`.

    Each plugin has a task in the scope. `on_change` is awaited after each change, with the UIDs of pods whose
    devices changed.
    """

    def __init__(
        self,
        directory: Path,
        registry: DeviceRegistry,
        scope: TaskScope,
        metrics: DeviceMetrics,
        on_change: Callable[[frozenset[str]], Awaitable[None]],
    ) -> None:
        self._directory = directory
        self._registry = registry
        self._scope = scope
        self._metrics = metrics
        self._on_change = on_change
        self._serving: dict[str, DevicePlugin] = {}
        self._pre_start: set[str] = set()
        self._grace: dict[str, asyncio.TimerHandle] = {}
        for resource in registry.resources:
            self._begin_grace(resource)

    def get(self, resource: str) -> DevicePlugin | None:
        """Return the plugin that serves a resource now, or None."""
        return self._serving.get(resource)

    def requires_pre_start(self, resource: str) -> bool:
        """Return whether a resource's plugin, connected or not, requires PreStartContainer calls."""
        return resource in self._pre_start

    def methods(self) -> Methods:
        """Return the gRPC methods of `kubelet.sock`."""
        return {"/v1beta1.Registration/Register": UnaryMethod(pb.RegisterRequest, self._registered)}

    def close(self) -> None:
        """Disconnect all plugins; the registry keeps their devices."""
        for timer in self._grace.values():
            timer.cancel()
        serving, self._serving = self._serving, {}
        for plugin in serving.values():
            plugin.close()

    # PluginHandler, for the directory of all plugins

    def validate(self, plugin: Plugin) -> None:
        """Raise RegistrationRefused if a plugin's version or name is not supported."""
        if _VERSION not in plugin.versions:
            raise RegistrationRefused(
                f"manager version, {_VERSION}, is not among plugin supported versions "
                f"[{' '.join(plugin.versions)}]"
            )
        if not is_extended_resource(plugin.name):
            raise RegistrationRefused(f"invalid name of device plugin socket: {_bad_name(plugin.name)}")

    async def register(self, plugin: Plugin) -> None:
        """Connect to a plugin and put it into service. Raises RegistrationRefused."""
        try:
            await self._connect(plugin.name, plugin.endpoint)
        except PluginError as err:
            raise RegistrationRefused(str(err)) from err

    async def deregister(self, plugin: Plugin) -> None:
        """Disconnect a plugin, unless another one has replaced it."""
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
            log.info("Rejected device plugin", resourceName=resource, err=problem)
            raise GrpcError("UNKNOWN", problem)
        try:
            # The endpoint is always relative to the directory, even if it starts with a slash.
            await self._connect(resource, str(self._directory / request.endpoint.lstrip("/")))
        except PluginError as err:
            log.error(err, "Failed to connect to registering device plugin", resourceName=resource)
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
        log.info("Registered device plugin", resourceName=resource, endpoint=socket)

    async def _watch(self, resource: str, plugin: DevicePlugin) -> None:
        try:
            async with aclosing(plugin.watch()) as lists:
                async for devices in lists:
                    if self._serving.get(resource) is not plugin:
                        return
                    healthy = sum(device.healthy for device in devices)
                    log.v(2).info(
                        "Received device list", resourceName=resource, total=len(devices), healthy=healthy
                    )
                    await self._on_change(self._registry.set_devices(resource, devices))
        except PluginError as err:
            if self._serving.get(resource) is plugin:
                log.error(err, "Device plugin disconnected", resourceName=resource)
        finally:
            plugin.close()
            if self._serving.get(resource) is plugin:
                del self._serving[resource]
                self._registry.withdraw(resource)
                self._begin_grace(resource)
        await self._on_change(frozenset())

    def _begin_grace(self, resource: str) -> None:
        loop = asyncio.get_running_loop()
        self._grace[resource] = loop.call_later(GRACE_SECONDS, self._forget, resource)

    def _forget(self, resource: str) -> None:
        del self._grace[resource]
        self._pre_start.discard(resource)
        self._registry.forget(resource)
        log.info("Removed resource of disconnected device plugin", resourceName=resource)
        self._scope.start(self._notify_removed(), name=f"device plugin {resource} forgotten")

    async def _notify_removed(self) -> None:
        await self._on_change(frozenset())


def _bad_name(resource: str) -> str:
    return f'the ResourceName "{resource}" is invalid'
