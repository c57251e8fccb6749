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
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from time import perf_counter

from pykubelet.cri import checks
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import FOREVER
from pykubelet.cri.errors import CommandTimedOut, DeadlineExceeded
from pykubelet.cri.service import RUNTIME_SERVICE, Service, flatten

AGENT_API_VERSION = "0.1.0"
"""What agent and runtime call the agent's side of the protocol; it never changed."""


class RuntimeClient(Service):
    """Sandboxes and containers of one runtime."""

    path = RUNTIME_SERVICE

    # The runtime itself

    async def version(self) -> pb.VersionResponse:
        """Ask who the runtime is."""
        request = pb.VersionRequest(version=AGENT_API_VERSION)
        return await self._call("Version", "version", request, pb.VersionResponse, check=checks.version)

    async def status(self, *, verbose: bool = False) -> pb.StatusResponse:
        """Ask whether runtime and network are ready, and what the runtime's handlers can do."""
        request = pb.StatusRequest(verbose=verbose)
        return await self._call("Status", "status", request, pb.StatusResponse, check=checks.status)

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
                check=checks.sandbox_id,
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
            check=checks.sandbox_status,
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
            check=checks.container_id,
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
            check=checks.container_status,
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
        return (await self._call("Exec", "exec", request, pb.ExecResponse, check=checks.url)).url

    async def attach(self, request: pb.AttachRequest) -> str:
        """Prepare a connection to a container's own streams and return its address."""
        return (await self._call("Attach", "attach", request, pb.AttachResponse, check=checks.url)).url

    async def port_forward(self, request: pb.PortForwardRequest) -> str:
        """Prepare connections to a sandbox's ports and return their address."""
        return (
            await self._call("PortForward", "port_forward", request, pb.PortForwardResponse, check=checks.url)
        ).url
