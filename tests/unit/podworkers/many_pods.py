"""A whole pod engine with a container runtime and an API server in memory.

The sources, the mux, admission, the workers, the steps of pods, the status manager, the event recorder and
housekeeping are the real ones. The runtime and the API server respond after fixed delays of loop time, so
that many pods take proportionally longer than few, as on a node.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgspec
from prometheus_client import CollectorRegistry

from pykubelet.admission.handler import PodAdmitHandler
from pykubelet.agent.cluster import AgentSettings
from pykubelet.agent.container_manager import build_resource_allocator
from pykubelet.agent.images import build_image_manager
from pykubelet.agent.pod_engine import EngineSettings, NodeResources, NodeRuntime, build_pod_engine
from pykubelet.api.meta import to_document
from pykubelet.api.pod_status import PodStatus
from pykubelet.apiserver.client import ApiClient, Page, RawPage, Resource, read_object
from pykubelet.apiserver.errors import NotFound
from pykubelet.apiserver.events import EventRecorder
from pykubelet.cm.cgroups.pod_cgroups import PodCgroups
from pykubelet.cm.resize import in_memory_allocation_state, open_allocation_state
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.configuration.options import RuntimeNodeOptions
from pykubelet.kuberuntime.configuration.user_namespaces import UserNamespaceRange, UserNamespaces
from pykubelet.kuberuntime.gc import GarbageCollector
from pykubelet.kuberuntime.labels import POD_UID
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.objects.base import NoObjects, PodObjects
from pykubelet.objects.runtime_classes import default_handler
from pykubelet.podconfig.local_objects import LocalObjects
from pykubelet.podsync.resource_allocator import NO_CLAIMS, NO_DEVICES
from pykubelet.podworkers.api_server_sync import ClusterAccess
from pykubelet.podworkers.engine import PodEngine
from pykubelet.podworkers.pod_admission import AdmissionNode
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.workers import PodChurn
from pykubelet.transport.errors import NotFound as NotInRuntime
from pykubelet.transport.errors import Unimplemented
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.plugin import MemoryLimits
from tests.support.admission import node
from tests.support.pod_resources import amounts
from tests.support.strategic import apply_patch

T = TypeVar("T", pb.PodSandbox, pb.Container)

NODE = "n1"
SANDBOX_SECONDS, CONTAINER_SECONDS, STOP_SECONDS, WRITE_SECONDS = 0.1, 0.02, 0.05, 0.002
"""The time that the runtime takes for a sandbox, a container, a stop, and the API server for a write."""
START = datetime(2026, 1, 1, tzinfo=UTC)


class FakeRuntime:
    """A container runtime in memory that sends CRI container events."""

    def __init__(self) -> None:
        self.calls = 0
        self._sandboxes: dict[str, pb.PodSandbox] = {}
        self._containers: dict[str, pb.Container] = {}
        self._statuses: dict[str, pb.ContainerStatus] = {}
        self._ids = itertools.count(1)
        self._events: asyncio.Queue[pb.ContainerEventResponse] = asyncio.Queue()
        self._workers = asyncio.Semaphore(4)

    async def list_pod_sandbox(self, filter: pb.PodSandboxFilter | None = None) -> list[pb.PodSandbox]:
        self.calls += 1
        return _chosen(self._sandboxes, filter)

    async def list_containers(self, filter: pb.ContainerFilter | None = None) -> list[pb.Container]:
        self.calls += 1
        return _chosen(self._containers, filter)

    async def run_pod_sandbox(self, config: pb.PodSandboxConfig, handler: str = "") -> str:
        self.calls += 1
        await self._work(SANDBOX_SECONDS)
        sandbox_id = f"sandbox-{next(self._ids)}"
        self._sandboxes[sandbox_id] = pb.PodSandbox(
            id=sandbox_id,
            metadata=config.metadata,
            state=pb.SANDBOX_READY,
            created_at=self._now(),
            labels=config.labels,
            annotations=config.annotations,
        )
        return sandbox_id

    async def pod_sandbox_status(self, sandbox_id: str) -> pb.PodSandboxStatusResponse:
        self.calls += 1
        found = self._sandboxes.get(sandbox_id)
        if found is None:
            raise NotInRuntime("PodSandboxStatus", "NotFound", sandbox_id)
        status = pb.PodSandboxStatus(
            id=found.id, metadata=found.metadata, state=found.state, created_at=found.created_at
        )
        status.network.ip = "10.0.0.2"
        return pb.PodSandboxStatusResponse(status=status)

    async def create_container(
        self, sandbox_id: str, config: pb.ContainerConfig, sandbox_config: pb.PodSandboxConfig
    ) -> str:
        self.calls += 1
        await self._work(CONTAINER_SECONDS)
        container_id = f"container-{next(self._ids)}"
        common: dict[str, Any] = {
            "id": container_id,
            "metadata": config.metadata,
            "image": config.image,
            "image_ref": config.image.image,
            "state": pb.CONTAINER_CREATED,
            "created_at": self._now(),
            "labels": config.labels,
            "annotations": config.annotations,
        }
        self._containers[container_id] = pb.Container(pod_sandbox_id=sandbox_id, **common)
        self._statuses[container_id] = pb.ContainerStatus(**common)
        return container_id

    async def start_container(self, container_id: str) -> None:
        self.calls += 1
        await self._work(CONTAINER_SECONDS)
        self._set(container_id, pb.CONTAINER_RUNNING)
        self._statuses[container_id].started_at = self._now()
        self._tell(container_id, pb.CONTAINER_STARTED_EVENT)

    async def container_status(self, container_id: str) -> pb.ContainerStatusResponse:
        self.calls += 1
        found = self._statuses.get(container_id)
        if found is None:
            raise NotInRuntime("ContainerStatus", "NotFound", container_id)
        return pb.ContainerStatusResponse(status=found)

    async def stop_container(self, container_id: str, grace_seconds: int) -> None:
        self.calls += 1
        await self._work(STOP_SECONDS)
        self._set(container_id, pb.CONTAINER_EXITED)
        self._statuses[container_id].finished_at = self._now()
        self._tell(container_id, pb.CONTAINER_STOPPED_EVENT)

    async def remove_container(self, container_id: str) -> None:
        self.calls += 1
        self._containers.pop(container_id, None)
        self._statuses.pop(container_id, None)

    async def stop_pod_sandbox(self, sandbox_id: str) -> None:
        self.calls += 1
        await self._work(STOP_SECONDS)
        self._sandboxes[sandbox_id].state = pb.SANDBOX_NOTREADY

    async def remove_pod_sandbox(self, sandbox_id: str) -> None:
        self.calls += 1
        self._sandboxes.pop(sandbox_id, None)
        for one in [one for one in self._containers.values() if one.pod_sandbox_id == sandbox_id]:
            await self.remove_container(one.id)

    async def container_events(self) -> AsyncGenerator[pb.ContainerEventResponse, None]:
        while True:
            yield await self._events.get()

    @property
    def is_empty(self) -> bool:
        return not self._sandboxes and not self._containers

    async def _work(self, seconds: float) -> None:
        async with self._workers:
            await asyncio.sleep(seconds)

    def _set(self, container_id: str, state: int) -> None:
        self._containers[container_id].state = self._statuses[container_id].state = cast(Any, state)

    def _tell(self, container_id: str, kind: int) -> None:
        event = pb.ContainerEventResponse(container_id=container_id, container_event_type=cast(Any, kind))
        sandbox = self._sandboxes[self._containers[container_id].pod_sandbox_id]
        event.pod_sandbox_status.metadata.CopyFrom(sandbox.metadata)
        self._events.put_nowait(event)

    def _now(self) -> int:
        return int((START.timestamp() + asyncio.get_running_loop().time()) * 1e9)


def _chosen(known: dict[str, T], filter: pb.PodSandboxFilter | pb.ContainerFilter | None) -> list[T]:
    if filter is None:
        return list(known.values())
    uid = filter.label_selector[POD_UID]
    return [one for one in known.values() if one.labels[POD_UID] == uid]


class FakeImages:
    """An image service that has every image."""

    async def image_status(self, image: pb.ImageSpec, *, verbose: bool = False) -> pb.ImageStatusResponse:
        return pb.ImageStatusResponse(image=pb.Image(id=image.image, repo_tags=[image.image]))


class FakeApi:
    """An API server in memory with the pods of one node; one watch sees every write."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.writes = 0
        self.events = 0
        self._version = 100
        self._stream: asyncio.Queue[bytes] = asyncio.Queue()

    # What the test does

    def create_pods(self, count: int) -> None:
        for number in range(count):
            name = f"pod-{number:04d}"
            self._write("ADDED", name, _manifest(name, number))

    def delete_pods(self) -> None:
        for name, document in list(self.pods.items()):
            meta = document["metadata"] | {
                "deletionTimestamp": "2026-01-01T01:00:00Z",
                "deletionGracePeriodSeconds": 2,
                "generation": 2,
            }
            self._write("MODIFIED", name, document | {"metadata": meta})

    def phases(self) -> list[str]:
        return [document["status"].get("phase", "") for document in self.pods.values()]

    # What the kubelet asks

    streams_lists = False

    def disable_streaming(self) -> None:
        raise AssertionError("nothing was streamed")

    async def list_page(self, resource: Resource[Any], namespace: str, params: Any) -> RawPage:
        items = [msgspec.Raw(json.dumps(document).encode()) for document in self.pods.values()]
        return Page(items, str(self._version), "")

    @asynccontextmanager
    async def watch(
        self, resource: Resource[Any], namespace: str, params: Any, *, seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async def chunks() -> AsyncIterator[bytes]:
            while True:
                yield await self._stream.get()

        yield chunks()

    async def get(self, resource: Resource[Any], name: str, namespace: str = "") -> Any:
        return self._read(resource, name)

    async def create(self, resource: Resource[Any], obj: Any, namespace: str = "") -> Any:
        self.events += 1
        await asyncio.sleep(WRITE_SECONDS)
        return obj

    async def patch(
        self,
        resource: Resource[Any],
        name: str,
        patch: Mapping[str, Any],
        namespace: str = "",
        *,
        subresource: str = "",
        **_: object,
    ) -> Any:
        self.writes += 1
        await asyncio.sleep(WRITE_SECONDS)
        self._read(resource, name)
        document = self.pods[name]
        change = json.loads(msgspec.json.encode(to_document(patch)))
        status = apply_patch(document["status"], change["status"])
        self._write("MODIFIED", name, document | {"status": status})
        return self._read(resource, name)

    async def delete(self, resource: Resource[Any], name: str, namespace: str = "", **_: object) -> None:
        self.writes += 1
        await asyncio.sleep(WRITE_SECONDS)
        self._read(resource, name)
        self._write("DELETED", name, self.pods[name])

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _read(self, resource: Resource[Any], name: str) -> Any:
        if name not in self.pods:
            raise NotFound(404, "NotFound", f"pods {name!r} not found")
        return read_object(resource.struct, json.dumps(self.pods[name]).encode())

    def _write(self, kind: str, name: str, document: dict[str, Any]) -> None:
        self._version += 1
        document = document | {"metadata": document["metadata"] | {"resourceVersion": str(self._version)}}
        self.pods[name] = document
        if kind == "DELETED":
            del self.pods[name]
        self._stream.put_nowait(json.dumps({"type": kind, "object": document}).encode() + b"\n")


def _manifest(name: str, number: int) -> dict[str, Any]:
    created = START + timedelta(seconds=number)
    requests = {"cpu": "1m", "memory": "1Mi"} if number % 2 else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"00000000-0000-0000-0000-{number:012d}",
            "creationTimestamp": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "generation": 1,
        },
        "spec": {
            "nodeName": NODE,
            "terminationGracePeriodSeconds": 2,
            "restartPolicy": "Always",
            "dnsPolicy": "Default",
            "containers": [
                {
                    "name": "main",
                    "image": "busybox",
                    "imagePullPolicy": "IfNotPresent",
                    "resources": {"requests": requests},
                }
            ],
        },
        "status": {"phase": "Pending", "qosClass": "Burstable" if requests else "BestEffort"},
    }


@dataclass
class Rig:
    """One engine with its runtime and its API server."""

    engine: PodEngine
    runtime: FakeRuntime
    api: FakeApi
    recorder: EventRecorder
    settings: AgentSettings
    live: EngineSettings
    pod_cgroups: PodCgroups
    options: RuntimeNodeOptions
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    async def start_pods(self, count: int) -> None:
        """Create pods and wait until the API server has all of them as Running, and all is quiet."""
        self.api.create_pods(count)
        while self.api.phases().count("Running") < count:
            await asyncio.sleep(0.1)
        await asyncio.sleep(5)

    async def stop_pods(self) -> None:
        """Delete all pods and wait until nothing is left of them, and all is quiet."""
        self.api.delete_pods()
        while self.api.pods or not self.runtime.is_empty or len(self.engine.workers):
            await asyncio.sleep(0.1)
        await asyncio.sleep(5)


@asynccontextmanager
async def engine_with_fakes(
    root: Path,
    cgroups: Cgroups,
    *,
    runtime: FakeRuntime | None = None,
    api: FakeApi | None = None,
    objects: PodObjects | None = None,
    images: Any = None,
    volumes: Any = None,
    network_errors: Callable[[], list[str]] = list,
    gates: FeatureGates | None = None,
    final: Mapping[str, PodStatus] | None = None,
    shutdown: PodAdmitHandler | None = None,
    pressure: PodAdmitHandler | None = None,
    checkpoints: bool = False,
) -> AsyncIterator[Rig]:
    """Run an engine below `root` until the block is left; `cgroups` is where it makes those of pods.

    With `checkpoints`, the allocated and actuated resources of pods are in files, as on a node.
    """
    root.mkdir(parents=True, exist_ok=True)
    runtime, api, objects = runtime or FakeRuntime(), api or FakeApi(), objects or NoObjects()
    registry, gates = CollectorRegistry(), gates or FeatureGates()
    config = KubeletConfiguration(
        max_pods=1000, cgroup_root="/pyk", pod_logs_dir=str(root / "logs"), resolv_conf=""
    )
    cri = cast(
        RuntimeConnection,
        _Cri(
            runtime,
            images or FakeImages(),
            pb.VersionResponse(runtime_name="containerd", runtime_version="1.7"),
        ),
    )
    client = cast(ApiClient, api)
    capacity = amounts(cpu="64", memory="64Gi", pods="1000", ephemeral_storage="100Gi")
    pod_cgroups = PodCgroups(config, gates, cgroups, capacity)
    await pod_cgroups.setup()
    own = node(cpu="64", memory="64Gi", pods="1000", ephemeral_storage="100Gi")
    settings = AgentSettings(KubeletFlags(root_dir=str(root)), config, gates, NODE)
    async with TaskScope() as scope:
        allotment = build_resource_allocator(settings, registry)
        churn, records = PodChurn(), PodRecords.create(final)
        options = RuntimeNodeOptions(
            pod_logs_dir=str(root / "logs"), memory_capacity=64 << 30, allocatable=capacity
        )
        state: Any = SimpleNamespace(errors=list, network_errors=network_errors)
        engine, start, live = build_pod_engine(
            settings,
            NodeRuntime(
                cri=cri,
                options=options,
                state=state,
                images=await build_image_manager(settings, cri, records.history, None, registry, scope),
                collector=GarbageCollector(cri, root / "logs", None, clock=runtime._now),
                host_ips=["10.1.0.1"],
                legacy_logs=None,
            ),
            NodeResources(
                cgroups=pod_cgroups,
                volumes=volumes
                or PodVolumes(
                    root,
                    objects=objects,
                    node=cast(Any, None),
                    memory=MemoryLimits(lambda pod: None, 64 << 30),
                    tasks=scope,
                ),
                user_namespaces=UserNamespaces(
                    PodDirs(root),
                    UserNamespaceRange(65536, 65536 * 1000, 65536),
                    supported=lambda handler: False,
                ),
                allocator=allotment,
                allocation_state=open_allocation_state(root) if checkpoints else in_memory_allocation_state(),
                devices=NO_DEVICES,
                claims=NO_CLAIMS,
            ),
            records,
            churn,
            AdmissionNode(
                own=own,
                gates=gates,
                allocation=allotment,
                released=allotment.forget,
                known=lambda: own,
                shutdown=shutdown,
                pressure=pressure,
            ),
            ClusterAccess(
                client=client,
                node_uid=lambda: "node-uid",
                objects=objects,
                handler_of=default_handler,
                services=lambda pod: {},
            ),
            LocalObjects(),
            registry,
            scope,
        )
        recorder = EventRecorder(cast(Any, api), NODE, tries=None)
        engine.history.add_listener(recorder.pod_event)
        scope.start(recorder.run(churn.is_bursting), name="events")
        start()
        while not records.all_reported or engine.pleg.health() is not None:
            await asyncio.sleep(0.1)
        yield Rig(engine, runtime, api, recorder, settings, live, pod_cgroups, options, registry)


@dataclass
class _Cri:
    """The parts of a CRI connection that the engine uses."""

    runtime: FakeRuntime
    images: FakeImages
    version: pb.VersionResponse

    @property
    def image_channel(self) -> Any:
        return _NoServices()


class _NoServices:
    """A channel without the services of containerd."""

    async def call(self, *_: object, **__: object) -> None:
        raise Unimplemented("call", "Unimplemented", "no such service")
