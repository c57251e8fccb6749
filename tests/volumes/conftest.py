import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.meta import Resources, from_document
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.api.selector import LabelSelector
from pykubelet.host.mounts import Mount, plan_unmounts, read_mounts, unmount
from pykubelet.pods.defaults import apply_defaults
from pykubelet.pods.objects import ObjectError, ObjectMissing, PodObjects
from pykubelet.volumes.pod_volumes import PodVolumes

ALLOCATABLE = 1 << 30

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@dataclass
class Shelf:
    """The objects of a cluster, in memory; a token says what it was asked for."""

    config_maps: dict[str, dict[str, str | bytes]] = field(default_factory=dict)
    secrets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    bundles: dict[str, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    generation: int = 1

    def register(self, pod: Pod) -> None:
        raise AssertionError("not for volumes to do")

    def unregister(self, uid: str) -> None:
        raise AssertionError("not for volumes to do")

    def listen(self, listener: Callable[[str], None]) -> None:
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
        return Secret(data=dict(self.secrets[name]))

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

    def _check(self, kind: str, name: str, there: dict[str, Any]) -> None:
        if name in self.broken:
            raise ObjectError(f"failed to get {kind} {name}: the API server is away")
        if name not in there:
            raise ObjectMissing(f'{kind} "{name}" not found')


@dataclass
class Node:
    host_ips: tuple[str, ...] = ("192.0.2.2", "2001:db8::2")
    allocatable: Resources = field(
        default_factory=lambda: {"cpu": Quantity.parse("3500m"), "memory": Quantity.parse("2Gi")}
    )


def volumes_at(
    root: Path, objects: PodObjects, memory_limit: Callable[[Pod], int | None] = lambda pod: None
) -> PodVolumes:
    return PodVolumes(
        root, objects=objects, node=Node(), memory_limit=memory_limit, allocatable_memory=ALLOCATABLE
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
    """A pod with these volumes, and containers that do not matter."""
    spec = {"containers": [{"name": "main", "image": "i"}], "volumes": list(volumes)} | spec
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
