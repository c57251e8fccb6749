"""The handshake with a runtime: find it, agree on CRI v1, and say plainly why not.

Bounded in time as a whole. A runtime that is there but still starting is waited for; a socket that
is not there, or is something else, is an error at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from pykubelet.api.duration import Duration
from pykubelet.cri import checks
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import FOREVER, Channel
from pykubelet.cri.endpoint import Endpoint
from pykubelet.cri.errors import BadResponse, ConnectError, CriError, Unavailable, Unimplemented
from pykubelet.cri.images import ImageClient
from pykubelet.cri.metrics import CriMetrics
from pykubelet.cri.probe import probe, silent
from pykubelet.cri.runtime import AGENT_API_VERSION, RuntimeClient
from pykubelet.cri.service import IMAGE_SERVICE, RUNTIME_SERVICE
from pykubelet.cri.stats import StatsClient
from pykubelet.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT = Duration.of(10)
_OLD_RUNTIME_SERVICE = "/runtime.v1alpha2.RuntimeService/"
_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Cri:
    """A runtime that was found to speak CRI v1; an async context manager that closes itself."""

    runtime: RuntimeClient
    images: ImageClient
    stats: StatsClient
    version: pb.VersionResponse
    """Who the runtime said it is when we connected."""
    channels: tuple[Channel, ...]
    """The runtime's channel, and the image service's if that is another endpoint."""

    @property
    def runtime_channel(self) -> Channel:
        """The runtime's own connection, for services beside CRI on the same socket."""
        return self.channels[0]

    async def close(self) -> None:
        """End the connections; calls under way fail with Unavailable."""
        for channel in self.channels:
            await channel.close()

    async def __aenter__(self) -> Cri:
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
) -> Cri:
    """Connect to a runtime and its image service (by default at the same endpoint).

    `timeout` is the deadline of ordinary calls later on, `connect_timeout` bounds this handshake.
    `stream_lists` uses streams for lists where the runtime has them.

    Raises ConnectError (EndpointError for an endpoint that cannot be one): one line with the cause
    and a remedy. Nothing stays open then.
    """
    places = [_parse(endpoint)]
    if image_endpoint and (image_place := _parse(image_endpoint)).path != places[0].path:
        places.append(image_place)
    channels = tuple(Channel(place, metrics) for place in places)
    runtime, images = channels[0], channels[-1]
    try:
        end = asyncio.get_running_loop().time() + connect_timeout.seconds
        version = await _reach(runtime, _agree_on_version, end, connect_timeout)
        await _reach(images, _check_images, end, connect_timeout)
    except BaseException:
        for channel in channels:
            await channel.close()
        raise
    log.v(2).info(
        "Connected to the container runtime",
        endpoint=str(runtime.endpoint),
        imageEndpoint=str(images.endpoint),
        runtime=version.runtime_name,
        version=version.runtime_version,
        apiVersion=version.runtime_api_version,
    )
    return Cri(
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
            "A bare path as runtime endpoint is deprecated, write it as a URL",
            endpoint=text,
            url=str(endpoint),
        )
    return endpoint


async def _reach(channel: Channel, ask: Callable[[Channel], Awaitable[T]], end: float, limit: Duration) -> T:
    """Ask until there is an answer or it is clear that there will be none, at most until `end`."""
    starting: CriError | None = None
    try:
        async with asyncio.timeout_at(end):
            while True:
                await probe(channel.endpoint)
                try:
                    return await ask(channel)
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
            raise silent(channel.endpoint, limit.seconds) from None
        raise ConnectError(
            f"{channel.endpoint} was not ready within {limit.seconds:g}s: {starting}; see the runtime's log",
            starting.code,
        ) from None


def _is_starting(err: CriError) -> bool:
    # containerd listens before its CRI plugin is ready, and says so under the code Unknown.
    return isinstance(err, Unavailable) or "not initialized yet" in err.message


async def _agree_on_version(channel: Channel) -> pb.VersionResponse:
    try:
        found = await _ask_version(channel, RUNTIME_SERVICE)
    except Unimplemented:
        raise await _other_version(channel) from None
    if found.version != AGENT_API_VERSION:
        raise ConnectError(
            f"{_who(found)} at {channel.endpoint} expects version {found.version} of the agent, "
            f"this one is {AGENT_API_VERSION}; use a runtime made for CRI v1",
            "Unimplemented",
        )
    return found


async def _other_version(channel: Channel) -> ConnectError:
    """Find out what a runtime that does not know CRI v1 speaks instead."""
    try:
        found = await _ask_version(channel, _OLD_RUNTIME_SERVICE)
    except (Unimplemented, BadResponse):
        return ConnectError(
            f"the program at {channel.endpoint} offers no CRI, neither v1 nor v1alpha2; "
            'if it is containerd, remove "cri" from disabled_plugins in its config.toml and restart it',
            "Unimplemented",
        )
    return ConnectError(
        f"{_who(found)} at {channel.endpoint} speaks CRI {found.runtime_api_version}, this agent only v1; "
        "upgrade the runtime (containerd 1.6 or CRI-O 1.23 are the oldest with v1)",
        "Unimplemented",
    )


async def _ask_version(channel: Channel, service: str) -> pb.VersionResponse:
    request = pb.VersionRequest(version=AGENT_API_VERSION)
    # Both versions of the protocol have the same messages here. The caller bounds the time.
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


def _who(found: pb.VersionResponse) -> str:
    return f"{found.runtime_name} {found.runtime_version}"
