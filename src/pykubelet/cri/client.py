"""Typed clients of the CRI services: runtime, statistics and images, with deadlines and response validation.

Every call ends within the configured request timeout, except for these:

| call | deadline |
|---|---|
| RunPodSandbox | twice the request timeout: CNI plugins run inside it |
| StopContainer | the grace period plus the request timeout |
| ExecSync | the command's timeout plus the request timeout; none without a command timeout |
| CheckpointContainer | its own timeout if that is longer |
| PullImage, GetContainerEvents | none |

All methods raise CriError. Operation names in the metrics are upstream's, so that dashboards keep working.

A streamed list has no size limit. It is used with the `CRIListStreaming` feature gate, and disabled for the
rest of the connection if the runtime does not implement it.

The kubelet decides from these responses what to start and what to kill, so a response without a name or an id
is rejected on receipt. Each validation function returns what is missing, or "".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from time import perf_counter
from typing import ClassVar, TypeVar

import msgspec
from google.protobuf.message import Message

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import FOREVER, Channel, Check, Response
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CommandTimedOut, DeadlineExceeded, Unimplemented

log = get_logger(__name__)
Item = TypeVar("Item")
RUNTIME_SERVICE = "/runtime.v1.RuntimeService/"
IMAGE_SERVICE = "/runtime.v1.ImageService/"


class Service:
    """Base of the typed clients; `timeout` is the configured runtime request timeout."""

    path: ClassVar[str]

    def __init__(self, channel: Channel, timeout: Duration, *, stream_lists: bool = False) -> None:
        self._channel = channel
        self._timeout = timeout.seconds
        self._stream_lists = stream_lists
        self._unary_connection = -1
        """Number of the connection on which the runtime did not implement streamed lists."""

    async def _call(
        self,
        method: str,
        operation: str,
        request: Message,
        response_type: type[Response],
        *,
        timeout: float | None = None,
        check: Check[Response] | None = None,
    ) -> Response:
        return await self._channel.call(
            self.path + method,
            request,
            response_type,
            timeout=self._timeout if timeout is None else timeout,
            operation=operation,
            check=check,
        )

    def _stream(
        self,
        method: str,
        operation: str,
        request: Message,
        response_type: type[Response],
        *,
        timeout: float | None = None,
    ) -> AsyncGenerator[Response, None]:
        return self._channel.stream(
            self.path + method,
            request,
            response_type,
            timeout=self._timeout if timeout is None else timeout,
            operation=operation,
        )

    @property
    def _streaming(self) -> bool:
        """Whether lists are streamed; each new connection is tried, since the runtime may be a newer one."""
        return self._stream_lists and self._unary_connection != self._channel.connects

    @contextmanager
    def _fall_back(self) -> Iterator[None]:
        """Suppress Unimplemented and disable streaming, so that the caller continues with a unary list."""
        try:
            yield
        except Unimplemented as err:
            self._unary_connection = self._channel.connects
            log.info("Container runtime does not implement streaming lists, using unary lists", call=err.call)


async def flatten(
    parts: AsyncGenerator[Response, None], pick: Callable[[Response], Iterable[Item]]
) -> AsyncGenerator[Item, None]:
    """Yield the items of every part of a streamed list."""
    async with aclosing(parts):
        async for part in parts:
            for item in pick(part):
                yield item


class StatsClient(Service):
    """Statistics and metrics of sandboxes and containers. All methods raise CriError."""

    path = RUNTIME_SERVICE

    async def container_stats(self, container_id: str) -> pb.ContainerStats:
        """Return the CPU, memory and disk usage of a container."""
        request = pb.ContainerStatsRequest(container_id=container_id)
        return (
            await self._call("ContainerStats", "container_stats", request, pb.ContainerStatsResponse)
        ).stats

    async def list_container_stats(
        self, filter: pb.ContainerStatsFilter | None = None
    ) -> list[pb.ContainerStats]:
        """Return the usage of all running containers that match the filter."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_container_stats(filter)]
        request = pb.ListContainerStatsRequest(filter=filter)
        response = await self._call(
            "ListContainerStats", "list_container_stats", request, pb.ListContainerStatsResponse
        )
        return list(response.stats)

    def stream_container_stats(
        self, filter: pb.ContainerStatsFilter | None = None
    ) -> AsyncGenerator[pb.ContainerStats, None]:
        """Yield the usage of containers one by one, without a size limit."""
        request = pb.StreamContainerStatsRequest(filter=filter)
        parts = self._stream(
            "StreamContainerStats", "list_container_stats", request, pb.StreamContainerStatsResponse
        )
        return flatten(parts, lambda part: part.container_stats)

    async def pod_sandbox_stats(self, sandbox_id: str) -> pb.PodSandboxStats:
        """Return the usage of a pod, including its network."""
        request = pb.PodSandboxStatsRequest(pod_sandbox_id=sandbox_id)
        return (
            await self._call("PodSandboxStats", "podsandbox_stats", request, pb.PodSandboxStatsResponse)
        ).stats

    async def list_pod_sandbox_stats(
        self, filter: pb.PodSandboxStatsFilter | None = None
    ) -> list[pb.PodSandboxStats]:
        """Return the usage of all pods that match the filter."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_pod_sandbox_stats(filter)]
        request = pb.ListPodSandboxStatsRequest(filter=filter)
        response = await self._call(
            "ListPodSandboxStats", "list_podsandbox_stats", request, pb.ListPodSandboxStatsResponse
        )
        return list(response.stats)

    def stream_pod_sandbox_stats(
        self, filter: pb.PodSandboxStatsFilter | None = None
    ) -> AsyncGenerator[pb.PodSandboxStats, None]:
        """Yield the usage of pods one by one, without a size limit."""
        request = pb.StreamPodSandboxStatsRequest(filter=filter)
        parts = self._stream(
            "StreamPodSandboxStats", "list_podsandbox_stats", request, pb.StreamPodSandboxStatsResponse
        )
        return flatten(parts, lambda part: part.pod_sandbox_stats)

    async def list_metric_descriptors(self) -> list[pb.MetricDescriptor]:
        """Return the descriptors of the metrics of `list_pod_sandbox_metrics`."""
        response = await self._call(
            "ListMetricDescriptors",
            "list_metric_descriptors",
            pb.ListMetricDescriptorsRequest(),
            pb.ListMetricDescriptorsResponse,
        )
        return list(response.descriptors)

    async def list_pod_sandbox_metrics(self) -> list[pb.PodSandboxMetrics]:
        """Return the metrics of all pods, for the metrics endpoint."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_pod_sandbox_metrics()]
        response = await self._call(
            "ListPodSandboxMetrics",
            "list_podsandbox_metrics",
            pb.ListPodSandboxMetricsRequest(),
            pb.ListPodSandboxMetricsResponse,
        )
        return list(response.pod_metrics)

    def stream_pod_sandbox_metrics(self) -> AsyncGenerator[pb.PodSandboxMetrics, None]:
        """Yield the metrics of pods one by one, without a size limit."""
        parts = self._stream(
            "StreamPodSandboxMetrics",
            "list_podsandbox_metrics",
            pb.StreamPodSandboxMetricsRequest(),
            pb.StreamPodSandboxMetricsResponse,
        )
        return flatten(parts, lambda part: part.pod_sandbox_metrics)


def version(response: pb.VersionResponse) -> str:
    """Validate that all four fields are set."""
    fields = ("version", "runtime_name", "runtime_version", "runtime_api_version")
    return _missing({field: getattr(response, field) for field in fields})


def status(response: pb.StatusResponse) -> str:
    """Validate that there are at least two conditions, RuntimeReady and NetworkReady."""
    if len(response.status.conditions) < 2:
        return "the RuntimeReady or the NetworkReady condition is not set"
    return ""


def sandbox_status(response: pb.PodSandboxStatusResponse) -> str:
    """Validate that a sandbox has its id, pod and creation time."""
    if not response.HasField("status"):
        return ""
    sandbox = response.status
    return _missing(
        {
            "status.id": sandbox.id,
            "status.metadata.name": sandbox.metadata.name,
            "status.metadata.namespace": sandbox.metadata.namespace,
            "status.metadata.uid": sandbox.metadata.uid,
            "status.created_at": sandbox.created_at,
        }
    )


def container_status(response: pb.ContainerStatusResponse) -> str:
    """Validate that a container has its id, name, creation time and image."""
    if not response.HasField("status"):
        return ""
    container = response.status
    return _missing(
        {
            "status.id": container.id,
            "status.metadata.name": container.metadata.name,
            "status.created_at": container.created_at,
            "status.image.image": container.image.image,
            "status.image_ref": container.image_ref,
        }
    )


def image_status(response: pb.ImageStatusResponse) -> str:
    """Validate that an image, if there is one, has its id and size."""
    if not response.HasField("image"):
        return ""
    return _missing({"image.id": response.image.id, "image.size": response.image.size})


def sandbox_id(response: pb.RunPodSandboxResponse) -> str:
    """Validate that a created sandbox has an id."""
    return _missing({"pod_sandbox_id": response.pod_sandbox_id})


def container_id(response: pb.CreateContainerResponse) -> str:
    """Validate that a created container has an id."""
    return _missing({"container_id": response.container_id})


def image_ref(response: pb.PullImageResponse) -> str:
    """Validate that a pulled image has a reference."""
    return _missing({"image_ref": response.image_ref})


def url(response: pb.ExecResponse | pb.AttachResponse | pb.PortForwardResponse) -> str:
    """Validate that a prepared stream has a URL."""
    return _missing({"url": response.url})


def info_field(
    response: pb.StatusResponse | pb.PodSandboxStatusResponse | pb.ContainerStatusResponse,
    key: str,
    name: str,
) -> str:
    """Return a text field of the JSON object `key` in a verbose response; empty if it has none.

    What runtimes report there is not specified, so anything else than expected counts as none.
    """
    try:
        fields = msgspec.json.decode(response.info.get(key) or "{}", type=dict[str, msgspec.Raw])
        return msgspec.json.decode(fields[name], type=str) if name in fields else ""
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return ""


def _missing(fields: dict[str, str | int]) -> str:
    names = [name for name, value in fields.items() if not value]
    return f"not set: {', '.join(names)}" if names else ""


AGENT_API_VERSION = "0.1.0"
"""Version of the kubelet's side of CRI; it has never changed."""


class RuntimeClient(Service):
    """Sandboxes and containers of a runtime."""

    path = RUNTIME_SERVICE

    # The runtime itself

    async def version(self) -> pb.VersionResponse:
        """Return the runtime's name and version."""
        request = pb.VersionRequest(version=AGENT_API_VERSION)
        return await self._call("Version", "version", request, pb.VersionResponse, check=version)

    async def status(self, *, verbose: bool = False) -> pb.StatusResponse:
        """Return whether runtime and network are ready, and the features of the runtime handlers."""
        request = pb.StatusRequest(verbose=verbose)
        return await self._call("Status", "status", request, pb.StatusResponse, check=status)

    async def runtime_config(self) -> pb.RuntimeConfigResponse:
        """Return the settings that the kubelet should adopt: the cgroup driver."""
        return await self._call(
            "RuntimeConfig", "runtime_config", pb.RuntimeConfigRequest(), pb.RuntimeConfigResponse
        )

    async def update_runtime_config(self, config: pb.RuntimeConfig) -> None:
        """Send the node's pod CIDR to the runtime."""
        request = pb.UpdateRuntimeConfigRequest(runtime_config=config)
        await self._call(
            "UpdateRuntimeConfig", "update_runtime_config", request, pb.UpdateRuntimeConfigResponse
        )

    # Sandboxes

    async def run_pod_sandbox(self, config: pb.PodSandboxConfig, handler: str = "") -> str:
        """Create and start a pod's sandbox with its network, and return its id."""
        started, failed = perf_counter(), True
        try:
            response = await self._call(
                "RunPodSandbox",
                "run_podsandbox",
                pb.RunPodSandboxRequest(config=config, runtime_handler=handler),
                pb.RunPodSandboxResponse,
                timeout=self._timeout * 2,
                check=sandbox_id,
            )
            failed = False
            return response.pod_sandbox_id
        finally:
            self._channel.metrics.observe_sandbox(handler, perf_counter() - started, failed=failed)

    async def stop_pod_sandbox(self, sandbox_id: str) -> None:
        """Stop a sandbox and all its containers; idempotent."""
        request = pb.StopPodSandboxRequest(pod_sandbox_id=sandbox_id)
        await self._call("StopPodSandbox", "stop_podsandbox", request, pb.StopPodSandboxResponse)

    async def remove_pod_sandbox(self, sandbox_id: str) -> None:
        """Remove a sandbox and all its containers; idempotent."""
        request = pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id)
        await self._call("RemovePodSandbox", "remove_podsandbox", request, pb.RemovePodSandboxResponse)

    async def pod_sandbox_status(
        self, sandbox_id: str, *, verbose: bool = False
    ) -> pb.PodSandboxStatusResponse:
        """Return the state and addresses of a sandbox."""
        return await self._call(
            "PodSandboxStatus",
            "podsandbox_status",
            pb.PodSandboxStatusRequest(pod_sandbox_id=sandbox_id, verbose=verbose),
            pb.PodSandboxStatusResponse,
            check=sandbox_status,
        )

    async def list_pod_sandbox(self, filter: pb.PodSandboxFilter | None = None) -> list[pb.PodSandbox]:
        """Return the sandboxes that match the filter, or all."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_pod_sandboxes(filter)]
        request = pb.ListPodSandboxRequest(filter=filter)
        response = await self._call("ListPodSandbox", "list_podsandbox", request, pb.ListPodSandboxResponse)
        return list(response.items)

    def stream_pod_sandboxes(
        self, filter: pb.PodSandboxFilter | None = None
    ) -> AsyncGenerator[pb.PodSandbox, None]:
        """Yield sandboxes one by one, without a size limit."""
        request = pb.StreamPodSandboxesRequest(filter=filter)
        parts = self._stream("StreamPodSandboxes", "list_podsandbox", request, pb.StreamPodSandboxesResponse)
        return flatten(parts, lambda part: part.pod_sandboxes)

    async def update_pod_sandbox_resources(
        self,
        sandbox_id: str,
        *,
        overhead: pb.LinuxContainerResources | None = None,
        resources: pb.LinuxContainerResources | None = None,
    ) -> None:
        """Notify the runtime of the pod's changed resources."""
        request = pb.UpdatePodSandboxResourcesRequest(
            pod_sandbox_id=sandbox_id, overhead=overhead, resources=resources
        )
        await self._call(
            "UpdatePodSandboxResources",
            "update_podsandbox_resources",
            request,
            pb.UpdatePodSandboxResourcesResponse,
        )

    # Containers

    async def create_container(
        self, sandbox_id: str, config: pb.ContainerConfig, sandbox_config: pb.PodSandboxConfig
    ) -> str:
        """Create a container in a sandbox, without starting it, and return its id."""
        request = pb.CreateContainerRequest(
            pod_sandbox_id=sandbox_id, config=config, sandbox_config=sandbox_config
        )
        response = await self._call(
            "CreateContainer",
            "create_container",
            request,
            pb.CreateContainerResponse,
            check=container_id,
        )
        return response.container_id

    async def start_container(self, container_id: str) -> None:
        """Start a created container."""
        request = pb.StartContainerRequest(container_id=container_id)
        await self._call("StartContainer", "start_container", request, pb.StartContainerResponse)

    async def stop_container(self, container_id: str, grace_seconds: int) -> None:
        """Stop a container, with SIGKILL after the grace period, and return when it has exited."""
        await self._call(
            "StopContainer",
            "stop_container",
            pb.StopContainerRequest(container_id=container_id, timeout=grace_seconds),
            pb.StopContainerResponse,
            timeout=self._timeout + grace_seconds,
        )

    async def remove_container(self, container_id: str) -> None:
        """Remove a container, killing it if it runs; idempotent."""
        request = pb.RemoveContainerRequest(container_id=container_id)
        await self._call("RemoveContainer", "remove_container", request, pb.RemoveContainerResponse)

    async def container_status(
        self, container_id: str, *, verbose: bool = False
    ) -> pb.ContainerStatusResponse:
        """Return the state of a container."""
        return await self._call(
            "ContainerStatus",
            "container_status",
            pb.ContainerStatusRequest(container_id=container_id, verbose=verbose),
            pb.ContainerStatusResponse,
            check=container_status,
        )

    async def list_containers(self, filter: pb.ContainerFilter | None = None) -> list[pb.Container]:
        """Return the containers that match the filter, or all."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_containers(filter)]
        request = pb.ListContainersRequest(filter=filter)
        response = await self._call("ListContainers", "list_containers", request, pb.ListContainersResponse)
        return list(response.containers)

    def stream_containers(
        self, filter: pb.ContainerFilter | None = None
    ) -> AsyncGenerator[pb.Container, None]:
        """Yield containers one by one, without a size limit."""
        request = pb.StreamContainersRequest(filter=filter)
        parts = self._stream("StreamContainers", "list_containers", request, pb.StreamContainersResponse)
        return flatten(parts, lambda part: part.containers)

    async def update_container_resources(self, container_id: str, linux: pb.LinuxContainerResources) -> None:
        """Change the cgroup limits of a running container."""
        request = pb.UpdateContainerResourcesRequest(container_id=container_id, linux=linux)
        await self._call(
            "UpdateContainerResources", "update_container", request, pb.UpdateContainerResourcesResponse
        )

    async def reopen_container_log(self, container_id: str) -> None:
        """Reopen the container's log file, after the old one was renamed."""
        request = pb.ReopenContainerLogRequest(container_id=container_id)
        await self._call("ReopenContainerLog", "reopen_container_log", request, pb.ReopenContainerLogResponse)

    async def checkpoint_container(self, container_id: str, location: str, timeout_seconds: int = 0) -> None:
        """Write a checkpoint of a container to `location`, within the longer of both timeouts."""
        if timeout_seconds < 0:
            raise ValueError(f"a checkpoint's timeout cannot be negative, got {timeout_seconds}")
        seconds = max(timeout_seconds, int(self._timeout))
        await self._call(
            "CheckpointContainer",
            "checkpoint_container",
            pb.CheckpointContainerRequest(container_id=container_id, location=location, timeout=seconds),
            pb.CheckpointContainerResponse,
            timeout=max(timeout_seconds, self._timeout),
        )

    def container_events(self) -> AsyncGenerator[pb.ContainerEventResponse, None]:
        """Yield every event of every container, until the connection breaks or the runtime exits.

        The first iteration raises Unimplemented if the runtime has no such stream. Close the iterator
        (`contextlib.aclosing`) when leaving it early.
        """
        return self._stream(
            "GetContainerEvents",
            "get_container_events",
            pb.GetEventsRequest(),
            pb.ContainerEventResponse,
            timeout=FOREVER,
        )

    # Commands and streams

    async def exec_sync(
        self, container_id: str, command: Sequence[str], timeout_seconds: int = 0
    ) -> pb.ExecSyncResponse:
        """Run a command in a container and return its output and exit code; a non-zero code is not an error.

        Raises CommandTimedOut if it takes longer than `timeout_seconds` (0: no timeout).
        """
        try:
            return await self._call(
                "ExecSync",
                "exec_sync",
                pb.ExecSyncRequest(container_id=container_id, cmd=command, timeout=timeout_seconds),
                pb.ExecSyncResponse,
                timeout=self._timeout + timeout_seconds if timeout_seconds else FOREVER,
            )
        except DeadlineExceeded as err:
            raise CommandTimedOut(command, timeout_seconds, err.message) from None

    async def exec(self, request: pb.ExecRequest) -> str:
        """Prepare a streaming exec session and return its URL."""
        return (await self._call("Exec", "exec", request, pb.ExecResponse, check=url)).url

    async def attach(self, request: pb.AttachRequest) -> str:
        """Prepare a streaming attach session and return its URL."""
        return (await self._call("Attach", "attach", request, pb.AttachResponse, check=url)).url

    async def port_forward(self, request: pb.PortForwardRequest) -> str:
        """Prepare a port-forward session to a sandbox and return its URL."""
        return (
            await self._call("PortForward", "port_forward", request, pb.PortForwardResponse, check=url)
        ).url


class ImageClient(Service):
    """Images of a runtime."""

    path = IMAGE_SERVICE

    async def list_images(self, filter: pb.ImageFilter | None = None) -> list[pb.Image]:
        """Return the images that match the filter, or all."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_images(filter)]
        request = pb.ListImagesRequest(filter=filter)
        return list((await self._call("ListImages", "list_images", request, pb.ListImagesResponse)).images)

    def stream_images(self, filter: pb.ImageFilter | None = None) -> AsyncGenerator[pb.Image, None]:
        """Yield images one by one, without a size limit."""
        request = pb.StreamImagesRequest(filter=filter)
        parts = self._stream("StreamImages", "list_images", request, pb.StreamImagesResponse)
        return flatten(parts, lambda part: part.images)

    async def image_status(self, image: pb.ImageSpec, *, verbose: bool = False) -> pb.ImageStatusResponse:
        """Return the status of an image; `image` of the response is unset if the runtime does not have it."""
        request = pb.ImageStatusRequest(image=image, verbose=verbose)
        return await self._call(
            "ImageStatus", "image_status", request, pb.ImageStatusResponse, check=image_status
        )

    async def pull_image(
        self,
        image: pb.ImageSpec,
        auth: pb.AuthConfig | None = None,
        sandbox_config: pb.PodSandboxConfig | None = None,
    ) -> str:
        """Pull an image, without a deadline, and return the runtime's reference to it."""
        response = await self._call(
            "PullImage",
            "pull_image",
            pb.PullImageRequest(image=image, auth=auth, sandbox_config=sandbox_config),
            pb.PullImageResponse,
            timeout=FOREVER,
            check=image_ref,
        )
        return response.image_ref

    async def remove_image(self, image: pb.ImageSpec) -> None:
        """Remove an image; idempotent."""
        request = pb.RemoveImageRequest(image=image)
        await self._call("RemoveImage", "remove_image", request, pb.RemoveImageResponse)

    async def image_fs_info(self) -> pb.ImageFsInfoResponse:
        """Return the filesystems of images and containers, and their usage."""
        return await self._call(
            "ImageFsInfo", "image_fs_info", pb.ImageFsInfoRequest(), pb.ImageFsInfoResponse
        )
