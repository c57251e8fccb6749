"""A pod engine in memory whose runtime, images, objects and volumes do what a test scripts, by loop time.

The engine is the real one (see `many_pods.py`). The fakes keep a log of the calls that change something, in
the words "create main", "stop main 30", so that a test can state what happened and in which order.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from pykubelet.api.pod import Container, Pod
from pykubelet.apiserver.client import Page, RawPage, Resource
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.linux.cgroupfs import Cgroups
from pykubelet.objects.base import NoObjects
from pykubelet.transport.errors import CriError
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.plugin import MountedVolume
from tests.unit.podworkers.many_pods import NODE, FakeApi, FakeImages, FakeRuntime, Rig, engine_with_fakes

UID = "00000000-0000-0000-0000-00000000aaaa"

NORMAL = {"Pulling", "Pulled", "Created", "Started", "Killing", "SandboxChanged", "DeadlineExceeded"}
"""Reasons of events that report no problem."""

Exit = tuple[float, int]
"""Seconds after its start at which a container ends, and its exit code."""


class ScriptedRuntime(FakeRuntime):
    """A runtime whose containers end when they are told to, and whose calls fail when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.exits: dict[str, list[Exit]] = defaultdict(list)
        """The ends of a container's next runs, by its name; without any it runs until it is stopped."""
        self.failures: dict[str, list[CriError]] = defaultdict(list)
        """What the next calls raise, by their entry in `log`."""
        self.commands: dict[str, Callable[[], int]] = {}
        """The exit codes of commands in containers, by their first word; others succeed."""
        self._timers: set[asyncio.Task[None]] = set()
        self._wall_clock = time.time()
        self._namespaces: dict[str, pb.NamespaceOption] = {}

    def names(self, *, running: bool = True) -> list[str]:
        """Return the names of the containers that run, or of all."""
        return [
            one.metadata.name
            for one in self._containers.values()
            if not running or one.state == pb.CONTAINER_RUNNING
        ]

    def exit(self, name: str, code: int = 0) -> None:
        """End a container that runs."""
        for one in list(self._containers.values()):
            if one.metadata.name == name and one.state == pb.CONTAINER_RUNNING:
                self._exit(one.id, code)

    def lose_sandboxes(self) -> None:
        """End all sandboxes and what runs in them, as a killed pause process does."""
        for sandbox in self._sandboxes.values():
            sandbox.state = pb.SANDBOX_NOTREADY
        for one in list(self._containers.values()):
            if one.state == pb.CONTAINER_RUNNING:
                self._exit(one.id, 137)

    def lose_everything(self) -> None:
        """Forget all sandboxes and containers, as a runtime whose state was deleted during a reboot."""
        self.lose_sandboxes()
        self._sandboxes.clear()
        self._containers.clear()
        self._statuses.clear()

    async def run_pod_sandbox(self, config: pb.PodSandboxConfig, handler: str = "") -> str:
        self._enter(f"run sandbox {config.metadata.attempt}")
        sandbox_id = await super().run_pod_sandbox(config, handler)
        self._namespaces[sandbox_id] = config.linux.security_context.namespace_options
        return sandbox_id

    async def pod_sandbox_status(self, sandbox_id: str) -> pb.PodSandboxStatusResponse:
        found = await super().pod_sandbox_status(sandbox_id)
        found.status.linux.namespaces.options.CopyFrom(self._namespaces[sandbox_id])
        return found

    async def create_container(
        self, sandbox_id: str, config: pb.ContainerConfig, sandbox_config: pb.PodSandboxConfig
    ) -> str:
        self._enter(f"create {config.metadata.name}")
        return await super().create_container(sandbox_id, config, sandbox_config)

    async def start_container(self, container_id: str) -> None:
        name = self._containers[container_id].metadata.name
        self._enter(f"start {name}")
        await super().start_container(container_id)
        if self.exits[name]:
            seconds, code = self.exits[name].pop(0)
            task = asyncio.ensure_future(self._exit_later(container_id, seconds, code))
            self._timers.add(task)
            task.add_done_callback(self._timers.discard)

    async def stop_container(self, container_id: str, grace_seconds: int) -> None:
        if self._containers[container_id].state == pb.CONTAINER_RUNNING:
            self._enter(f"stop {self._containers[container_id].metadata.name} {grace_seconds}")
            await super().stop_container(container_id, grace_seconds)

    async def remove_container(self, container_id: str) -> None:
        if container_id in self._containers:
            self._enter(f"remove {self._containers[container_id].metadata.name}")
        await super().remove_container(container_id)

    async def stop_pod_sandbox(self, sandbox_id: str) -> None:
        self._enter("stop sandbox")
        await super().stop_pod_sandbox(sandbox_id)

    async def remove_pod_sandbox(self, sandbox_id: str) -> None:
        self._enter("remove sandbox")
        await super().remove_pod_sandbox(sandbox_id)

    async def exec_sync(
        self, container_id: str, command: Sequence[str], timeout_seconds: int = 0
    ) -> pb.ExecSyncResponse:
        code = self.commands.get(command[0], lambda: 0)()
        return pb.ExecSyncResponse(exit_code=code, stdout=b"out", stderr=b"")

    def _now(self) -> int:
        # Not before now: the engine compares it with the wall clock, and must not take it for long ago.
        return int((self._wall_clock + asyncio.get_running_loop().time()) * 1e9)

    def _enter(self, call: str) -> None:
        self.log.append(call)
        if self.failures[call]:
            raise self.failures[call].pop(0)

    async def _exit_later(self, container_id: str, seconds: float, code: int) -> None:
        await asyncio.sleep(seconds)
        if container_id in self._containers and self._containers[container_id].state == pb.CONTAINER_RUNNING:
            self._exit(container_id, code)

    def _exit(self, container_id: str, code: int) -> None:
        status = self._statuses[container_id]
        self._set(container_id, pb.CONTAINER_EXITED)
        status.finished_at, status.exit_code = self._now(), code
        status.reason = "Completed" if code == 0 else "Error"
        self._tell(container_id, pb.CONTAINER_STOPPED_EVENT)


class ScriptedImages(FakeImages):
    """An image service that has no image before it is pulled, and whose pulls fail when they are told to."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.pulls: list[str] = []
        self.failures: list[CriError] = []

    async def image_status(self, image: pb.ImageSpec, *, verbose: bool = False) -> pb.ImageStatusResponse:
        if image.image not in self.present:
            return pb.ImageStatusResponse()
        return await super().image_status(image, verbose=verbose)

    async def pull_image(self, image: pb.ImageSpec, *_: object, **__: object) -> str:
        self.pulls.append(image.image)
        if self.failures:
            raise self.failures.pop(0)
        self.present.add(image.image)
        return image.image


class ScriptedObjects(NoObjects):
    """Objects of the API server that keep a log of which pods need them."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def register(self, pod: Pod) -> None:
        self.log.append(f"register {pod.metadata.name}")

    def unregister(self, uid: str) -> None:
        self.log.append("unregister")


class ScriptedVolumes:
    """Volumes that are nowhere; their calls are in a log, and fail when they are told to."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.failures: dict[str, list[VolumeError]] = defaultdict(list)

    async def mount(self, pod: Pod) -> dict[str, MountedVolume]:
        self._enter("mount")
        return {}

    async def sub_paths(
        self, pod: Pod, container: Container, mounted: Mapping[str, MountedVolume], paths: Mapping[int, str]
    ) -> dict[int, str]:
        return {}

    async def refresh(self, pod: Pod) -> None:
        self._enter("refresh")

    async def unmount(self, uid: str) -> None:
        self._enter("unmount")

    def _enter(self, call: str) -> None:
        self.log.append(call)
        if self.failures[call]:
            raise self.failures[call].pop(0)


class ScriptedApi(FakeApi):
    """An API server that may keep the kubelet waiting for its pods, and keeps the events."""

    def __init__(self) -> None:
        super().__init__()
        self.may_list = asyncio.Event()
        self.may_list.set()
        self.recorded: list[tuple[str, str]] = []
        """The reasons and messages of events."""
        self._events: dict[str, Any] = {}

    async def list_page(self, resource: Resource[Any], namespace: str, params: Any) -> RawPage:
        await self.may_list.wait()
        page: Page[Any] = await super().list_page(resource, namespace, params)
        return page

    async def create(self, resource: Resource[Any], obj: Any, namespace: str = "") -> Any:
        # A failed pull is followed by a BackOff of type Normal, a crash by one of type Warning.
        if obj.reason != "BackOff":
            assert obj.type == ("Normal" if obj.reason in NORMAL else "Warning"), obj.reason
        self.recorded.append((obj.reason, obj.message))
        self._events[obj.metadata.name] = obj
        return await super().create(resource, obj, namespace)

    async def patch(self, resource: Resource[Any], name: str, *arguments: Any, **options: Any) -> Any:
        if name in self._events:
            return self._events[name]
        return await super().patch(resource, name, *arguments, **options)

    def put(self, name: str = "web", *, uid: str = UID, **spec: Any) -> None:
        """Create a pod on this node, or replace its spec."""
        kind = "MODIFIED" if name in self.pods else "ADDED"
        status = self.pods[name]["status"] if name in self.pods else {"phase": "Pending"}
        meta = {
            "name": name,
            "namespace": "default",
            "uid": uid,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "generation": 1 if kind == "ADDED" else self.pods[name]["metadata"]["generation"] + 1,
        }
        whole = {"nodeName": NODE, "restartPolicy": "Always", "dnsPolicy": "Default"} | spec
        whole.setdefault("terminationGracePeriodSeconds", 30)
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": whole, "status": status}
        self._write(kind, name, document)

    def delete_pod(self, name: str = "web", grace: int = 30) -> None:
        """Mark a pod as deleted, as a client does."""
        document = self.pods[name]
        meta = document["metadata"] | {
            "deletionTimestamp": "2026-01-01T01:00:00Z",
            "deletionGracePeriodSeconds": grace,
        }
        self._write("MODIFIED", name, document | {"metadata": meta})

    def drop(self, name: str = "web") -> None:
        """Remove a pod at once, as a forced deletion does."""
        self._write("DELETED", name, self.pods[name])

    def status(self, name: str = "web") -> dict[str, Any]:
        """Return a pod's status as the API server has it."""
        found: dict[str, Any] = self.pods[name]["status"]
        return found

    def container(self, name: str, pod: str = "web", key: str = "containerStatuses") -> dict[str, Any]:
        """Return a container's status as the API server has it, empty before it has one."""
        found = [one for one in self.status(pod).get(key, ()) if one["name"] == name]
        return cast(dict[str, Any], found[0]) if found else {}

    def waiting(self, name: str = "main") -> str:
        """Return the reason why a container waits, empty when it does not."""
        state = self.container(name).get("state", {})
        return cast(str, state.get("waiting", {}).get("reason", ""))

    def condition(self, kind: str, pod: str = "web") -> str:
        """Return the status of a pod's condition."""
        return next((one["status"] for one in self.status(pod)["conditions"] if one["type"] == kind), "")


class ScriptedNode:
    """The fakes around one engine after the other, which is restarted with them."""

    def __init__(self, root: Path, cgroups: Cgroups) -> None:
        self.root, self._cgroups = root, cgroups
        self.runtime, self.api, self.images = ScriptedRuntime(), ScriptedApi(), ScriptedImages()
        self.objects, self.volumes = ScriptedObjects(), ScriptedVolumes()
        self.network_errors: list[str] = []
        self.gates = FeatureGates()

    @asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[Rig]:
        """Run an engine until the block is left; the options are those of `engine_with_fakes`."""
        async with engine_with_fakes(
            self.root,
            self._cgroups,
            runtime=self.runtime,
            api=self.api,
            objects=self.objects,
            images=self.images,
            volumes=self.volumes,
            network_errors=lambda: self.network_errors,
            gates=self.gates,
            **options,
        ) as rig:
            yield rig

    async def until(self, condition: Callable[[], object], seconds: float = 300) -> float:
        """Wait until a condition holds; return how long that took, in seconds of loop time."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while not condition():
            assert clock() - began < seconds, f"still waiting after {seconds} s: {self.runtime.log}"
            await asyncio.sleep(0.05)
        return clock() - began


def container(name: str = "main", **spec: Any) -> dict[str, Any]:
    """Return the document of a container."""
    return {"name": name, "image": "busybox", "imagePullPolicy": "IfNotPresent"} | spec
