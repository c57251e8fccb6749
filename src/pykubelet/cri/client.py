"""The runtime service: sandboxes and containers, as typed methods with their deadlines.

Every call ends within the configured request timeout, except for those that wait for something
the runtime has no say in:

| call | deadline |
|---|---|
| starting a sandbox | twice the request timeout: the network's plugins run inside it |
| stopping a container | its grace period and then the request timeout |
| a command (`exec_sync`) | the command's own timeout and then the request timeout; none if it has none |
| a checkpoint | its own timeout if that is longer |
| container events | none: the stream is meant to last |

All methods raise CriError. Operation names are the reference's, so dashboards keep working.

The image service. Every call ends within the request timeout but a pull, which has no deadline.

All methods raise CriError.

Resource use and metrics as the runtime measures them; part of the runtime service.

What the clients of the CRI services have in common: a channel, a deadline, and how to list.

Newer runtimes can answer a list as a stream, which has no limit of size. It is used when the
agent's `CRIListStreaming` gate is on, and given up for good at the first runtime that lacks it.

Answers that no runtime should give: each check says what is missing, or nothing.

The agent decides from these answers what to start and what to kill, so an answer without a name or
an id is refused where it arrives instead of being misread later.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from time import perf_counter
from typing import ClassVar, TypeVar

from google.protobuf.message import Message

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import FOREVER, Answer, Channel, Check
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CommandTimedOut, DeadlineExceeded, Unimplemented

log = get_logger(__name__)
Item = TypeVar("Item")
RUNTIME_SERVICE = "/runtime.v1.RuntimeService/"
IMAGE_SERVICE = "/runtime.v1.ImageService/"


class Service:
    """The base of the typed clients; `timeout` is the configured runtime request timeout."""

    path: ClassVar[str]

    def __init__(self, channel: Channel, timeout: Duration, *, stream_lists: bool = False) -> None:
        self._channel = channel
        self._timeout = timeout.seconds
        self._streaming = stream_lists

    async def _call(
        self,
        method: str,
        operation: str,
        request: Message,
        answer: type[Answer],
        *,
        timeout: float | None = None,
        check: Check[Answer] | None = None,
    ) -> Answer:
        return await self._channel.call(
            self.path + method,
            request,
            answer,
            timeout=self._timeout if timeout is None else timeout,
            operation=operation,
            check=check,
        )

    def _stream(
        self,
        method: str,
        operation: str,
        request: Message,
        answer: type[Answer],
        *,
        timeout: float | None = None,
    ) -> AsyncGenerator[Answer, None]:
        return self._channel.stream(
            self.path + method,
            request,
            answer,
            timeout=self._timeout if timeout is None else timeout,
            operation=operation,
        )

    @contextmanager
    def _fall_back(self) -> Iterator[None]:
        """Let the caller list the old way when the runtime cannot stream."""
        try:
            yield
        except Unimplemented as err:
            self._streaming = False
            log.info("The runtime cannot stream lists, using plain lists", call=err.call)


async def flatten(
    parts: AsyncGenerator[Answer, None], pick: Callable[[Answer], Iterable[Item]]
) -> AsyncGenerator[Item, None]:
    """Yield the items of every part of a streamed list."""
    async with aclosing(parts):
        async for part in parts:
            for item in pick(part):
                yield item


class StatsClient(Service):
    """Statistics of one runtime's sandboxes and containers. All methods raise CriError."""

    path = RUNTIME_SERVICE

    async def container_stats(self, container_id: str) -> pb.ContainerStats:
        """Ask for one container's use of cpu, memory and disk."""
        request = pb.ContainerStatsRequest(container_id=container_id)
        return (
            await self._call("ContainerStats", "container_stats", request, pb.ContainerStatsResponse)
        ).stats

    async def list_container_stats(
        self, filter: pb.ContainerStatsFilter | None = None
    ) -> list[pb.ContainerStats]:
        """Ask for the use of all running containers that the filter selects."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_container_stats(filter)]
        request = pb.ListContainerStatsRequest(filter=filter)
        answer = await self._call(
            "ListContainerStats", "list_container_stats", request, pb.ListContainerStatsResponse
        )
        return list(answer.stats)

    def stream_container_stats(
        self, filter: pb.ContainerStatsFilter | None = None
    ) -> AsyncGenerator[pb.ContainerStats, None]:
        """List the use of containers one by one, which has no limit of size."""
        request = pb.StreamContainerStatsRequest(filter=filter)
        parts = self._stream(
            "StreamContainerStats", "list_container_stats", request, pb.StreamContainerStatsResponse
        )
        return flatten(parts, lambda part: part.container_stats)

    async def pod_sandbox_stats(self, sandbox_id: str) -> pb.PodSandboxStats:
        """Ask for one pod's use, its network included."""
        request = pb.PodSandboxStatsRequest(pod_sandbox_id=sandbox_id)
        return (
            await self._call("PodSandboxStats", "podsandbox_stats", request, pb.PodSandboxStatsResponse)
        ).stats

    async def list_pod_sandbox_stats(
        self, filter: pb.PodSandboxStatsFilter | None = None
    ) -> list[pb.PodSandboxStats]:
        """Ask for the use of all pods that the filter selects."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_pod_sandbox_stats(filter)]
        request = pb.ListPodSandboxStatsRequest(filter=filter)
        answer = await self._call(
            "ListPodSandboxStats", "list_podsandbox_stats", request, pb.ListPodSandboxStatsResponse
        )
        return list(answer.stats)

    def stream_pod_sandbox_stats(
        self, filter: pb.PodSandboxStatsFilter | None = None
    ) -> AsyncGenerator[pb.PodSandboxStats, None]:
        """List the use of pods one by one, which has no limit of size."""
        request = pb.StreamPodSandboxStatsRequest(filter=filter)
        parts = self._stream(
            "StreamPodSandboxStats", "list_podsandbox_stats", request, pb.StreamPodSandboxStatsResponse
        )
        return flatten(parts, lambda part: part.pod_sandbox_stats)

    async def list_metric_descriptors(self) -> list[pb.MetricDescriptor]:
        """Ask which metrics `list_pod_sandbox_metrics` will hold."""
        answer = await self._call(
            "ListMetricDescriptors",
            "list_metric_descriptors",
            pb.ListMetricDescriptorsRequest(),
            pb.ListMetricDescriptorsResponse,
        )
        return list(answer.descriptors)

    async def list_pod_sandbox_metrics(self) -> list[pb.PodSandboxMetrics]:
        """Ask for all pods' metrics, as the metrics endpoint will show them."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_pod_sandbox_metrics()]
        answer = await self._call(
            "ListPodSandboxMetrics",
            "list_podsandbox_metrics",
            pb.ListPodSandboxMetricsRequest(),
            pb.ListPodSandboxMetricsResponse,
        )
        return list(answer.pod_metrics)

    def stream_pod_sandbox_metrics(self) -> AsyncGenerator[pb.PodSandboxMetrics, None]:
        """List pods' metrics one by one, which has no limit of size."""
        parts = self._stream(
            "StreamPodSandboxMetrics",
            "list_podsandbox_metrics",
            pb.StreamPodSandboxMetricsRequest(),
            pb.StreamPodSandboxMetricsResponse,
        )
        return flatten(parts, lambda part: part.pod_sandbox_metrics)


def version(answer: pb.VersionResponse) -> str:
    """All four fields are required."""
    fields = ("version", "runtime_name", "runtime_version", "runtime_api_version")
    return _missing({field: getattr(answer, field) for field in fields})


def status(answer: pb.StatusResponse) -> str:
    """RuntimeReady and NetworkReady are both required."""
    if len(answer.status.conditions) < 2:
        return "the RuntimeReady or the NetworkReady condition is not set"
    return ""


def sandbox_status(answer: pb.PodSandboxStatusResponse) -> str:
    """A sandbox must say which pod it belongs to."""
    if not answer.HasField("status"):
        return ""
    it = answer.status
    return _missing(
        {
            "status.id": it.id,
            "status.metadata.name": it.metadata.name,
            "status.metadata.namespace": it.metadata.namespace,
            "status.metadata.uid": it.metadata.uid,
            "status.created_at": it.created_at,
        }
    )


def container_status(answer: pb.ContainerStatusResponse) -> str:
    """A container must say its name and its image."""
    if not answer.HasField("status"):
        return ""
    it = answer.status
    return _missing(
        {
            "status.id": it.id,
            "status.metadata.name": it.metadata.name,
            "status.created_at": it.created_at,
            "status.image.image": it.image.image,
            "status.image_ref": it.image_ref,
        }
    )


def image_status(answer: pb.ImageStatusResponse) -> str:
    """No image at all is a valid answer; half an image is not."""
    if not answer.HasField("image"):
        return ""
    return _missing({"image.id": answer.image.id, "image.size": answer.image.size})


def sandbox_id(answer: pb.RunPodSandboxResponse) -> str:
    """A sandbox that was made has an id."""
    return _missing({"pod_sandbox_id": answer.pod_sandbox_id})


def container_id(answer: pb.CreateContainerResponse) -> str:
    """A container that was made has an id."""
    return _missing({"container_id": answer.container_id})


def image_ref(answer: pb.PullImageResponse) -> str:
    """An image that was pulled has a reference."""
    return _missing({"image_ref": answer.image_ref})


def url(answer: pb.ExecResponse | pb.AttachResponse | pb.PortForwardResponse) -> str:
    """A stream that was prepared has an address."""
    return _missing({"url": answer.url})


def _missing(fields: dict[str, str | int]) -> str:
    names = [name for name, value in fields.items() if not value]
    return f"not set: {', '.join(names)}" if names else ""


AGENT_API_VERSION = "0.1.0"
"""What agent and runtime call the agent's side of the protocol; it never changed."""


class RuntimeClient(Service):
    """Sandboxes and containers of one runtime."""

    path = RUNTIME_SERVICE

    # The runtime itself

    async def version(self) -> pb.VersionResponse:
        """Ask who the runtime is."""
        request = pb.VersionRequest(version=AGENT_API_VERSION)
        return await self._call("Version", "version", request, pb.VersionResponse, check=version)

    async def status(self, *, verbose: bool = False) -> pb.StatusResponse:
        """Ask whether runtime and network are ready, and what the runtime's handlers can do."""
        request = pb.StatusRequest(verbose=verbose)
        return await self._call("Status", "status", request, pb.StatusResponse, check=status)

    async def runtime_config(self) -> pb.RuntimeConfigResponse:
        """Ask for the settings that the agent should follow: the cgroup driver."""
        return await self._call(
            "RuntimeConfig", "runtime_config", pb.RuntimeConfigRequest(), pb.RuntimeConfigResponse
        )

    async def update_runtime_config(self, config: pb.RuntimeConfig) -> None:
        """Tell the runtime the node's pod CIDR."""
        request = pb.UpdateRuntimeConfigRequest(runtime_config=config)
        await self._call(
            "UpdateRuntimeConfig", "update_runtime_config", request, pb.UpdateRuntimeConfigResponse
        )

    # Sandboxes

    async def run_pod_sandbox(self, config: pb.PodSandboxConfig, handler: str = "") -> str:
        """Make a pod's sandbox, with its network, and return its id."""
        started, failed = perf_counter(), True
        try:
            answer = await self._call(
                "RunPodSandbox",
                "run_podsandbox",
                pb.RunPodSandboxRequest(config=config, runtime_handler=handler),
                pb.RunPodSandboxResponse,
                timeout=self._timeout * 2,
                check=sandbox_id,
            )
            failed = False
            return answer.pod_sandbox_id
        finally:
            self._channel.metrics.observe_sandbox(handler, perf_counter() - started, failed=failed)

    async def stop_pod_sandbox(self, sandbox_id: str) -> None:
        """Stop a sandbox and all its containers; stopping twice is fine."""
        request = pb.StopPodSandboxRequest(pod_sandbox_id=sandbox_id)
        await self._call("StopPodSandbox", "stop_podsandbox", request, pb.StopPodSandboxResponse)

    async def remove_pod_sandbox(self, sandbox_id: str) -> None:
        """Remove a sandbox and all its containers; removing twice is fine."""
        request = pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id)
        await self._call("RemovePodSandbox", "remove_podsandbox", request, pb.RemovePodSandboxResponse)

    async def pod_sandbox_status(
        self, sandbox_id: str, *, verbose: bool = False
    ) -> pb.PodSandboxStatusResponse:
        """Ask for a sandbox's state and addresses."""
        return await self._call(
            "PodSandboxStatus",
            "podsandbox_status",
            pb.PodSandboxStatusRequest(pod_sandbox_id=sandbox_id, verbose=verbose),
            pb.PodSandboxStatusResponse,
            check=sandbox_status,
        )

    async def list_pod_sandbox(self, filter: pb.PodSandboxFilter | None = None) -> list[pb.PodSandbox]:
        """List sandboxes, all of them without a filter."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_pod_sandboxes(filter)]
        request = pb.ListPodSandboxRequest(filter=filter)
        answer = await self._call("ListPodSandbox", "list_podsandbox", request, pb.ListPodSandboxResponse)
        return list(answer.items)

    def stream_pod_sandboxes(
        self, filter: pb.PodSandboxFilter | None = None
    ) -> AsyncGenerator[pb.PodSandbox, None]:
        """List sandboxes one by one, which has no limit of size."""
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
        """Tell the runtime that the pod's resources changed."""
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
        """Make a container in a sandbox and return its id; it does not run yet."""
        request = pb.CreateContainerRequest(
            pod_sandbox_id=sandbox_id, config=config, sandbox_config=sandbox_config
        )
        answer = await self._call(
            "CreateContainer",
            "create_container",
            request,
            pb.CreateContainerResponse,
            check=container_id,
        )
        return answer.container_id

    async def start_container(self, container_id: str) -> None:
        """Start a container that was made."""
        request = pb.StartContainerRequest(container_id=container_id)
        await self._call("StartContainer", "start_container", request, pb.StartContainerResponse)

    async def stop_container(self, container_id: str, grace_seconds: int) -> None:
        """Signal a container and kill it when the grace period is over; returns when it has ended."""
        await self._call(
            "StopContainer",
            "stop_container",
            pb.StopContainerRequest(container_id=container_id, timeout=grace_seconds),
            pb.StopContainerResponse,
            timeout=self._timeout + grace_seconds,
        )

    async def remove_container(self, container_id: str) -> None:
        """Remove a container, killing it if it runs; removing twice is fine."""
        request = pb.RemoveContainerRequest(container_id=container_id)
        await self._call("RemoveContainer", "remove_container", request, pb.RemoveContainerResponse)

    async def container_status(
        self, container_id: str, *, verbose: bool = False
    ) -> pb.ContainerStatusResponse:
        """Ask for a container's state."""
        return await self._call(
            "ContainerStatus",
            "container_status",
            pb.ContainerStatusRequest(container_id=container_id, verbose=verbose),
            pb.ContainerStatusResponse,
            check=container_status,
        )

    async def list_containers(self, filter: pb.ContainerFilter | None = None) -> list[pb.Container]:
        """List containers, all of them without a filter."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_containers(filter)]
        request = pb.ListContainersRequest(filter=filter)
        answer = await self._call("ListContainers", "list_containers", request, pb.ListContainersResponse)
        return list(answer.containers)

    def stream_containers(
        self, filter: pb.ContainerFilter | None = None
    ) -> AsyncGenerator[pb.Container, None]:
        """List containers one by one, which has no limit of size."""
        request = pb.StreamContainersRequest(filter=filter)
        parts = self._stream("StreamContainers", "list_containers", request, pb.StreamContainersResponse)
        return flatten(parts, lambda part: part.containers)

    async def update_container_resources(self, container_id: str, linux: pb.LinuxContainerResources) -> None:
        """Change a container's cgroup while it runs."""
        request = pb.UpdateContainerResourcesRequest(container_id=container_id, linux=linux)
        await self._call(
            "UpdateContainerResources", "update_container", request, pb.UpdateContainerResourcesResponse
        )

    async def reopen_container_log(self, container_id: str) -> None:
        """Make the runtime write to a new log file; the old one was renamed by then."""
        request = pb.ReopenContainerLogRequest(container_id=container_id)
        await self._call("ReopenContainerLog", "reopen_container_log", request, pb.ReopenContainerLogResponse)

    async def checkpoint_container(self, container_id: str, location: str, timeout_seconds: int = 0) -> None:
        """Write a container's checkpoint to `location`; the request timeout is the least it gets."""
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
        """Yield every change of every container, until the connection breaks or the runtime ends.

        Raises Unimplemented at the first step where the runtime has no such stream. Close it
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
        """Run a command in a container and return its output and exit code (not zero: no error).

        Raises CommandTimedOut when it took longer than `timeout_seconds` (0: as long as it takes).
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
        """Prepare an interactive command and return the address of its stream."""
        return (await self._call("Exec", "exec", request, pb.ExecResponse, check=url)).url

    async def attach(self, request: pb.AttachRequest) -> str:
        """Prepare a connection to a container's own streams and return its address."""
        return (await self._call("Attach", "attach", request, pb.AttachResponse, check=url)).url

    async def port_forward(self, request: pb.PortForwardRequest) -> str:
        """Prepare connections to a sandbox's ports and return their address."""
        return (
            await self._call("PortForward", "port_forward", request, pb.PortForwardResponse, check=url)
        ).url


class ImageClient(Service):
    """Images of one runtime."""

    path = IMAGE_SERVICE

    async def list_images(self, filter: pb.ImageFilter | None = None) -> list[pb.Image]:
        """List images, all of them without a filter."""
        if self._streaming:
            with self._fall_back():
                return [item async for item in self.stream_images(filter)]
        request = pb.ListImagesRequest(filter=filter)
        return list((await self._call("ListImages", "list_images", request, pb.ListImagesResponse)).images)

    def stream_images(self, filter: pb.ImageFilter | None = None) -> AsyncGenerator[pb.Image, None]:
        """List images one by one, which has no limit of size."""
        request = pb.StreamImagesRequest(filter=filter)
        parts = self._stream("StreamImages", "list_images", request, pb.StreamImagesResponse)
        return flatten(parts, lambda part: part.images)

    async def image_status(self, image: pb.ImageSpec, *, verbose: bool = False) -> pb.ImageStatusResponse:
        """Ask for an image; the answer's `image` is not set when the runtime does not have it."""
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
        """Pull an image, however long it takes, and return the runtime's reference to it."""
        answer = await self._call(
            "PullImage",
            "pull_image",
            pb.PullImageRequest(image=image, auth=auth, sandbox_config=sandbox_config),
            pb.PullImageResponse,
            timeout=FOREVER,
            check=image_ref,
        )
        return answer.image_ref

    async def remove_image(self, image: pb.ImageSpec) -> None:
        """Remove an image; removing twice is fine."""
        request = pb.RemoveImageRequest(image=image)
        await self._call("RemoveImage", "remove_image", request, pb.RemoveImageResponse)

    async def image_fs_info(self) -> pb.ImageFsInfoResponse:
        """Ask which file systems hold images and containers, and how full they are."""
        return await self._call(
            "ImageFsInfo", "image_fs_info", pb.ImageFsInfoRequest(), pb.ImageFsInfoResponse
        )
