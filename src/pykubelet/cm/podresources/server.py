"""Pod-resources API: devices, CPUs and memory of containers, for clients on the node.

Device monitors and topology-aware schedulers call it on `pod-resources/kubelet.sock`. It has no state: the
resource managers provide the data (`ResourceFacts`). As upstream, it allows all clients together a hundred
requests per second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter

from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.cm.podresources import pod_resources_pb2 as pb
from pykubelet.transport.grpc_server import GrpcError, Methods, UnaryMethod, serving
from pykubelet.util.metrics import PlainCounter
from pykubelet.util.rate_limiter import TokenBucket

SOCKET_NAME = "kubelet.sock"
QPS, BURST = 100.0, 10
_DIRECTORY_MODE = 0o750
_V1, _V1ALPHA1 = "v1", "v1alpha1"
Devices = Mapping[str, Mapping[str, frozenset[int]]]
"""NUMA nodes by resource and device ID."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of memory or huge pages on NUMA nodes; `kind` is the API's name of the resource."""

    kind: str
    size: int
    nodes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device allocated to a resource claim."""

    driver: str
    pool: str
    device: str
    cdi_devices: tuple[str, ...] = ()
    share_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimUse:
    """A resource claim that a container uses."""

    namespace: str
    name: str
    devices: tuple[ClaimedDevice, ...] = ()


class ResourceFacts(Protocol):
    """Allocations of the resource managers; containers are identified by pod UID and name."""

    def active_pods(self) -> Iterable[Pod]:
        """Return the pods that run or may run."""

    def listed_pods(self) -> Iterable[Pod]:
        """Return the pods in the response to List."""

    def pod(self, namespace: str, name: str) -> Pod | None:
        """Return a pod of this node, or None."""

    def devices(self, uid: str, container: str) -> Devices:
        """Return a container's devices."""

    def cpus(self, uid: str, container: str) -> Iterable[int]:
        """Return a container's exclusive CPUs."""

    def memory(self, uid: str, container: str) -> Iterable[MemoryUse]:
        """Return the memory allocated to a container."""

    def claims(self, pod: Pod, container: Container) -> Iterable[ClaimUse]:
        """Return the resource claims of a container."""

    def allocatable_devices(self) -> Devices:
        """Return all devices that pods can use."""

    def allocatable_cpus(self) -> Iterable[int]:
        """Return all CPUs that can be exclusive."""

    def allocatable_memory(self) -> Iterable[MemoryUse]:
        """Return all memory that can be allocated to pods."""


class PodResourcesMetrics:
    """Metrics of the pod-resources API."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Initialize; without a registry the metrics are not exported."""
        prefix, labels = "kubelet_pod_resources_endpoint_", ["server_api_version"]
        self.all = Counter(f"{prefix}requests_total", "Requests.", labels, registry=registry)
        self.requests = {
            name: PlainCounter(f"{prefix}requests_{name}", f"Requests to {name}.", labels, registry=registry)
            for name in ("list", "get", "get_allocatable")
        }
        self.errors = {
            name: PlainCounter(f"{prefix}errors_{name}", f"Failures of {name}.", labels, registry=registry)
            for name in ("list", "get", "get_allocatable")
        }


@asynccontextmanager
async def serving_pod_resources(
    directory: Path, facts: ResourceFacts, metrics: PodResourcesMetrics | None = None
) -> AsyncIterator[None]:
    """Serve the API on a socket in this directory, creating it, within the block. Raises OSError."""
    directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
    async with serving(directory / SOCKET_NAME, methods(facts, metrics or PodResourcesMetrics())):
        yield


def methods(facts: ResourceFacts, metrics: PodResourcesMetrics) -> Methods:
    """Return the methods of the API's versions v1 and v1alpha1."""
    bucket = TokenBucket(QPS, BURST)

    def limited(version: str, kind: str, respond: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
        async def call(request: Any) -> Any:
            if not bucket.try_acquire(asyncio.get_running_loop().time()):
                raise GrpcError("RESOURCE_EXHAUSTED", "rejected by rate limit")
            metrics.all.labels(version).inc()
            if version == _V1:
                metrics.requests[kind].labels(version).inc()
            try:
                return respond(request)
            except GrpcError:
                metrics.errors[kind].labels(version).inc()
                raise

        return call

    service, old = "/v1.PodResourcesLister/", "/v1alpha1.PodResourcesLister/"
    return {
        f"{service}List": UnaryMethod(
            pb.ListPodResourcesRequest, limited(_V1, "list", lambda _: list_pods(facts))
        ),
        f"{service}Get": UnaryMethod(
            pb.GetPodResourcesRequest, limited(_V1, "get", lambda request: get_pod(facts, request))
        ),
        f"{service}GetAllocatableResources": UnaryMethod(
            pb.AllocatableResourcesRequest,
            limited(_V1, "get_allocatable", lambda _: allocatable(facts)),
        ),
        f"{old}List": UnaryMethod(
            pb.ListPodResourcesRequest, limited(_V1ALPHA1, "list", lambda _: list_devices(facts))
        ),
    }


def list_pods(facts: ResourceFacts) -> pb.ListPodResourcesResponse:
    """Return the response to List."""
    return pb.ListPodResourcesResponse(
        pod_resources=[_pod_resources(facts, pod) for pod in facts.listed_pods()]
    )


def list_devices(facts: ResourceFacts) -> pb.ListPodResourcesResponse:
    """Return the response to List of v1alpha1: devices only, and no init containers.

    It is a subset of the response of v1, in the same fields.
    """
    response = pb.ListPodResourcesResponse()
    for pod in facts.active_pods():
        entry = response.pod_resources.add(name=pod.metadata.name, namespace=pod.metadata.namespace)
        for container in pod.spec.containers:
            mine = entry.containers.add(name=container.name)
            for resource, devices in facts.devices(pod.metadata.uid, container.name).items():
                for device_id in devices:
                    mine.devices.add(resource_name=resource, device_ids=[device_id])
    return response


def get_pod(facts: ResourceFacts, request: pb.GetPodResourcesRequest) -> pb.GetPodResourcesResponse:
    """Return the response to Get. Raises GrpcError."""
    pod = facts.pod(request.pod_namespace, request.pod_name)
    if pod is None:
        text = f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        raise GrpcError("UNKNOWN", text)
    return pb.GetPodResourcesResponse(pod_resources=_pod_resources(facts, pod))


def allocatable(facts: ResourceFacts) -> pb.AllocatableResourcesResponse:
    """Return the response to GetAllocatableResources: all resources, allocated or not."""
    return pb.AllocatableResourcesResponse(
        devices=_devices(facts.allocatable_devices()),
        cpu_ids=sorted(facts.allocatable_cpus()),
        memory=map(_memory, facts.allocatable_memory()),
    )


def _pod_resources(facts: ResourceFacts, pod: Pod) -> pb.PodResources:
    # Other init containers have ended when clients query the pod.
    containers = (*filter(is_sidecar, pod.spec.init_containers), *pod.spec.containers)
    return pb.PodResources(
        name=pod.metadata.name,
        namespace=pod.metadata.namespace,
        containers=[_container_resources(facts, pod, container) for container in containers],
    )


def _container_resources(facts: ResourceFacts, pod: Pod, container: Container) -> pb.ContainerResources:
    uid = pod.metadata.uid
    return pb.ContainerResources(
        name=container.name,
        devices=_devices(facts.devices(uid, container.name)),
        cpu_ids=sorted(facts.cpus(uid, container.name)),
        memory=map(_memory, facts.memory(uid, container.name)),
        dynamic_resources=map(_claim, facts.claims(pod, container)),
    )


def _devices(devices: Devices) -> list[pb.ContainerDevices]:
    """Return one entry per device and NUMA node, like upstream."""
    entries = []
    for resource, ids in devices.items():
        for device_id, nodes in ids.items():
            topologies: list[pb.TopologyInfo | None] = [_topology([node]) for node in sorted(nodes)] or [None]
            entries += [
                pb.ContainerDevices(resource_name=resource, device_ids=[device_id], topology=topology)
                for topology in topologies
            ]
    return entries


def _memory(use: MemoryUse) -> pb.ContainerMemory:
    return pb.ContainerMemory(memory_type=use.kind, size=use.size, topology=_topology(sorted(use.nodes)))


def _claim(use: ClaimUse) -> pb.DynamicResource:
    return pb.DynamicResource(
        claim_name=use.name,
        claim_namespace=use.namespace,
        claim_resources=[
            pb.ClaimResource(
                cdi_devices=[pb.CDIDevice(name=name) for name in device.cdi_devices],
                driver_name=device.driver,
                pool_name=device.pool,
                device_name=device.device,
                share_id=device.share_id,
            )
            for device in use.devices
        ],
    )


def _topology(nodes: Iterable[int]) -> pb.TopologyInfo:
    return pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in nodes])
