"""Resource use and metrics as the runtime measures them; part of the runtime service."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.service import RUNTIME_SERVICE, Service, flatten


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
