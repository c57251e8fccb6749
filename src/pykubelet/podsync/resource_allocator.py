"""CPUs, memory and devices of the node: given to a pod when it is admitted, taken back when it has ended.

    admission    the link that gives, through the topology manager; refuses what cannot be given
    made, of     what containers are made with: their CPUs and NUMA nodes
    run          tells running containers when the CPUs that all share are others than before
    forget       takes back, as soon as nothing of a pod runs any more; `keep_only` finds what was missed

What is given out is on disk before the pod is admitted, so an agent that is killed and started again goes on
with the same shares. A pod that finds everything taken waits for those who are on their way out: without
that, a manifest that is edited would be refused, because its old pod still holds what the new one needs.

What the engine asks those who make pods' resource claims ready.

What the engine asks those who give out devices, device plugins and resource claims alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pykubelet.admission.handler import AdmitRejection, Answer, DeferredResult, PodAdmitAttributes
from pykubelet.api import cpuset
from pykubelet.api.duration import Duration
from pykubelet.api.names import is_extended_resource
from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import ResourceStatus
from pykubelet.cm.cpu.manager import CpuManager, CpusetUpdate, RunningContainer
from pykubelet.cm.devices.plugins import GRACE_SECONDS
from pykubelet.cm.devices.run_options import NOTHING, DeviceRunOptions
from pykubelet.cm.memory.manager import MemoryManager
from pykubelet.cm.topology.manager import TopologyManager, TopologyRejection
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.options import ALL, CpusetAssignment
from pykubelet.logs import get_logger
from pykubelet.transport.errors import CriError, NotFound
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
LEAVING_SECONDS = 60.0
"""How long a pod waits for those who have what it needs and are on their way out."""
UpdateContainer = Callable[[str, pb.LinuxContainerResources], Awaitable[None]]
"""Changes resources of a running container, by its id; raises CriError."""


class Devices(Protocol):
    """Who gives devices, as far as it matters here; the topology manager knows it, too."""

    @property
    def holders(self) -> AbstractSet[str]:
        """The uids of pods that have devices."""
        ...

    def forget(self, uid: str) -> None:
        """Take back the devices of a pod of which nothing runs any more."""
        ...

    def awaited(self, pod: Pod) -> Sequence[str]:
        """Return the pod's resources whose plugins have not registered yet since the kubelet started."""
        ...

    async def wait_registered(self, pod: Pod) -> None:
        """Wait until no plugin is `awaited` for the pod any more; that takes bounded time."""
        ...


class ResourceAllocator:
    """A link of admission, and the shares of those who were admitted."""

    for_running = True

    def __init__(
        self,
        cpus: CpuManager,
        memory: MemoryManager,
        topology: TopologyManager,
        devices: Devices | None = None,
    ) -> None:
        """Take who gives, and who decides from which NUMA nodes."""
        self.cpus = cpus
        self.memory = memory
        self._topology = topology
        self._devices = devices
        self._is_leaving: Callable[[str], bool] = lambda uid: False
        self._news = asyncio.Event()
        self._taken_back = asyncio.Event()
        """Set, and replaced by a new one, whenever something was taken back."""

    def listen_to(self, is_leaving: Callable[[str], bool]) -> None:
        """Take who knows whether a pod is on its way out, by its uid; nobody is before that."""
        self._is_leaving = is_leaving

    # Admission

    def admit(self, attempt: PodAdmitAttributes) -> Answer | DeferredResult:
        """Give the pod's containers what they ask for; most pods ask for nothing."""
        pod = attempt.pod
        # What runs has its devices, and need not wait behind others.
        has_them = attempt.running and self._devices is not None and pod.uid in self._devices.holders
        if self._devices is not None and wants_devices(pod) and not has_them:
            if not attempt.running and (missing := self._devices.awaited(pod)):
                # After a reboot pods come before plugins, which may be pods themselves: not in the queue.
                whose = ", ".join(missing)
                return DeferredResult(
                    partial(self._devices.wait_registered, pod),
                    apart=True,
                    again=True,
                    why=f"waiting up to {Duration.of(GRACE_SECONDS)} for the device plugin of {whose}",
                )
            # Where nothing has to be near to anything, a plugin that hangs holds up only who needs it.
            return DeferredResult(lambda: self._give_patiently(pod), apart=self._topology.policy == "none")
        refusal = self._give_at_once(pod)
        if refusal is None or not self._is_coming_free(pod):
            return refusal
        return DeferredResult(lambda: self._give_patiently(pod))

    def _give_at_once(self, pod: Pod) -> AdmitRejection | None:
        before = self.cpus.shared
        answer = self._topology.admit_at_once(pod)
        self._notice(before)
        return _translated(answer)

    async def _give(self, pod: Pod) -> AdmitRejection | None:
        before = self.cpus.shared
        answer = await self._topology.admit(pod)
        self._notice(before)
        return _translated(answer)

    async def _give_patiently(self, pod: Pod) -> AdmitRejection | None:
        """Try again each time that somebody has left, for as long as somebody is leaving."""
        deadline = asyncio.get_running_loop().time() + LEAVING_SECONDS
        while True:
            taken_back = self._taken_back
            refusal = await self._give(pod)
            if refusal is None or not self._is_coming_free(pod):
                return refusal
            log.v(2).info("Pod waits for what pods have that are ending", pod=pod.full_name, podUID=pod.uid)
            try:
                async with asyncio.timeout_at(deadline):
                    await taken_back.wait()
            except TimeoutError:
                return refusal

    def _is_coming_free(self, pod: Pod) -> bool:
        holders = self.cpus.holders | self.memory.holders
        if self._devices is not None:
            holders |= self._devices.holders
        return any(self._is_leaving(uid) for uid in holders if uid != pod.uid)

    # Shares

    def has_exclusive(self, uid: str) -> bool:
        """Whether a container of this pod has CPUs of its own."""
        return self.cpus.has_exclusive(uid)

    def of(self, pod: Pod, container: Container) -> CpusetAssignment:
        """Give the share of a container that is about to be made."""
        if not self.cpus.is_static and self.memory.policy == "None":
            return ALL
        cpus = self.cpus.cpuset_of(pod.uid, container.name)
        nodes = self.memory.memory_nodes(pod.uid, container.name)
        return CpusetAssignment(
            cpus, cpuset.format(nodes), exclusive=bool(self.cpus.exclusive_of(pod.uid, container.name))
        )

    def made(self, pod: Pod, container: Container, container_id: str, cpus: str) -> None:
        """Take note that the runtime has made a container that runs on these CPUs."""
        if cpus:
            self.cpus.told(CpusetUpdate(container_id, cpus))
        self.memory.container_starts(pod, container)

    def forget(self, uid: str) -> None:
        """Take back what a pod has of which nothing runs any more, and nothing will."""
        before = self.cpus.shared
        self.cpus.forget(uid)
        self.memory.forget(uid)
        if self._devices is not None:
            self._devices.forget(uid)
        self._taken_back.set()
        self._taken_back = asyncio.Event()
        self._notice(before)

    def keep_only(self, uids: AbstractSet[str]) -> None:
        """Take back what others than these pods have; only for one who knows all pods of the node."""
        for uid in (self.cpus.holders | self.memory.holders) - uids:
            self.forget(uid)
        self.memory.catch_up()

    # Containers that run

    async def run(
        self, update: UpdateContainer, running: Callable[[], Iterable[RunningContainer]], period: float
    ) -> None:
        """Tell running containers of their CPUs: when what they share changes, and every so many seconds."""
        if not self.cpus.is_static:
            return
        complaints = ErrorLogLimiter(log, "Could not tell containers their CPUs; will be tried again")
        while True:
            self._news.clear()
            for due in self.cpus.reconcile(running()):
                await self._tell(update, due, complaints)
            try:
                async with asyncio.timeout(period):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _tell(self, update: UpdateContainer, due: CpusetUpdate, complaints: ErrorLogLimiter) -> None:
        now = asyncio.get_running_loop().time
        try:
            await update(due.container_id, pb.LinuxContainerResources(cpuset_cpus=due.cpus))
        except NotFound:
            return
        except CriError as err:
            complaints.failed(err, now())
            return
        complaints.succeeded(now())
        self.cpus.told(due)
        log.v(2).info("Told a container its CPUs", containerID=due.container_id, cpus=due.cpus)

    def _notice(self, before: frozenset[int]) -> None:
        """Have running containers told when the CPUs that they share are others than before."""
        if self.cpus.shared != before:
            self._news.set()


def wants_devices(pod: Pod) -> bool:
    """Whether a container asks for what a device plugin may give."""
    return any(
        is_extended_resource(name) and amount.nanos
        for container in (*pod.spec.init_containers, *pod.spec.containers)
        for name, amount in container.resources.limits.items()
    )


def _translated(answer: TopologyRejection | None) -> AdmitRejection | None:
    return None if answer is None else AdmitRejection(answer.reason, answer.message)


class PodClaims(Protocol):
    """Makes claims ready and gives them back; both may be repeated, and cancelled anywhere."""

    async def prepare(self, pod: Pod) -> None:
        """Have all claims of a pod ready, before its sandbox is made; raises ClaimError."""
        ...

    async def unprepare(self, uid: str) -> None:
        """Give back what a pod has of which nothing runs any more; raises ClaimError."""
        ...


class NoClaims:
    """A node without an API server has no claims; a pod that names some is refused when it is read."""

    async def prepare(self, pod: Pod) -> None:
        """Do nothing."""

    async def unprepare(self, uid: str) -> None:
        """Do nothing."""


NO_CLAIMS = NoClaims()


def has_claims(pod: Pod) -> bool:
    """Whether a pod has claims, its own or one for its extended resources."""
    return bool(pod.spec.resource_claims) or pod.status.extended_resource_claim_status is not None


DeviceHealth = Mapping[str, list[ResourceStatus]]
"""How devices are, by the container that has them."""


async def no_grants(pod: Pod, container: Container) -> DeviceRunOptions:
    """Give nothing."""
    return NOTHING


def no_health(pod: Pod) -> DeviceHealth:
    """Know of no devices."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProvider:
    """How devices come to containers, and into their statuses."""

    grants: Callable[[Pod, Container], Awaitable[DeviceRunOptions]] = no_grants
    """What a container that is about to start gets with its devices; raises AllocationError."""
    health: Callable[[Pod], DeviceHealth] = no_health
    """How the devices of a pod's containers are."""


NO_DEVICES = DeviceProvider()
