"""A node of the recordings, and an API server in memory that merges patches as the real one does."""

import asyncio
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pykubelet.api.meta import Resources, from_document, to_document
from pykubelet.api.node import Lease, Node
from pykubelet.api.quantity import Quantity
from pykubelet.apiserver.client import PatchKind, Resource, read_object
from pykubelet.apiserver.errors import AlreadyExists, Conflict, KubeError, NotFound
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.linux.host_info import Machine
from pykubelet.node.conditions import RuntimeHealth
from pykubelet.node.informer import CachedNode
from pykubelet.node.settings import NodeSettings, RegistrationSettings
from pykubelet.node.status import Facts, image_list
from pykubelet.node.status_inputs import NodeSources, RuntimeSource

GOLDEN = Path(__file__).parents[1] / "data/golden"
NOW = datetime(2026, 7, 24, 8, 30, 0, tzinfo=UTC)
LATER = datetime(2026, 7, 24, 8, 40, 0, tzinfo=UTC)
EVICTION = {"memory.available": "100Mi", "nodefs.available": "1%"}
MACHINE = Machine(
    machine_id="3d1219c7c4c5404aaa1f6d2a48adfda4",
    system_uuid="3d1219c7c4c5404aaa1f6d2a48adfda4",
    boot_id="UUID",
    kernel="6.18.44-fc-v445",
    os_image="Debian GNU/Linux 12 (bookworm)",
    architecture="amd64",
)
IMAGES = [
    pb.Image(id="b", size=203899579),
    pb.Image(
        id="a",
        size=204718779,
        repo_tags=[
            "registry.k8s.io/e2e-test-images/agnhost:2.55",
            "registry.k8s.io/e2e-test-images/agnhost:2.63.0",
        ],
    ),
]


def amounts(**texts: str) -> Resources:
    return {name.replace("_", "-"): Quantity.parse(text) for name, text in texts.items()}


CAPACITY = amounts(
    cpu="2",
    memory="24682416Ki",
    ephemeral_storage="264212084Ki",
    hugepages_1Gi="0",
    hugepages_2Mi="0",
    pods="110",
)


_REGISTRATION = [field.name for field in fields(RegistrationSettings)]


def settings(**changes: Any) -> NodeSettings:
    given: dict[str, Any] = {
        "name": "vm",
        "hostname": "vm",
        "ips": (ip_address("192.0.2.2"),),
        "config": KubeletConfiguration(eviction_hard=EVICTION),
    }
    return make_settings(**given | changes)


def make_settings(**values: Any) -> NodeSettings:
    """Return NodeSettings from its fields and those of RegistrationSettings."""
    registration = {name: values.pop(name) for name in _REGISTRATION if name in values}
    return NodeSettings(registration=RegistrationSettings(**registration), **values)


def facts(**changes: Any) -> Facts:
    given: dict[str, Any] = {
        "machine": MACHINE,
        "capacity": CAPACITY,
        "runtime_version": "containerd://1.6.20",
        "runtime_status": runtime_status(),
        "images": image_list(IMAGES, 50),
        "volumes_in_use": [],
    }
    return Facts(**given | changes)


def runtime_status(runtime: bool = True, network: bool = True) -> pb.StatusResponse:
    conditions = [
        pb.RuntimeCondition(type="RuntimeReady", status=runtime, reason="" if runtime else "Down"),
        pb.RuntimeCondition(
            type="NetworkReady",
            status=network,
            reason="" if network else "NetworkPluginNotReady",
            message="" if network else "cni plugin not initialized",
        ),
    ]
    return pb.StatusResponse(status=pb.RuntimeStatus(conditions=conditions))


def golden_node() -> dict[str, Any]:
    """The reference's node, as it was recorded."""
    document = json.loads((GOLDEN / "node.json").read_text())
    assert isinstance(document, dict)
    return document


def apply_patch(old: Any, patch: Any, keys: Mapping[str, str], path: str = "") -> Any:
    """Merge a patch as the API server does; `keys` are what the API says, addresses by `type` too."""
    merged = copy.deepcopy(old)
    for name, value in patch.items():
        if name.startswith("$setElementOrder/"):
            continue
        place = f"{path}{name}"
        if value is None:
            merged.pop(name, None)
        elif place in keys and isinstance(merged.get(name), list):
            merged[name] = _merge_list(merged[name], value, keys[place])
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = apply_patch(merged[name], value, keys, f"{place}.")
        else:
            merged[name] = copy.deepcopy(value)
    for name, order in patch.items():
        if name.startswith("$setElementOrder/"):
            field = name.removeprefix("$setElementOrder/")
            key = keys[f"{path}{field}"]
            places = {item[key]: number for number, item in enumerate(order)}
            merged[field] = sorted(merged[field], key=lambda item: places.get(item[key], len(places)))
    return merged


def _merge_list(old: list[Any], patch: list[Any], key: str) -> list[Any]:
    items = [item for item in patch if item != {"$patch": "replace"}]
    if len(items) < len(patch):
        return items
    merged = {item[key]: item for item in old}
    for item in items:
        if item.get("$patch") == "delete":
            merged.pop(item[key], None)
        else:
            merged[item[key]] = apply_patch(merged.get(item[key], {}), item, {})
    return list(merged.values())


API_KEYS = {"status.conditions": "type", "status.addresses": "type"}


class MemoryApi:
    """Nodes and leases of an API server; `fails` are raised first, one for each request."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.asked: list[str] = []
        self.patches: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.fails: list[KubeError | None] = []
        self.away: KubeError | None = None
        self.closed = 0
        self.on_change: Callable[[CachedNode | None], None] = lambda node: None

    @property
    def node(self) -> dict[str, Any]:
        return self.objects["nodes/vm"]

    @property
    def lease(self) -> dict[str, Any]:
        return self.objects["leases/vm"]

    def conditions(self) -> dict[str, str]:
        return {item["type"]: item["status"] for item in self.node["status"]["conditions"]}

    def put_node(self, document: dict[str, Any], uid: str = "n1") -> None:
        """What somebody else does."""
        self.version += 1
        meta = {
            **document.get("metadata", {}),
            "name": "vm",
            "uid": uid,
            "resourceVersion": str(self.version),
        }
        self.objects["nodes/vm"] = {**document, "metadata": meta}
        self.on_change(self.known())

    def delete_node(self) -> None:
        del self.objects["nodes/vm"]
        self.on_change(None)

    def known(self) -> CachedNode:
        return read_object(CachedNode, json.dumps(self.node).encode())

    async def close_all(self) -> None:
        self.closed += 1

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def get(self, resource: Resource[Any], name: str, namespace: str = "") -> Any:
        self._ask("get", resource)
        return from_document(resource.struct, self._found(resource, name))

    async def create(self, resource: Resource[Any], obj: Any, namespace: str = "") -> Any:
        self._ask("create", resource)
        key = f"{resource.plural}/{obj.metadata.name}"
        if key in self.objects:
            raise AlreadyExists(409, "AlreadyExists")
        document = to_document(obj)
        document["metadata"]["uid"] = f"uid-{self.version}"
        return self._save(resource, document)

    async def update(self, resource: Resource[Lease], obj: Lease) -> Lease:
        self._ask("update", resource)
        found = self._found(resource, obj.metadata.name)
        if found["metadata"]["resourceVersion"] != obj.metadata.resource_version:
            raise Conflict(409, "Conflict")
        saved = self._save(resource, to_document(obj))
        assert isinstance(saved, Lease)
        return saved

    async def patch(
        self,
        resource: Resource[Node],
        name: str,
        patch: Mapping[str, Any],
        namespace: str = "",
        *,
        kind: PatchKind = PatchKind.STRATEGIC,
        subresource: str = "",
    ) -> Node:
        self._ask("patch", resource)
        assert (kind, subresource) == (PatchKind.STRATEGIC, "status")
        assert set(patch) <= {"metadata", "status"}
        document = json.loads(json.dumps(patch))
        self.patches.append(document)
        saved = self._save(resource, apply_patch(self._found(resource, name), document, API_KEYS))
        assert isinstance(saved, Node)
        return saved

    def _ask(self, verb: str, resource: Resource[Any]) -> None:
        self.asked.append(f"{verb} {resource.plural}")
        self.times.append(asyncio.get_running_loop().time())
        if self.away is not None:
            raise self.away
        if self.fails and (err := self.fails.pop(0)) is not None:
            raise err

    def _found(self, resource: Resource[Any], name: str) -> dict[str, Any]:
        try:
            return self.objects[f"{resource.plural}/{name}"]
        except KeyError:
            raise NotFound(404, "NotFound") from None

    def _save(self, resource: Resource[Any], document: dict[str, Any]) -> Any:
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)
        self.objects[f"{resource.plural}/{document['metadata']['name']}"] = document
        if resource.plural == "nodes":
            self.on_change(self.known())
        return from_document(resource.struct, document)


class FakeRuntime:
    """A runtime whose state a test sets."""

    def __init__(self) -> None:
        self.answer = runtime_status()
        self.images = IMAGES
        self.hangs = False
        self.asked = 0
        self.cidrs: list[str] = []
        self.cidr_error: Exception | None = None
        self.health = RuntimeHealth(self.status)

    async def status(self) -> pb.StatusResponse:
        self.asked += 1
        await self._hang()
        return self.answer

    async def list_images(self) -> list[pb.Image]:
        await self._hang()
        return self.images

    async def version(self) -> pb.VersionResponse:
        await self._hang()
        return pb.VersionResponse(runtime_name="containerd", runtime_version="1.6.20")

    async def update_runtime_config(self, config: pb.RuntimeConfig) -> None:
        if self.cidr_error is not None:
            raise self.cidr_error
        self.cidrs.append(config.network_config.pod_cidr)

    async def _hang(self) -> None:
        if self.hangs:
            await asyncio.sleep(120)

    def sources(self, **changes: Any) -> NodeSources:
        calls: dict[str, Any] = {
            "health": self.health,
            "refresh": self.health.status,
            "list_images": self.list_images,
            "version": self.version,
            "update_runtime_config": self.update_runtime_config,
        }
        runtime = RuntimeSource(**{name: changes.pop(name, call) for name, call in calls.items()})
        given: dict[str, Any] = {"machine": MACHINE, "capacity": CAPACITY, "runtime": runtime}
        return NodeSources(**given | changes)


class Recorded:
    """Events in the order they were recorded."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def __call__(self, kind: str, reason: str, message: str) -> None:
        self.events.append((kind, reason, message))

    @property
    def reasons(self) -> list[str]:
        return [reason for _, reason, _ in self.events]
