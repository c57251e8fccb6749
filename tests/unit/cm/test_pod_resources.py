"""The pod-resources API, as its clients see it through grpcio."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.json_format import MessageToDict
from prometheus_client import CollectorRegistry

from pykubelet.agent.container_manager import NodeDevices
from pykubelet.api.pod import Container, Pod
from pykubelet.cm.podresources import pod_resources_pb2 as pb
from pykubelet.cm.podresources.server import (
    ClaimedDevice,
    ClaimUse,
    Devices,
    MemoryUse,
    PodResourcesMetrics,
    methods,
    serving_pod_resources,
)
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.transport.grpc_connection import Status
from pykubelet.transport.grpc_server import GrpcError, UnaryMethod
from tests.support.pod_resources import pod_of


class Facts:
    """A node with one pod that has something of everything."""

    def __init__(self) -> None:
        self.busy = pod_of({}, {}, init=[{}, {}])
        self.busy.spec.init_containers[1].restart_policy = "Always"

    def active_pods(self) -> list[Pod]:
        return [self.busy]

    def listed_pods(self) -> list[Pod]:
        return self.active_pods()

    def pod(self, namespace: str, name: str) -> Pod | None:
        return self.busy if (namespace, name) == ("default", "p") else None

    def devices(self, uid: str, container: str) -> Devices:
        if (uid, container) != (self.busy.metadata.uid, "c0"):
            return {}
        return {"example.com/r": {"d1": frozenset({0, 1}), "d2": frozenset()}}

    def cpus(self, uid: str, container: str) -> Iterable[int]:
        return {3, 2} if container == "c0" else ()

    def memory(self, uid: str, container: str) -> Iterable[MemoryUse]:
        return [MemoryUse("memory", 1 << 30, frozenset({1}))] if container == "c0" else []

    def claims(self, pod: Pod, container: Container) -> Iterable[ClaimUse]:
        if container.name != "i1":
            return []
        device = ClaimedDevice("gpu.example.com", "pool", "gpu-0", ("v.com/c=1",), "")
        return [ClaimUse("default", "claim", (device,))]

    def allocatable_devices(self) -> Devices:
        return {"example.com/r": {"d1": frozenset({0}), "d3": frozenset()}}

    def allocatable_cpus(self) -> Iterable[int]:
        return range(4)

    def allocatable_memory(self) -> Iterable[MemoryUse]:
        return [MemoryUse("hugepages-2Mi", 2 << 20, frozenset({0}))]


class Client:
    """A monitor."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    async def call(
        self, method: str, answer: Any, request: Any = None, version: str = "v1"
    ) -> dict[str, Any]:
        call = self._channel.unary_unary(
            f"/{version}.PodResourcesLister/{method}", response_deserializer=answer.FromString
        )
        sent = request.SerializeToString() if request is not None else b""
        return MessageToDict(await call(sent, timeout=60), preserving_proto_field_name=True)


@asynccontextmanager
async def client_in(folder: Path, metrics: PodResourcesMetrics | None = None) -> AsyncIterator[Client]:
    async with serving_pod_resources(folder / "pod-resources", Facts(), metrics):
        path = folder / "pod-resources" / "kubelet.sock"
        async with grpc.aio.insecure_channel(f"unix://{path}") as channel:
            yield Client(channel)


BUSY = {
    "name": "p",
    "namespace": "default",
    "containers": [
        {
            "name": "i1",
            "dynamic_resources": [
                {
                    "claim_name": "claim",
                    "claim_namespace": "default",
                    "claim_resources": [
                        {
                            "cdi_devices": [{"name": "v.com/c=1"}],
                            "driver_name": "gpu.example.com",
                            "pool_name": "pool",
                            "device_name": "gpu-0",
                            "share_id": "",
                        }
                    ],
                }
            ],
        },
        {
            "name": "c0",
            "devices": [
                {"resource_name": "example.com/r", "device_ids": ["d1"], "topology": {"nodes": [{}]}},
                {
                    "resource_name": "example.com/r",
                    "device_ids": ["d1"],
                    "topology": {"nodes": [{"ID": "1"}]},
                },
                {"resource_name": "example.com/r", "device_ids": ["d2"]},
            ],
            "cpu_ids": ["2", "3"],
            "memory": [{"memory_type": "memory", "size": str(1 << 30), "topology": {"nodes": [{"ID": "1"}]}}],
        },
        {"name": "c1"},
    ],
}


async def test_pod_resources_list_and_get_return_allocations(tmp_path: Path) -> None:
    async with client_in(tmp_path) as client:
        assert await client.call("List", pb.ListPodResourcesResponse) == {"pod_resources": [BUSY]}
        request = pb.GetPodResourcesRequest(pod_name="p", pod_namespace="default")
        assert await client.call("Get", pb.GetPodResourcesResponse, request) == {"pod_resources": BUSY}


async def test_pod_resources_get_unknown_pod_returns_not_found_error(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with client_in(tmp_path, PodResourcesMetrics(registry)) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            request = pb.GetPodResourcesRequest(pod_name="x", pod_namespace="y")
            await client.call("Get", pb.GetPodResourcesResponse, request)
        assert caught.value.code() == grpc.StatusCode.UNKNOWN
        assert caught.value.details() == "pod x in namespace y not found"
    version, prefix = {"server_api_version": "v1"}, "kubelet_pod_resources_endpoint_"
    for name in ("requests_total", "requests_get", "errors_get"):
        assert registry.get_sample_value(f"{prefix}{name}", version) == 1, name


async def test_pod_resources_get_allocatable_returns_node_resources(tmp_path: Path) -> None:
    async with client_in(tmp_path) as client:
        assert await client.call("GetAllocatableResources", pb.AllocatableResourcesResponse) == {
            "devices": [
                {"resource_name": "example.com/r", "device_ids": ["d1"], "topology": {"nodes": [{}]}},
                {"resource_name": "example.com/r", "device_ids": ["d3"]},
            ],
            "cpu_ids": ["0", "1", "2", "3"],
            "memory": [{"memory_type": "hugepages-2Mi", "size": str(2 << 20), "topology": {"nodes": [{}]}}],
        }


async def test_pod_resources_v1alpha1_list_returns_devices_only(tmp_path: Path) -> None:
    async with client_in(tmp_path) as client:
        answer = await client.call("List", pb.ListPodResourcesResponse, version="v1alpha1")
        [pod] = answer["pod_resources"]
        assert [one["name"] for one in pod["containers"]] == ["c0", "c1"]
        assert pod["containers"][0]["devices"] == [
            {"resource_name": "example.com/r", "device_ids": [one]} for one in ("d1", "d2")
        ]
        assert pod["containers"][0].keys() == {"name", "devices"}


@pytest.mark.looptime
async def test_pod_resources_rate_limit_exceeded_returns_resource_exhausted() -> None:
    registry = CollectorRegistry()
    asked = methods(Facts(), PodResourcesMetrics(registry))

    refused = Status("RESOURCE_EXHAUSTED", "rejected by rate limit")

    async def said(number: int) -> Status | None:
        """Why a call is refused, whatever it is; None when it is answered."""
        version = ("v1", "v1alpha1")[number % 2]
        method = asked[f"/{version}.PodResourcesLister/List"]
        assert isinstance(method, UnaryMethod)
        try:
            await method.handler(pb.ListPodResourcesRequest())
        except GrpcError as err:
            return err.status
        return None

    async def answered() -> int:
        """How many of twenty calls at once are answered; the others are refused."""
        answers = [await said(number) for number in range(20)]
        assert set(answers) == {None, refused}
        return answers.count(None)

    assert await answered() == 10
    await asyncio.sleep(0.0501)
    assert await answered() == 5
    await asyncio.sleep(10)
    assert await answered() == 10
    total = "kubelet_pod_resources_endpoint_requests_total"
    counts = [
        registry.get_sample_value(total, {"server_api_version": version}) or 0
        for version in ("v1", "v1alpha1")
    ]
    assert sum(counts) == 25, "who is turned away is not counted"


@pytest.mark.parametrize("active_only", [True, False])
def test_pod_resources_list_terminated_pods_only_without_gate(tmp_path: Path, active_only: bool) -> None:
    gates = FeatureGates().with_overrides({"KubeletPodResourcesListUseActivePods": active_only})
    node = NodeDevices(tmp_path, tmp_path, gates, CollectorRegistry())
    active, ended = pod_of({}, {}), pod_of({}, {})
    pods: Any = SimpleNamespace(uids=lambda: None, pods=lambda: [active], known_pods=lambda: [active, ended])
    node._pods = pods
    allocator: Any = SimpleNamespace(cpus=None, memory=None)
    facts = node.facts(allocator, None)
    assert facts.listed_pods() == ([active] if active_only else [active, ended])
    assert facts.active_pods() == [active]
