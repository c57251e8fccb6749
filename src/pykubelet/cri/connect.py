"""Handshake with a container runtime: diagnose its socket, wait until it is ready, verify CRI v1.

The handshake as a whole is bounded in time. A runtime that is still starting is waited for; a missing socket,
or one with another protocol, is an immediate error. After a failure nothing stays open.

gRPC reports every connection failure as "unavailable". An operator needs to know which it is: no file, not a
socket, no permission, no listener, no response, or another protocol. `probe` therefore connects to the socket
directly; the first frame that an HTTP/2 server must send is sufficient evidence of gRPC.
"""

from __future__ import annotations

import asyncio
import stat
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pykubelet.api.duration import Duration
from pykubelet.cri import client as checks
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import FOREVER, Channel, CriMetrics
from pykubelet.cri.client import (
    AGENT_API_VERSION,
    IMAGE_SERVICE,
    RUNTIME_SERVICE,
    ImageClient,
    RuntimeClient,
    StatsClient,
)
from pykubelet.logs import get_logger
from pykubelet.tracing.span import Tracer
from pykubelet.transport.endpoint import Endpoint
from pykubelet.transport.errors import BadResponse, ConnectError, CriError, Unavailable, Unimplemented

log = get_logger(__name__)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER = struct.Struct(">BHBBL")  # length (8 + 16 bits), type, flags, stream
_SETTINGS = 4
_EMPTY_SETTINGS = _FRAME_HEADER.pack(0, 0, _SETTINGS, 0, 0)
_REMEDY = "start the container runtime, or set --container-runtime-endpoint to its socket"


async def probe(endpoint: Endpoint) -> None:
    """Return when an HTTP/2 server listens at the endpoint.

    Raises ConnectError, one line with the cause and a remedy. Waits indefinitely for a server that does not
    respond: the caller bounds the time, and raises `no_response_error`.
    """
    try:
        _check_file(endpoint)
        await _check_http2(endpoint)
    except FileNotFoundError:
        raise ConnectError(f"no socket at {endpoint}: the file does not exist; {_REMEDY}") from None
    except ConnectionRefusedError:
        raise ConnectError(
            f"nothing listens at {endpoint}: the socket was left by a runtime that ended; {_REMEDY}"
        ) from None
    except PermissionError:
        raise ConnectError(
            f"no permission to connect to {endpoint}; run as root, or as a user who may use the socket",
            "PermissionDenied",
        ) from None
    except OSError as err:
        reason = err.strerror or type(err).__name__
        raise ConnectError(f"cannot connect to {endpoint}: {reason}; {_REMEDY}") from None


def no_response_error(endpoint: Endpoint, seconds: float) -> ConnectError:
    """Return the error for a server that accepts connections and does not respond."""
    return ConnectError(
        f"{endpoint} accepts connections but answered nothing within {seconds:g}s; "
        "see whether the container runtime hangs (its log says more), and restart it",
        "DeadlineExceeded",
    )


def _check_file(endpoint: Endpoint) -> None:
    mode = Path(endpoint.path).stat().st_mode
    if not stat.S_ISSOCK(mode):
        kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise ConnectError(
            f"{endpoint} is {kind}, not a socket; set --container-runtime-endpoint to the runtime's socket",
            "FailedPrecondition",
        )


async def _check_http2(endpoint: Endpoint) -> None:
    reader, writer = await asyncio.open_unix_connection(endpoint.path)
    try:
        writer.write(_PREFACE + _EMPTY_SETTINGS)
        try:
            header = await reader.readexactly(_FRAME_HEADER.size)
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
            raise _not_grpc(endpoint) from None
        _, _, kind, _, stream = _FRAME_HEADER.unpack(header)
        if kind != _SETTINGS or stream != 0:
            raise _not_grpc(endpoint)
    finally:
        writer.close()


def _not_grpc(endpoint: Endpoint) -> ConnectError:
    return ConnectError(
        f"the program at {endpoint} does not speak gRPC; "
        "set --container-runtime-endpoint to a container runtime's socket",
        "FailedPrecondition",
    )


T = TypeVar("T")
CONNECT_TIMEOUT = Duration.from_seconds(10)
_OLD_RUNTIME_SERVICE = "/runtime.v1alpha2.RuntimeService/"
_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class RuntimeConnection:
    """Clients of a runtime that implements CRI v1; an async context manager that closes its connections."""

    runtime: RuntimeClient
    images: ImageClient
    stats: StatsClient
    version: pb.VersionResponse
    """The runtime's version at the time of the handshake."""
    channels: tuple[Channel, ...]
    """The runtime's channel, and the image service's if that is another endpoint."""

    @property
    def runtime_channel(self) -> Channel:
        """The runtime's channel, for other services on the same socket."""
        return self.channels[0]

    @property
    def image_channel(self) -> Channel:
        """The image service's channel, for other services on the same socket."""
        return self.channels[-1]

    async def close(self) -> None:
        """Close the connections; calls in progress fail with Unavailable."""
        for channel in self.channels:
            await channel.close()

    async def __aenter__(self) -> RuntimeConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def connect(
    endpoint: str,
    image_endpoint: str = "",
    *,
    timeout: Duration,
    metrics: CriMetrics,
    connect_timeout: Duration = CONNECT_TIMEOUT,
    stream_lists: bool = False,
    tracer: Tracer | None = None,
) -> RuntimeConnection:
    """Connect to a runtime and its image service (by default at the same endpoint).

    `timeout` is the deadline of ordinary calls later on, `connect_timeout` bounds this handshake.
    `stream_lists` uses streaming list calls if the runtime has them. With a `tracer`, calls are traced.

    Raises ConnectError (EndpointError for an endpoint that is not valid): one line with the cause and a
    remedy. Nothing stays open then.
    """
    endpoints = [_parse(endpoint)]
    if image_endpoint and (parsed_image := _parse(image_endpoint)).path != endpoints[0].path:
        endpoints.append(parsed_image)
    channels = tuple(Channel(parsed, metrics, tracer) for parsed in endpoints)
    runtime, images = channels[0], channels[-1]
    try:
        end = asyncio.get_running_loop().time() + connect_timeout.seconds
        version = await _call_until_ready(runtime, _agree_on_version, end, connect_timeout)
        await _call_until_ready(images, _check_images, end, connect_timeout)
    except BaseException:
        for channel in channels:
            await channel.close()
        raise
    log.v(2).info(
        "Connected to container runtime",
        endpoint=str(runtime.endpoint),
        imageEndpoint=str(images.endpoint),
        runtime=version.runtime_name,
        version=version.runtime_version,
        apiVersion=version.runtime_api_version,
    )
    return RuntimeConnection(
        runtime=RuntimeClient(runtime, timeout, stream_lists=stream_lists),
        images=ImageClient(images, timeout, stream_lists=stream_lists),
        stats=StatsClient(runtime, timeout, stream_lists=stream_lists),
        version=version,
        channels=channels,
    )


def _parse(text: str) -> Endpoint:
    endpoint = Endpoint.parse(text)
    if endpoint.deprecated:
        log.warning(
            "Container runtime endpoint without URL scheme is deprecated",
            endpoint=text,
            url=str(endpoint),
        )
    return endpoint


async def _call_until_ready(
    channel: Channel, call: Callable[[Channel], Awaitable[T]], end: float, limit: Duration
) -> T:
    """Call `call`, and retry while the runtime is starting, at most until `end`."""
    starting: CriError | None = None
    try:
        async with asyncio.timeout_at(end):
            while True:
                await probe(channel.endpoint)
                try:
                    return await call(channel)
                except ConnectError:
                    raise
                except CriError as err:
                    if not _is_starting(err):
                        raise ConnectError(
                            f"{channel.endpoint}: {err}; see the runtime's log", err.code
                        ) from None
                    starting = err
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        if starting is None:
            raise no_response_error(channel.endpoint, limit.seconds) from None
        raise ConnectError(
            f"{channel.endpoint} was not ready within {limit.seconds:g}s: {starting}; see the runtime's log",
            starting.code,
        ) from None


def _is_starting(err: CriError) -> bool:
    # containerd listens before its CRI plugin is ready, and reports that with the code Unknown.
    return isinstance(err, Unavailable) or "not initialized yet" in err.message


async def _agree_on_version(channel: Channel) -> pb.VersionResponse:
    try:
        found = await _query_version(channel, RUNTIME_SERVICE)
    except Unimplemented:
        raise await _unsupported_version(channel) from None
    if found.version != AGENT_API_VERSION:
        raise ConnectError(
            f"{_runtime_name(found)} at {channel.endpoint} expects version {found.version} of the agent, "
            f"this one is {AGENT_API_VERSION}; use a runtime made for CRI v1",
            "Unimplemented",
        )
    return found


async def _unsupported_version(channel: Channel) -> ConnectError:
    """Return the error for a runtime without CRI v1, after a query for v1alpha2."""
    try:
        found = await _query_version(channel, _OLD_RUNTIME_SERVICE)
    except (Unimplemented, BadResponse):
        return ConnectError(
            f"the program at {channel.endpoint} offers no CRI, neither v1 nor v1alpha2; "
            'if it is containerd, remove "cri" from disabled_plugins in its config.toml and restart it',
            "Unimplemented",
        )
    return ConnectError(
        f"{_runtime_name(found)} at {channel.endpoint} speaks CRI {found.runtime_api_version}, "
        "this agent only v1; "
        "upgrade the runtime (containerd 1.6 or CRI-O 1.23 are the oldest with v1)",
        "Unimplemented",
    )


async def _query_version(channel: Channel, service: str) -> pb.VersionResponse:
    request = pb.VersionRequest(version=AGENT_API_VERSION)
    # Both versions of CRI have the same messages for this call. The caller bounds the time.
    return await channel.call(
        service + "Version", request, pb.VersionResponse, timeout=FOREVER, check=checks.version
    )


async def _check_images(channel: Channel) -> None:
    try:
        await channel.call(
            IMAGE_SERVICE + "ImageFsInfo", pb.ImageFsInfoRequest(), pb.ImageFsInfoResponse, timeout=FOREVER
        )
    except Unimplemented:
        raise ConnectError(
            f"the program at {channel.endpoint} offers no CRI v1 image service; "
            "set --image-service-endpoint to one that does",
            "Unimplemented",
        ) from None


def _runtime_name(found: pb.VersionResponse) -> str:
    return f"{found.runtime_name} {found.runtime_version}"
