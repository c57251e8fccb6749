"""A device plugin as the agent sees it: a program at the other end of a socket.

One connection serves for as long as the plugin is there: its list of devices comes over it for ever, and
the end of that list is how a plugin's death is noticed. Every other call has its time, so that a plugin
that hangs fails the containers that need it and nothing else.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Collection
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from pykubelet.cri.connection import Call, Connection, connect_unix
from pykubelet.cri.errors import from_status
from pykubelet.cri.grpc_status import Status
from pykubelet.host.plugin_calls import PluginError
from pykubelet.logs import get_logger
from pykubelet.resources import device_plugin_pb2 as pb
from pykubelet.resources.device_table import Device

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
