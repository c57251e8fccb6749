"""Allocation of CPUs, memory and devices to pods: at admission, until no container of the pod runs.

    admit        admission handler that allocates through the topology manager, or rejects the pod
    of, made     CPUs and NUMA nodes of a new container
    run          updates running containers when the shared CPU pool changes
    forget       releases the allocations of a terminated pod; `keep_only` releases those that were missed

Allocations are on disk before the pod is admitted, so a restarted kubelet continues with the same ones. A pod
that finds no free resources waits for terminating pods: otherwise an edited manifest would be rejected,
because its old pod still has the resources. The interfaces to resource claims and devices are here as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pykubelet.admission.handler import AdmitRejection, AdmitResult, DeferredResult, PodAdmitAttributes
from pykubelet.api import cpuset
from pykubelet.api.duration import Duration
from pykubelet.api.names import is_extended_resource
from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import ResourceStatus
from pykubelet.cm.cpu.manager import CpuManager, CpusetUpdate, RunningContainer
from pykubelet.cm.devices.manager import DeviceManager
from pykubelet.cm.devices.plugins import GRACE_SECONDS
from pykubelet.cm.devices.run_options import NO_DEVICE_OPTIONS, DeviceRunOptions
from pykubelet.cm.memory.manager import MemoryManager
from pykubelet.cm.topology.manager import TopologyManager, TopologyRejection
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.configuration.options import UNRESTRICTED, CpusetAssignment
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError, NotFound
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
LEAVING_SECONDS = 60.0
"""Seconds that a pod waits for terminating pods to release resources."""
UpdateContainer = Callable[[str, pb.LinuxContainerResources], Awaitable[None]]
"""Updates the resources of a running container, by its id. Raises CriError."""


class ResourceAllocator:
    """Admission handler that allocates CPUs, memory and devices, and their assignment to containers."""

    for_running = True

    def __init__(
        self,
        cpus: CpuManager,
        memory: MemoryManager,
        topology: TopologyManager,
        devices: DeviceManager | None = None,
    ) -> None:
        """Initialize with the resource managers and the topology manager."""
        self.cpus = cpus
        self.memory = memory
        self._topology = topology
        self._devices = devices
        self._is_terminating: Callable[[str], bool] = lambda uid: False
        self._shared_pool_changed = asyncio.Event()
        self._taken_back = asyncio.Event()
        """Set, and replaced by a new event, whenever resources were released."""

    def start(self, is_terminating: Callable[[str], bool]) -> None:
        """Start to wait for the resources of terminating pods.

        `is_terminating` returns whether a pod terminates, by uid. It is known by the pod engine, which is
        built with this allocator; before the start, no pod counts as terminating.
        """
        self._is_terminating = is_terminating

    # Admission

    def admit(self, attempt: PodAdmitAttributes) -> AdmitResult | DeferredResult:
        """Allocate the resources that the pod's containers request; most pods request none."""
        pod = attempt.pod
        # A running pod has its devices and must not wait behind others.
        has_them = attempt.running and self._devices is not None and pod.uid in self._devices.holders
        if self._devices is not None and wants_devices(pod) and not has_them:
            if not attempt.running and (missing := self._devices.awaited(pod)):
                # After a reboot pods start before plugins, which may be pods: do not block the queue.
                whose = ", ".join(missing)
                return DeferredResult(
                    partial(self._devices.wait_registered, pod),
                    apart=True,
                    again=True,
                    why=f"waiting up to {Duration.from_seconds(GRACE_SECONDS)} "
                    f"for the device plugin of {whose}",
                )
            # Without a topology policy, a plugin that hangs delays only the pods that need it.
            return DeferredResult(lambda: self._give_patiently(pod), apart=self._topology.policy == "none")
        refusal = self._give_at_once(pod)
        if refusal is None or not self._is_coming_free(pod):
            return refusal
        return DeferredResult(lambda: self._give_patiently(pod))

    def _give_at_once(self, pod: Pod) -> AdmitRejection | None:
        before = self.cpus.shared
        answer = self._topology.admit_nowait(pod)
        self._notice(before)
        return _translated(answer)

    async def _give(self, pod: Pod) -> AdmitRejection | None:
        before = self.cpus.shared
        answer = await self._topology.admit(pod)
        self._notice(before)
        return _translated(answer)

    async def _give_patiently(self, pod: Pod) -> AdmitRejection | None:
        """Retry whenever resources are released, as long as some pod is terminating."""
        deadline = asyncio.get_running_loop().time() + LEAVING_SECONDS
        while True:
            taken_back = self._taken_back
            refusal = await self._give(pod)
            if refusal is None or not self._is_coming_free(pod):
                return refusal
            log.v(2).info("Pod waits for resources of terminating pods", pod=pod.full_name, podUID=pod.uid)
            try:
                async with asyncio.timeout_at(deadline):
                    await taken_back.wait()
            except TimeoutError:
                return refusal

    def _is_coming_free(self, pod: Pod) -> bool:
        holders = self.cpus.holders | self.memory.holders
        if self._devices is not None:
            holders |= self._devices.holders
        return any(self._is_terminating(uid) for uid in holders if uid != pod.uid)

    # Assignments

    def has_exclusive(self, uid: str) -> bool:
        """Return whether a container of this pod has exclusive CPUs."""
        return self.cpus.has_exclusive(uid)

    def assignment_for(self, pod: Pod, container: Container) -> CpusetAssignment:
        """Return the assignment of a container that is about to be created."""
        if not self.cpus.is_static and self.memory.policy == "None":
            return UNRESTRICTED
        cpus = self.cpus.cpuset_of(pod.uid, container.name)
        nodes = self.memory.memory_nodes(pod.uid, container.name)
        return CpusetAssignment(
            cpus, cpuset.format(nodes), exclusive=bool(self.cpus.exclusive_of(pod.uid, container.name))
        )

    def on_container_created(self, pod: Pod, container: Container, container_id: str, cpus: str) -> None:
        """Record that a container was created with these CPUs."""
        if cpus:
            self.cpus.record_applied(CpusetUpdate(container_id, cpus))
        self.memory.container_starts(pod, container)

    def forget(self, uid: str) -> None:
        """Release the resources of a pod that does not run and will not run again."""
        before = self.cpus.shared
        self.cpus.forget(uid)
        self.memory.forget(uid)
        if self._devices is not None:
            self._devices.forget(uid)
        self._taken_back.set()
        self._taken_back = asyncio.Event()
        self._notice(before)

    def keep_only(self, uids: AbstractSet[str]) -> None:
        """Release the resources of all pods but these, which must be all pods of the node."""
        for uid in (self.cpus.holders | self.memory.holders) - uids:
            self.forget(uid)
        self.memory.catch_up()

    # Running containers

    async def run(
        self, update: UpdateContainer, running: Callable[[], Iterable[RunningContainer]], period: float
    ) -> None:
        """Update the CPUs of running containers when the shared pool changes, and periodically."""
        if not self.cpus.is_static:
            return
        error_log = ErrorLogLimiter(log, "Failed to update the CPUs of a container, retrying")
        while True:
            self._shared_pool_changed.clear()
            for due in self.cpus.reconcile(running()):
                await self._update_cpus(update, due, error_log)
            try:
                async with asyncio.timeout(period):
                    await self._shared_pool_changed.wait()
            except TimeoutError:
                continue

    async def _update_cpus(
        self, update: UpdateContainer, due: CpusetUpdate, error_log: ErrorLogLimiter
    ) -> None:
        now = asyncio.get_running_loop().time
        try:
            await update(due.container_id, pb.LinuxContainerResources(cpuset_cpus=due.cpus))
        except NotFound:
            return
        except CriError as err:
            error_log.failed(err, now())
            return
        error_log.succeeded(now())
        self.cpus.record_applied(due)
        log.v(2).info("Updated container CPUs", containerID=due.container_id, cpus=due.cpus)

    def _notice(self, before: frozenset[int]) -> None:
        """Request an update of running containers if the shared CPU pool has changed."""
        if self.cpus.shared != before:
            self._shared_pool_changed.set()


def wants_devices(pod: Pod) -> bool:
    """Return whether a container requests an extended resource, which a device plugin may provide."""
    return any(
        is_extended_resource(name) and amount.nanos
        for container in (*pod.spec.init_containers, *pod.spec.containers)
        for name, amount in container.resources.limits.items()
    )


def _translated(answer: TopologyRejection | None) -> AdmitRejection | None:
    return None if answer is None else AdmitRejection(answer.reason, answer.message)


class PodClaims(Protocol):
    """Preparation of resource claims; its methods may be repeated and cancelled at any point."""

    async def prepare(self, pod: Pod) -> None:
        """Prepare all claims of a pod, before its sandbox is created. Raises ClaimError."""
        ...

    async def unprepare(self, uid: str) -> None:
        """Unprepare the claims of a terminated pod. Raises ClaimError."""
        ...


class NoClaims:
    """Claims of a standalone node: none; static pods with claims are rejected when they are parsed."""

    async def prepare(self, pod: Pod) -> None:
        """Do nothing."""

    async def unprepare(self, uid: str) -> None:
        """Do nothing."""


NO_CLAIMS = NoClaims()


def has_claims(pod: Pod) -> bool:
    """Return whether a pod has resource claims, also one for its extended resources."""
    return bool(pod.spec.resource_claims) or pod.status.extended_resource_claim_status is not None


DeviceHealth = Mapping[str, list[ResourceStatus]]
"""Device health by container name."""


async def no_grants(pod: Pod, container: Container) -> DeviceRunOptions:
    """Return no devices."""
    return NO_DEVICE_OPTIONS


def no_health(pod: Pod) -> DeviceHealth:
    """Return no device health."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProvider:
    """Devices of containers, for container starts and statuses."""

    grants: Callable[[Pod, Container], Awaitable[DeviceRunOptions]] = no_grants
    """Returns the device run options of a container that is about to start. Raises AllocationError."""
    health: Callable[[Pod], DeviceHealth] = no_health
    """Returns the health of the devices of a pod's containers."""


NO_DEVICES = DeviceProvider()
