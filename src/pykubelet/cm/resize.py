"""In-place pod resize: checkpoints of allocated and actuated resources, and plans for running containers.

Used by pod admission, the allocation manager (`resize/`) and the runtime manager (`kuberuntime/`).

Two checkpoints survive kubelet restarts: `allocated_pods_state` has the resources that the node has allocated
to each pod, `actuated_pods_state` those that its containers were last set to. Without a resize in progress,
both equal the pods' specs; otherwise they show how far the resize got, also after a crash. The files have
upstream's format and checksum, so that a node can be handed over in either direction; a damaged file is an
error, never repaired.

Pod starts do not wait for the disk: new entries are written WRITE_SECONDS later, many pods in one write. If
the kubelet is killed before, the pod's spec applies. Entries that must not be lost (a new allocation, a
container set to new sizes) are written by `put_durable`.

A changed spec has no effect until the node has allocated it: until then all components use a pod with the old
resources (`with_resources`), which is the same object if nothing differs, so that results cached for it stay
valid.

Plans are pure. Containers that shrink come before those that grow, and the pod's cgroup grows before its
containers and shrinks after them: the containers never have more than their pod, and no new limit is rejected
because another container has not released memory yet. Memory and CPU are two rounds, memory first.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from pykubelet.api.meta import Resources, from_document, to_document
from pykubelet.api.pod import Container, Pod, ResourceRequirements, is_sidecar
from pykubelet.api.quantity import Quantity
from pykubelet.cm.topology.hints import PolicyError
from pykubelet.logs import get_logger
from pykubelet.util.files import write_atomically
from pykubelet.util.tasks import finish_in_thread
from pykubelet.util.text import fnv1a_32

log = get_logger(__name__)
ALLOCATED, ACTUATED = "allocated_pods_state", "actuated_pods_state"
WRITE_SECONDS = 10.0
"""Seconds that new entries wait to be written together with others."""
RETRY_SECONDS = 30.0
"""Seconds until a failed write is retried."""
_PRIVATE = 0o600


class PodResources(msgspec.Struct, frozen=True):
    """Resources of a pod's containers by name, and its pod-level resources if it has any."""

    containers: Mapping[str, ResourceRequirements] = {}
    pod_level: ResourceRequirements | None = None


class ResourceCheckpoint:
    """Resources of pods by UID, in memory and in a checkpoint file; without a file in memory only."""

    def __init__(self, file: Path | None = None, entries: Mapping[str, PodResources] | None = None) -> None:
        self._file = file
        self._entries = dict(entries or {})
        self._number = 0
        self._written = 0
        self._lock = threading.Lock()
        self.changed = asyncio.Event()
        """Set while entries wait to be written."""
        self._listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the UID of each pod whose resources changed; it must not block."""
        self._listeners.append(listener)

    def get(self, uid: str) -> PodResources | None:
        """Return a pod's resources, or None if unknown."""
        return self._entries.get(uid)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, uid: str, resources: PodResources) -> None:
        """Set a pod's resources in memory; `write_behind` updates the file."""
        if self._entries.get(uid) != resources:
            self._entries[uid] = resources
            self.changed.set()
            self._notify(uid)

    def put_durable(self, uid: str, resources: PodResources) -> None:
        """Set a pod's resources and write the file. Raises OSError, after restoring the old entry."""
        known = self._entries.get(uid)
        self.put(uid, resources)
        try:
            self.write()
        except OSError:
            self._entries.pop(uid)
            if known is not None:
                self._entries[uid] = known
            self._notify(uid)
            self.changed.set()  # entries of other pods may be pending
            raise

    def forget(self, uid: str) -> None:
        """Remove a pod; the file is updated with the next change."""
        self._entries.pop(uid, None)
        self._notify(uid)

    def retain(self, uids: Collection[str]) -> None:
        """Remove all pods except these."""
        for uid in self._entries.keys() - uids:
            self.forget(uid)

    def _notify(self, uid: str) -> None:
        for listener in self._listeners:
            listener(uid)

    def write(self) -> None:
        """Write the current entries to the file. Raises OSError."""
        self._save(*self._version())

    async def write_behind(self) -> None:
        """Write changes to the file, delayed and in a thread, until cancelled."""
        while True:
            await self.changed.wait()
            await asyncio.sleep(WRITE_SECONDS)
            number, content = self._version()
            try:
                await finish_in_thread(functools.partial(self._save, number, content))
            except OSError as err:
                log.error(err, "Failed to write pod resources checkpoint, will retry", path=str(self._file))
                self.changed.set()
                await asyncio.sleep(RETRY_SECONDS)

    def close(self) -> None:
        """Write pending entries; a failure is only logged, because no other entries are lost."""
        if not self.changed.is_set():
            return
        try:
            self.write()
        except OSError as err:
            log.error(err, "Failed to write pod resources checkpoint", path=str(self._file))

    def _version(self) -> tuple[int, bytes]:
        self.changed.clear()
        self._number += 1
        return self._number, encode(self._entries) if self._file is not None else b""

    def _save(self, number: int, content: bytes) -> None:
        with self._lock:
            if self._file is None or number < self._written:
                return  # a newer version was written concurrently
            write_atomically(self._file, content, _PRIVATE)
            self._written = number


class AllocationState(msgspec.Struct, frozen=True):
    """The allocated and the actuated checkpoint of a node."""

    allocated: ResourceCheckpoint
    actuated: ResourceCheckpoint

    async def write_behind(self) -> None:
        """Keep both files up to date until cancelled, then write pending entries."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.allocated.write_behind())
                group.create_task(self.actuated.write_behind())
        finally:
            self.allocated.close()
            self.actuated.close()


def in_memory_allocation_state() -> AllocationState:
    """Return checkpoints that exist in memory only."""
    return AllocationState(ResourceCheckpoint(), ResourceCheckpoint())


def open_allocation_state(directory: Path) -> AllocationState:
    """Open the checkpoints of a node. Raises PolicyError when a file exists and is invalid."""
    return AllocationState(_open(directory / ALLOCATED), _open(directory / ACTUATED))


def _open(file: Path) -> ResourceCheckpoint:
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return ResourceCheckpoint(file)
    except OSError as err:
        raise PolicyError(f"cannot read what pods have: {err}") from err
    try:
        return ResourceCheckpoint(file, decode(content))
    except ValueError as err:
        raise PolicyError(
            f"what pods have cannot be known from {file}: {err}. Drain this node and delete that file"
        ) from err


def encode(entries: Mapping[str, PodResources]) -> bytes:
    """Return the content of a checkpoint file; equal entries yield equal bytes."""
    document = {
        uid: {
            "ContainerResources": _sorted(
                {name: _document(requirements) for name, requirements in pod.containers.items()}
            ),
            "PodLevelResources": None if pod.pod_level is None else _document(pod.pod_level),
        }
        for uid, pod in sorted(entries.items())
    }
    data = msgspec.json.encode({"entries": document} if document else {}).decode()
    return msgspec.json.encode({"data": data, "checksum": _checksum(data)})


def decode(content: bytes) -> dict[str, PodResources]:
    """Parse the content of a checkpoint file. Raises ValueError with the cause."""
    try:
        found = msgspec.json.decode(content, type=_File)
        data = msgspec.json.decode(found.data, type=_Data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ValueError(f"it is not what an agent writes ({err})") from err
    if found.checksum != _checksum(found.data):
        raise ValueError("it is damaged or was edited: its checksum does not match its content")
    return {
        uid: PodResources(
            {
                name: from_document(ResourceRequirements, document or {})
                for name, document in (pod.containers or {}).items()
            },
            None if pod.pod_level is None else from_document(ResourceRequirements, pod.pod_level),
        )
        for uid, pod in (data.entries or {}).items()
    }


class _File(msgspec.Struct):
    data: str
    checksum: int


class _Entry(msgspec.Struct):
    containers: dict[str, Any] | None = msgspec.field(name="ContainerResources", default=None)
    pod_level: dict[str, Any] | None = msgspec.field(name="PodLevelResources", default=None)


class _Data(msgspec.Struct):
    entries: dict[str, _Entry] | None = None


def _document(requirements: ResourceRequirements) -> dict[str, Any]:
    document: dict[str, Any] = to_document(requirements)
    return {
        key: _sorted(value) if isinstance(value, dict) else value for key, value in document.items() if value
    }


def _sorted(document: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(document.items()))


def _checksum(data: str) -> int:
    # Upstream hashes the output of Go's debugging printer for the text.
    return fnv1a_32(f"(string){data}".encode())


RESIZABLE = ("cpu", "memory")
_ZERO = Quantity.from_units(0)
_NANOS_PER_MILLI = 10**6


class Scope(NamedTuple):
    """Resizable parts of a pod besides containers and sidecars, each with its feature gate."""

    pod_level: bool = True
    """Pod-level resources (`InPlacePodLevelResourcesVerticalScaling`)."""
    init: bool = True
    """Init containers other than sidecars (`InPlacePodVerticalScalingInitContainers`)."""


class ContainerSizes(NamedTuple):
    """Enforced sizes of a container in bytes and millicores; 0 if unset."""

    memory_limit: int = 0
    memory_request: int = 0
    cpu_limit: int = 0
    cpu_request: int = 0


def resizable(pod: Pod, scope: Scope) -> Iterator[Container]:
    """Yield the containers that can be resized."""
    for container in pod.spec.init_containers:
        if scope.init or is_sidecar(container):
            yield container
    yield from pod.spec.containers


def resources_of(pod: Pod, scope: Scope) -> PodResources:
    """Return the resources in a pod's spec as a checkpoint entry."""
    return PodResources(
        {container.name: container.resources for container in resizable(pod, scope)},
        pod.spec.resources if scope.pod_level else None,
    )


def with_resources(pod: Pod, resources: PodResources, scope: Scope) -> Pod:
    """Return the pod with these resources; the same object if it already has them."""

    def changed(containers: Iterable[Container]) -> list[Container] | None:
        found = [_with(container, resources.containers.get(container.name)) for container in containers]
        return found if any(new is not old for new, old in zip(found, containers, strict=True)) else None

    spec = pod.spec
    if (ordinary := changed(spec.containers)) is not None:
        spec = msgspec.structs.replace(spec, containers=ordinary)
    if (init := changed(spec.init_containers)) is not None:
        spec = msgspec.structs.replace(spec, init_containers=init)
    if scope.pod_level and spec.resources != resources.pod_level:
        spec = msgspec.structs.replace(spec, resources=resources.pod_level)
    return pod if spec is pod.spec else msgspec.structs.replace(pod, spec=spec)


def sizes_of(resources: ResourceRequirements, pod_level: ResourceRequirements | None) -> ContainerSizes:
    """Return a container's sizes; pod-level limits apply to containers without a limit."""
    limits = effective_limits(resources, pod_level)
    return ContainerSizes(
        memory_limit=int(limits.get("memory", _ZERO)),
        memory_request=int(resources.requests.get("memory", _ZERO)),
        cpu_limit=limits.get("cpu", _ZERO).milli,
        cpu_request=resources.requests.get("cpu", _ZERO).milli,
    )


def with_sizes(container: Container, sizes: ContainerSizes) -> Container:
    """Return the container with these sizes."""
    own = container.resources
    limits, requests = dict(own.limits), dict(own.requests)
    for amounts, name, size in (
        (limits, "memory", Quantity.from_units(sizes.memory_limit, "binary")),
        (limits, "cpu", Quantity(sizes.cpu_limit * _NANOS_PER_MILLI)),
        (requests, "memory", Quantity.from_units(sizes.memory_request, "binary")),
        (requests, "cpu", Quantity(sizes.cpu_request * _NANOS_PER_MILLI)),
    ):
        # A request of 0 stays: without it, the limit would be the default request. An equal amount keeps
        # its notation.
        if (size.nanos or name in amounts) and amounts.get(name) != size:
            amounts[name] = size
    return msgspec.structs.replace(
        container, resources=msgspec.structs.replace(own, limits=limits, requests=requests)
    )


def effective_limits(resources: ResourceRequirements, pod_level: ResourceRequirements | None) -> Resources:
    """Return a container's limits as enforced: pod-level limits apply where it has none."""
    limits = dict(resources.limits)
    for name in RESIZABLE:
        bound = pod_level.limits.get(name, _ZERO) if pod_level is not None else _ZERO
        if bound.nanos and not limits.get(name, _ZERO).nanos:
            limits[name] = bound
    return limits


def effective_resources(container: Container, pod: Pod, scope: Scope) -> ResourceRequirements:
    """Return the resources that a container started now is set to, as a checkpoint entry."""
    pod_level = pod.spec.resources if scope.pod_level else None
    if pod_level is None or not pod_level.limits:
        return container.resources
    return msgspec.structs.replace(
        container.resources, limits=effective_limits(container.resources, pod_level)
    )


def with_larger_requests(pod: Pod, actual: PodResources, scope: Scope) -> Pod:
    """Return the pod with the larger of its allocated and its actuated requests.

    Resources that a pod is about to release are not free before it has released them.
    """

    def larger(
        allocated: ResourceRequirements, actuated: ResourceRequirements | None
    ) -> ResourceRequirements:
        more = {
            name: actuated.requests[name]
            for name in RESIZABLE
            if actuated is not None
            and actuated.requests.get(name, _ZERO) > allocated.requests.get(name, _ZERO)
        }
        return (
            msgspec.structs.replace(allocated, requests={**allocated.requests, **more}) if more else allocated
        )

    larger_resources = PodResources(
        {
            container.name: larger(container.resources, actual.containers.get(container.name))
            for container in resizable(pod, scope)
        },
        None if pod.spec.resources is None else larger(pod.spec.resources, actual.pod_level),
    )
    return with_resources(pod, larger_resources, scope)


def _with(container: Container, resources: ResourceRequirements | None) -> Container:
    if resources is None or resources == container.resources:
        return container
    return msgspec.structs.replace(container, resources=resources)


Resource = Literal["memory", "cpu"]
Part = Literal["memory", "quota", "shares"]
"""A setting of a pod's cgroup."""


@dataclass(frozen=True, slots=True)
class ContainerResize:
    """Pending resize of a running container."""

    name: str
    desired: ContainerSizes
    current: ContainerSizes | None = None
    """None if unknown: the container is then set again, and never restarted for it."""
    restart: bool = False
    """Whether the container's resize policy requires a restart."""

    def change(self, resource: Resource) -> int:
        """Return by how much a resource's limit, or else its request, grows; negative if it shrinks."""
        now = self.current or ContainerSizes()
        if resource == "memory":
            return self.desired.memory_limit - now.memory_limit or (
                self.desired.memory_request - now.memory_request
            )
        return self.desired.cpu_limit - now.cpu_limit or self.desired.cpu_request - now.cpu_request

    def after(self, resource: Resource) -> ContainerSizes:
        """Return the sizes after a resource's round; the memory round leaves CPU unchanged."""
        now, new = self.current, self.desired
        if now is None or resource == "cpu":
            return new
        return new._replace(cpu_limit=now.cpu_limit, cpu_request=now.cpu_request)


@dataclass(frozen=True, slots=True)
class ResizePlan:
    """Difference between a pod's allocated and actuated resources."""

    containers: Mapping[str, ContainerResize] = field(default_factory=dict)
    """Resizes by container name; running containers only."""
    pod_level: bool = False
    """Whether pod-level resources differ."""
    pod: bool = False
    """Whether the pod's cgroup was last set for another allocation: some containers may not run."""

    def __bool__(self) -> bool:
        return self.pod_level or self.pod or bool(self.containers)


NO_RESIZE = ResizePlan()


class PodLimits(NamedTuple):
    """Settings of a pod's cgroup: bytes, microseconds per period, CPU shares; a quota of -1 is unlimited."""

    memory: int
    quota: int
    shares: int


def plan_resize(
    pod: Pod, running: Collection[str], actuated: PodResources | None, scope: Scope
) -> ResizePlan:
    """Compare the allocated resources of a pod with the actuated ones of its running containers."""
    known = actuated or PodResources()
    pod_level = pod.spec.resources if scope.pod_level else None
    found = {}
    for container in resizable(pod, scope):
        if container.name in running:
            actual = known.containers.get(container.name)
            if actual is container.resources and pod_level is None and known.pod_level is None:
                continue  # the common case, in every sync of nearly all pods
            current = (
                sizes_of(actual, known.pod_level if scope.pod_level else None) if actual is not None else None
            )
            desired = sizes_of(container.resources, pod_level)
            if desired != current:
                restart = current is not None and _restarts(container, current, desired)
                found[container.name] = ContainerResize(container.name, desired, current, restart)
    differs = _pod_level_sizes(pod_level) != _pod_level_sizes(known.pod_level) if scope.pod_level else False
    return ResizePlan(found, differs) if found or differs else NO_RESIZE


def order_resizes(resizes: Sequence[ContainerResize], resource: Resource) -> list[ContainerResize]:
    """Return the containers to set in a resource's round, shrinking ones first.

    A container of unknown sizes is set completely in the last round: the pod's cgroup has capacity by then.
    """
    due = [
        resize
        for resize in resizes
        if (resize.change(resource) if resize.current is not None else resource == "cpu")
    ]
    return sorted(due, key=lambda resize: resize.change(resource) > 0)


def pod_steps(current: PodLimits, desired: PodLimits, resource: Resource) -> tuple[list[Part], list[Part]]:
    """Return the settings of the pod's cgroup to write before and after its containers are resized.

    Limits grow before requests and shrink after them: a request is never above its limit.
    """
    order: tuple[Part, ...] = ("memory",) if resource == "memory" else ("quota", "shares")
    now, new = ({**limits._asdict(), "quota": _bound(limits.quota)} for limits in (current, desired))
    before = [part for part in order if new[part] > now[part]]
    after = [part for part in reversed(order) if new[part] < now[part]]
    return before, after


def shrink_problem(
    limit: int | None,
    now: int,
    usage: int | None,
    resizes: Sequence[ContainerResize],
    usages: Mapping[str, int],
) -> str:
    """Return the reason why memory limits cannot be lowered now, or an empty string.

    `limit` is the desired limit of the pod's cgroup in bytes, None for no change, `now` its current limit,
    `usage` its usage; `usages` are those of containers by name.
    """
    problems = []
    if limit is not None and limit < now:
        if usage is None:
            problems.append("missing pod memory usage")
        elif usage >= limit:
            problems.append(f"attempting to set pod memory limit ({limit}) below current usage ({usage})")
    for resize in resizes:
        new_limit = resize.desired.memory_limit
        if not shrinks(resize):
            continue
        if resize.name not in usages:
            problems.append(f'missing container "{resize.name}" memory usage')
        elif usages[resize.name] >= new_limit:
            problems.append(
                f'attempting to set container "{resize.name}" memory limit ({new_limit}) '
                f"below current usage ({usages[resize.name]})"
            )
    if not problems:
        return ""
    causes = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
    return f"cannot decrease memory limits: {causes}"


def shrinks(resize: ContainerResize) -> bool:
    """Return whether a container's memory limit is lowered or newly set."""
    if resize.current is None or not resize.desired.memory_limit:
        return False
    return not resize.current.memory_limit or resize.desired.memory_limit < resize.current.memory_limit


def _restarts(container: Container, current: ContainerSizes, desired: ContainerSizes) -> bool:
    changed = {
        "memory": (current.memory_limit, current.memory_request)
        != (desired.memory_limit, desired.memory_request),
        "cpu": (current.cpu_limit, current.cpu_request) != (desired.cpu_limit, desired.cpu_request),
    }
    policies = {policy.resource_name: policy.restart_policy for policy in reversed(container.resize_policy)}
    return any(changed[name] and policies.get(name) == "RestartContainer" for name in changed)


def _bound(quota: int) -> float:
    """Return a quota for comparison: a first limit shrinks the pod, so it is set after the containers'."""
    return quota if quota >= 0 else math.inf


def _pod_level_sizes(pod_level: ResourceRequirements | None) -> ContainerSizes:
    return sizes_of(pod_level, None) if pod_level is not None else ContainerSizes()
