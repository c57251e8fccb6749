"""A node with a CSI driver: the kind itself, a driver process, and an API server in memory."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.core import ObjectReference
from pykubelet.api.meta import from_document, to_document
from pykubelet.api.pod import Pod
from pykubelet.api.storage import PersistentVolume, PersistentVolumeClaim
from pykubelet.apiserver.client import PatchKind, Resource, T
from pykubelet.apiserver.errors import AlreadyExists, Conflict, NotFound
from pykubelet.linux.mounts import plan_unmounts, read_mounts, unmount
from pykubelet.pluginmanager.registration import PluginRegistration
from pykubelet.podconfig.checkpoints import Checkpoints
from pykubelet.podconfig.defaults import apply_defaults
from pykubelet.volumes.csi.names import attachment_name
from pykubelet.volumes.csi.plugin import CsiPlugin
from pykubelet.volumes.metrics import VolumeMetrics
from pykubelet.volumes.plugin import MemoryLimits, VolumeHost, VolumeOptions, VolumeToMount
from tests.support import strategic
from tests.support.csi_driver.process import DRIVER, DriverProcess, driver_process
from tests.support.object_api import ObjectApi
from tests.support.volumes import Node, Shelf

NODE = "node-of-tests"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


class StorageApi(ObjectApi):
    """Objects in memory that can be created, patched and deleted; those of the cluster have no namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.put("nodes", NODE, "", labels={}, status={})

    async def create(self, resource: Resource[T], obj: T, namespace: str = "") -> T:
        key = (resource.plural, namespace, obj.metadata.name)
        if key in self.objects:
            raise AlreadyExists(409, "AlreadyExists")
        document = to_document(obj)
        meta = document.pop("metadata")
        self.put(resource.plural, obj.metadata.name, namespace, **document)
        self.objects[key]["metadata"] |= {k: v for k, v in meta.items() if k != "uid"}
        return await self.get(resource, obj.metadata.name, namespace)

    async def patch(
        self,
        resource: Resource[T],
        name: str,
        patch: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        namespace: str = "",
        *,
        kind: PatchKind = PatchKind.STRATEGIC,
        subresource: str = "",
    ) -> T:
        await self._answer("patch", f"{resource.plural}/{namespace}/{name}", ())
        assert isinstance(patch, Mapping)
        old = self.objects.get((resource.plural, namespace, name))
        if old is None:
            raise NotFound(404, "NotFound")
        version = patch.get("metadata", {}).get("resourceVersion")
        if version is not None and version != old["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict")
        new = strategic.apply_patch(old, dict(patch))
        meta = new.pop("metadata")
        self.put(resource.plural, name, namespace, **new)
        self.objects[(resource.plural, namespace, name)]["metadata"] |= {
            key: value for key, value in meta.items() if key != "resourceVersion"
        }
        return await self.get(resource, name, namespace)

    async def delete(
        self,
        resource: Resource[T],
        name: str,
        namespace: str = "",
        *,
        grace_period_seconds: int | None = None,
        uid: str = "",
    ) -> None:
        self.remove(resource.plural, name, namespace)


class Rig:
    """The kind with all that is around it."""

    def __init__(self, base: Path, api: StorageApi | None) -> None:
        self.root = base / "root"
        self.base = base
        self.api = api
        self.shelf = Shelf()
        self.woken: list[str] = []
        self.events: list[tuple[str, str, str]] = []
        self.pods: dict[str, Pod] = {}
        """The pods that can be found by their uid."""
        self.sweeps = 0
        self.numbers = CollectorRegistry()
        self._metrics = VolumeMetrics(self.numbers)
        self.registry = self.root / "plugins_registry"
        self._registrations: dict[int, PluginRegistration] = {}
        """Those that run, by the kind's identity."""
        self.kind = self.new_kind()

    def new_kind(
        self,
        *,
        health: bool = False,
        clock: Callable[[], float] = time.time,
        attaches: bool = False,
        checkpoints: Checkpoints | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> CsiPlugin:
        """The kind as a new agent has it."""
        given = VolumeHost(
            self.root,
            self.shelf,
            Node(),
            MemoryLimits(lambda pod: None, 1 << 30),
            api=self.api,
            options=VolumeOptions(node_name=NODE),
            wake=self.woken.append,
            record_event=self._tell,
            find_pod=self.pods.get,
            request_cleanup=self._sweep,
            metrics=self._metrics,
            record_object_event=self._tell_of,
            volume_health=health,
            attaches_volumes=attaches,
            checkpoints=checkpoints,
            on_ready=on_ready,
        )
        return CsiPlugin(given, clock)

    @asynccontextmanager
    async def running(self, kind: CsiPlugin | None = None) -> AsyncIterator[CsiPlugin]:
        """Let the kind run, with the registration of plugins."""
        kind = kind or self.kind
        registration = PluginRegistration(self.registry, kind.handlers)
        self._registrations[id(kind)] = registration
        tasks = [asyncio.create_task(kind.run()), asyncio.create_task(registration.run())]
        try:
            yield kind
            for task in tasks:
                assert not task.done(), task.exception()
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def until(self, what: str, look: Callable[[], object], seconds: float = 60) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not look():
            assert asyncio.get_running_loop().time() < deadline, what
            await asyncio.sleep(0.02)

    async def registered(self, kind: CsiPlugin | None = None, driver: str = DRIVER) -> None:
        """Wait until a driver can be used, and was told so: one that dies before is not registered."""
        kind = kind or self.kind
        registration = self._registrations[id(kind)]

        def told() -> bool:
            return any(
                taken and Path(socket).name.startswith(driver)
                for socket, taken in registration.sockets().items()
            )

        await self.until(f"{driver} to register", lambda: driver in kind.drivers.names and told(), 60)

    def driver_object(self, **spec: Any) -> None:
        """Create the driver's CSIDriver, with what the API server fills in."""
        assert self.api is not None
        filled = {
            "attachRequired": False,
            "podInfoOnMount": False,
            "volumeLifecycleModes": ["Persistent", "Ephemeral"],
            "fsGroupPolicy": "ReadWriteOnceWithFSType",
            "requiresRepublish": False,
        }
        self.api.put("csidrivers", DRIVER, "", spec=filled | spec)

    def attach(self, handle: str, *, driver: str = DRIVER, **status: Any) -> None:
        """Create a VolumeAttachment as an attacher leaves it."""
        assert self.api is not None
        name = attachment_name(handle, driver, NODE)
        self.api.put("volumeattachments", name, "", status={"attached": True} | status)

    def mounts(self) -> list[Path]:
        return [mount.point for mount in read_mounts() if self.base in mount.point.parents]

    def left(self) -> list[str]:
        """What is left of volumes below the root: files and mounts."""
        files = [
            str(path.relative_to(self.root))
            for path in self.root.rglob("*")
            if not path.is_dir() and not path.is_relative_to(self.registry)
        ]
        return files + [str(point) for point in self.mounts()]

    def _sweep(self) -> None:
        self.sweeps += 1

    def _tell(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        self.events.append((pod.metadata.name, reason, message))

    def _tell_of(self, about: ObjectReference, kind: str, reason: str, message: str) -> None:
        self.events.append((about.name, reason, message))


def make_pod(uid: str = "u-1", **spec: Any) -> Pod:
    """A pod of the namespace shop."""
    document = {
        "metadata": {"name": f"pod-{uid}", "namespace": "shop", "uid": uid},
        "spec": {"containers": [{"name": "main", "image": "i"}], "serviceAccountName": "clerk", **spec},
    }
    pod = from_document(Pod, document)
    apply_defaults(pod)
    return pod


def inline(pod: Pod, name: str = "data", driver: str = DRIVER, **source: Any) -> VolumeToMount:
    """A volume that lives with its pod."""
    volume = {"name": name, "csi": {"driver": driver, **source}}
    held = from_document(Pod, {"metadata": {"uid": pod.uid}, "spec": {"containers": [], "volumes": [volume]}})
    found = held.spec.volumes[0]
    return VolumeToMount(pod, found, "csi", found.csi, name)


def persistent(
    pod: Pod,
    handle: str = "vol-1",
    *,
    block: bool = False,
    modes: Sequence[str] = ("ReadWriteOnce",),
    size: str = "16Mi",
    claimed: str = "16Mi",
    read_only: bool = False,
    mount_options: tuple[str, ...] = (),
    **source: Any,
) -> VolumeToMount:
    """A volume behind a claim; the persistent volume's name is `pv-HANDLE`."""
    name = f"pv-{handle}"
    pv = from_document(
        PersistentVolume,
        {
            "metadata": {"name": name},
            "spec": {
                "accessModes": list(modes),
                "capacity": {"storage": size},
                "mountOptions": list(mount_options),
                "volumeMode": "Block" if block else "Filesystem",
                "csi": {"driver": DRIVER, "volumeHandle": handle, **source},
            },
        },
    )
    claim = from_document(
        PersistentVolumeClaim,
        {
            "metadata": {"name": "claim", "namespace": "shop", "uid": "uid-claim"},
            "status": {"phase": "Bound", "capacity": {"storage": claimed}},
        },
    )
    held = from_document(
        Pod,
        {
            "metadata": {"uid": pod.uid},
            "spec": {
                "containers": [],
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "claim"}}],
            },
        },
    )
    return VolumeToMount(
        pod,
        held.spec.volumes[0],
        "csi",
        pv.spec.csi,
        name,
        persistent=pv,
        claim=claim,
        read_only=read_only,
        block=block,
        mount_options=mount_options,
    )


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory with a short path, in which nothing stays mounted."""
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as parent:
        path = Path(parent).resolve()
        try:
            yield path
        finally:
            for point in plan_unmounts(read_mounts(), path):
                unmount(point, detach=True)


@pytest.fixture
def rig(base: Path) -> Rig:
    """A node of a cluster."""
    return Rig(base, StorageApi())


@pytest.fixture
def alone(base: Path) -> Rig:
    """A node without a cluster."""
    return Rig(base, None)


@pytest.fixture
def make_driver(base: Path) -> Iterator[Callable[..., DriverProcess]]:
    """Start driver processes that are gone at the end, with their loop devices and mounts."""
    with ExitStack() as stack:
        started = []

        def make(*options: str, folder: str = "driver") -> DriverProcess:
            driver = stack.enter_context(
                driver_process(base / folder, base / "root" / "plugins_registry", *options)
            )
            started.append(driver)
            return driver

        yield make
        for point in plan_unmounts(read_mounts(), base):
            unmount(point, detach=True)


def api_of(rig: Rig) -> StorageApi:
    assert rig.api is not None
    return rig.api
