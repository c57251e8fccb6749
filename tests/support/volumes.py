import copy
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.meta import Resources, from_document
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.api.selector import LabelSelector
from pykubelet.api.storage import PersistentVolume, PersistentVolumeClaim
from pykubelet.api.volume import PodCertificateProjection
from pykubelet.apiserver.client import ApiClient, Resource, T
from pykubelet.apiserver.errors import NotFound, Unreachable
from pykubelet.linux.mounts import Mount, plan_unmounts, read_mounts, unmount
from pykubelet.objects.base import CredentialBundle, ObjectError, ObjectNotFound, PodObjects
from pykubelet.podconfig.checkpoints import Checkpoints
from pykubelet.podconfig.defaults import apply_defaults
from pykubelet.util.tasks import TaskScope
from pykubelet.volumes.attach import ClusterNode
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.ownership import RecordEvent, RecordObjectEvent, record_no_event
from pykubelet.volumes.plugin import MemoryLimits, VolumeOptions

ALLOCATABLE = 1 << 30

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@dataclass
class Shelf:
    """The objects of a cluster, in memory; a token says what it was asked for."""

    config_maps: dict[str, dict[str, str | bytes]] = field(default_factory=dict)
    secrets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    """Of secrets, by name."""
    bundles: dict[str, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    generation: int = 1

    def register(self, pod: Pod) -> None:
        raise AssertionError("not for volumes to do")

    def unregister(self, uid: str) -> None:
        raise AssertionError("not for volumes to do")

    def add_listener(self, listener: Callable[[str], None]) -> None:
        raise AssertionError("not for volumes to do")

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        self._check("configmap", name, self.config_maps)
        values = self.config_maps[name]
        return ConfigMap(
            data={key: value for key, value in values.items() if isinstance(value, str)},
            binary_data={key: value for key, value in values.items() if isinstance(value, bytes)},
        )

    async def secret(self, pod: Pod, name: str) -> Secret:
        self._check("secret", name, self.secrets)
        return Secret(type=self.types.get(name, ""), data=dict(self.secrets[name]))

    async def token(self, pod: Pod, *, audience: str, seconds: int) -> str:
        if "token" in self.broken:
            raise ObjectError("failed to fetch token: the API server is away")
        return f"{pod.metadata.name}/{audience}/{seconds}/{self.generation}"

    async def trust_bundle(
        self, pod: Pod, *, name: str = "", signer: str = "", selector: LabelSelector | None = None
    ) -> str:
        if signer:
            name = f"{signer}{sorted(selector.match_labels) if selector is not None else 'nothing'}"
        self._check("clustertrustbundle", name, self.bundles)
        return self.bundles[name]

    async def pod_certificate(
        self, pod: Pod, volume: str, index: int, source: PodCertificateProjection
    ) -> CredentialBundle:
        if not source.signer_name.startswith("example.com/"):
            raise ObjectError("credential bundle is not issued yet")
        text = f"{pod.metadata.name}/{volume}/{index}/{self.generation}\n"
        return CredentialBundle(private_key=f"key {text}", certificate_chain=f"chain {text}")

    def _check(self, kind: str, name: str, there: dict[str, Any]) -> None:
        if name in self.broken:
            raise ObjectError(f"failed to get {kind} {name}: the API server is away")
        if name not in there:
            raise ObjectNotFound(f'{kind} "{name}" not found')


@dataclass
class Node:
    host_ips: tuple[str, ...] = ("192.0.2.2", "2001:db8::2")
    allocatable: Resources = field(
        default_factory=lambda: {"cpu": Quantity.parse("3500m"), "memory": Quantity.parse("2Gi")}
    )
    pod_level: bool = True


class Server:
    """The claims and volumes of a cluster, in memory; it refuses as an API server does."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Any] = {}
        self.away = False
        self.asked = 0

    def claim(self, name: str, volume: str = "", **fields: Any) -> PersistentVolumeClaim:
        """Create a claim, bound if a volume is given."""
        document = {
            "metadata": {"name": name, "namespace": "default", "uid": f"uid-of-{name}"},
            "spec": {"volumeName": volume},
            "status": {"phase": "Bound" if volume else "Pending"},
        }
        made = from_document(PersistentVolumeClaim, _merged(document, fields))
        self.objects["persistentvolumeclaims", "default", name] = made
        return made

    def volume(self, name: str, claim: str = "", **spec: Any) -> PersistentVolume:
        """Create a volume, bound to a claim if one is given."""
        annotations = spec.pop("annotations", {})
        bound = {"claimRef": {"namespace": "default", "name": claim, "uid": f"uid-of-{claim}"}}
        document = {
            "metadata": {"name": name, "annotations": annotations},
            "spec": (bound if claim else {}) | {"accessModes": ["ReadWriteOnce"]} | spec,
        }
        made = from_document(PersistentVolume, document)
        self.objects["persistentvolumes", "", name] = made
        return made

    async def get(self, resource: Resource[T], name: str, namespace: str = "", *, params: Any = ()) -> T:
        self.asked += 1
        if self.away:
            raise Unreachable("https://192.0.2.1:6443", "it is away")
        try:
            found: T = self.objects[resource.plural, namespace, name]
        except KeyError:
            raise NotFound(404, "NotFound", f'{resource.plural} "{name}" not found') from None
        return found


def _merged(document: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    return {key: document.get(key, {}) | fields.get(key, {}) for key in document | fields}


def volumes_at(
    root: Path,
    objects: PodObjects,
    memory_limit: Callable[[Pod], int | None] = lambda pod: None,
    *,
    server: Server | None = None,
    tasks: TaskScope | None = None,
    node_labels: Callable[[], Mapping[str, str] | None] = lambda: None,
    on_in_use_change: Callable[[], None] | None = None,
    record_event: RecordEvent = lambda pod, kind, reason, message: None,
    record_object_event: RecordObjectEvent = record_no_event,
    checkpoints: Checkpoints | None = None,
) -> PodVolumes:
    cluster = None
    if server is not None:
        cluster = ClusterNode(
            cast(ApiClient, server),
            node_labels,
            on_in_use_change=on_in_use_change,
            record_object_event=record_object_event,
            checkpoints=checkpoints,
        )
    return PodVolumes(
        root,
        objects=objects,
        node=Node(),
        memory=MemoryLimits(memory_limit, ALLOCATABLE),
        options=VolumeOptions(node_name="node-1"),
        cluster=cluster,
        record_event=record_event,
        tasks=tasks,
    )


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """An agent's root, in which nothing stays mounted."""
    yield tmp_path / "root"
    left = plan_unmounts(read_mounts(), tmp_path)
    for point in left:
        unmount(point, detach=True)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def volumes(root: Path, shelf: Shelf) -> PodVolumes:
    return volumes_at(root, shelf)


def pod_with(*volumes: dict[str, Any], metadata: dict[str, Any] | None = None, **spec: Any) -> Pod:
    """A pod with these volumes; its first container mounts all that no container uses."""
    spec = {"containers": [{"name": "main", "image": "i"}], "volumes": list(volumes)} | spec
    first, *others = copy.deepcopy(spec["containers"])
    uses = ("volumeMounts", "volumeDevices")
    used = {use["name"] for one in (first, *others) for kind in uses for use in one.get(kind, ())}
    names = [volume["name"] for volume in volumes if volume["name"] not in used]
    first["volumeMounts"] = [
        *first.get("volumeMounts", ()),
        *({"name": name, "mountPath": f"/{name}"} for name in names),
    ]
    spec["containers"] = [first, *others]
    document = {
        "metadata": {"name": "p", "namespace": "default", "uid": "u-1"} | (metadata or {}),
        "spec": spec,
    }
    pod = from_document(Pod, document)
    apply_defaults(pod)
    return pod


def mode_of(path: Path) -> str:
    return oct(stat.S_IMODE(path.lstat().st_mode))


def mounted_at(path: Path) -> list[Mount]:
    return [entry for entry in read_mounts() if entry.point == path.resolve()]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
