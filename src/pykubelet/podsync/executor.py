"""Doing what was decided about a pod: kill, prepare, sandbox, containers.

Starting is bounded (`start_gate.py`): a pod holds its turn from its sandbox to its last container
and gives it away while it waits for something slow that is not the runtime's work, an image or a
hook. Images are looked for while the sandbox is being made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pykubelet.api.duration import Duration
from pykubelet.api.meta import Resources
from pykubelet.api.pod import Container, Pod, PodSpec, is_sidecar
from pykubelet.cm.cgroups.pod_cgroups import PodCgroup
from pykubelet.cm.cgroups.values import CgroupValues
from pykubelet.cm.dra.claims import ClaimError
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.decide import Actions
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.kuberuntime.kill import ContainerKiller, KillError, containers_by_name
from pykubelet.kuberuntime.labels import container_hash
from pykubelet.kuberuntime.metrics import StartMetrics
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.kuberuntime.options import extra_groups
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.kuberuntime.removal import ContainerRemover
from pykubelet.kuberuntime.start import ContainerStarter, PodStartContext, StartError
from pykubelet.kuberuntime.user_namespaces import UserNamespaces
from pykubelet.objects.base import ObjectError
from pykubelet.podconfig.pod_history import PodHistory, field_of
from pykubelet.podsync.contract import PodLifecycleEvent, PodRejected, SyncError
from pykubelet.podsync.resource_allocator import NO_CLAIMS, PodClaims, has_claims
from pykubelet.podsync.start_limiter import StartLimiter, StartSlot
from pykubelet.resize.allocation_manager import AllocationManager, PodResizeStep
from pykubelet.status.containers import StartFailure
from pykubelet.transport.errors import CriError
from pykubelet.util.backoff import BackOff
from pykubelet.volumes.errors import VolumeError, failure_event
from pykubelet.volumes.plugin import MountedVolume

MOUNT_SECONDS = 0.3
"""How long volumes may take before others get the turn of a pod that waits for them."""
NETWORK_SECONDS = 10.0
"""When to say again that there is no network for a sandbox; when there is, its pod is woken."""
RETRY_SECONDS = 10.0
"""When to try again to start a container that could not be started."""
FAILURE_SECONDS = 5.0
"""How long a container's status shows why its image could not be pulled, before it shows ImagePullBackOff."""
CRASH_EXPIRY_SECONDS = 600.0
"""How long a container must have run for its crash-loop back-off to start over, whatever the maximum is."""
CRASH_SECONDS = (10.0, 300.0)
"""The first and the longest crash-loop back-off delay."""
REDUCED_CRASH_SECONDS = (1.0, 60.0)
"""The same with the feature gate ReduceDefaultCrashLoopBackOffDecay."""


def crash_loop_back_off(config: KubeletConfiguration, gates: FeatureGates) -> BackOff:
    """Return the back-off of crashing containers as the configuration and the feature gates have it.

    `crashLoopBackOff.maxContainerRestartPeriod`, which has a default, wins over the reduced maximum.
    """
    reduced = gates.enabled("ReduceDefaultCrashLoopBackOffDecay")
    first, limit = REDUCED_CRASH_SECONDS if reduced else CRASH_SECONDS
    configured = config.crash_loop_back_off.max_container_restart_period
    if configured is not None and gates.enabled("KubeletCrashLoopBackOffMax"):
        limit = configured.seconds
    return BackOff(min(first, limit), limit, CRASH_EXPIRY_SECONDS)


def _wait_after(failure: StartError) -> float:
    """Return the seconds until the next attempt to start a container, or to report why it waits."""
    if failure.retry_after is None:
        return RETRY_SECONDS
    if failure.reason == "ImagePullBackOff":
        return failure.retry_after
    # A pull that failed is followed by a back-off delay of minutes, which the status must show soon.
    return min(failure.retry_after, FAILURE_SECONDS)


class Volumes(Protocol):
    """Mounts a pod's volumes."""

    async def mount(self, pod: Pod) -> dict[str, MountedVolume]:
        """Have all of the pod's volumes ready; raises VolumeError."""
        ...

    async def sub_paths(
        self, pod: Pod, container: Container, mounted: Mapping[str, MountedVolume], paths: Mapping[int, str]
    ) -> dict[int, str]:
        """Have parts of volumes ready for a container, by the mount's index; raises VolumeError."""
        ...

    async def refresh(self, pod: Pod) -> None:
        """Bring what the pod's mounted volumes show of the API up to date; raises VolumeError."""
        ...

    async def unmount(self, uid: str) -> None:
        """Take down whatever is mounted for a pod; raises VolumeError."""
        ...


class Cgroups(Protocol):
    """Makes and removes pods' cgroups."""

    async def ensure(self, pod: Pod) -> str:
        """Have the pod's cgroup with its limits; gives the name that the runtime takes. Raises OSError."""
        ...

    def exists(self, pod: Pod) -> bool:
        """Whether the pod's cgroup is there, in all hierarchies."""
        ...

    def in_force(self, pod: Pod, settings: CgroupValues | None = None) -> tuple[Resources, Resources] | None:
        """Give the limits and requests that the pod's cgroup enforces; None when it has none.

        `settings`: what was read from it, where that may be something else than what the pod says.
        """
        ...

    def group(self, pod: Pod) -> PodCgroup | None:
        """Give the pod's own cgroup, to be resized; None when it has none."""
        ...

    def uids(self) -> set[str]:
        """Pods that have a cgroup."""
        ...

    async def update_qos(self, pods: Sequence[Pod]) -> None:
        """Share the machine among the classes of these pods."""
        ...

    async def remove(self, uid: str) -> None:
        """Remove the pod's cgroups, and kill what is still in them. Raises OSError."""
        ...


HandlerOf = Callable[[Pod], Awaitable[str]]
"""Gives the runtime handler for a pod, empty for the default one; raises ObjectError."""


@dataclass(slots=True)
class PodSyncState:
    """What is remembered of a pod between steps."""

    order: int
    """Its place among all pods by age: the older one is started first."""
    failures: dict[str, StartFailure] = field(default_factory=dict)
    untold: set[str] = field(default_factory=set)
    """Containers that have begun to wait after a crash in the last step: the next one tells of it."""
    restart_requested: set[str] = field(default_factory=set)
    observed: ObservedPod | None = None
    mounted: bool = False
    """Whether the last step mounted the pod's volumes, which also brings them up to date."""
    current: bool = False
    """Whether nothing was done to the pod since it was looked at."""
    ended: set[str] = field(default_factory=set)
    """Containers and sandboxes that an event said have ended; CRI may not show it yet."""
    busy: bool = False
    """Whether a step is under way."""
    late: list[PodLifecycleEvent] = field(default_factory=list)
    """What happened in the runtime during the step."""
    ends: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By a container's name: which one ended last, and when in the loop's time."""
    began: float | None = None
    """When the pod's deadline began to count, in the loop's time."""
    registered: PodSpec | None = None
    """The spec for which the API's objects are kept at hand."""
    stopped: set[str] = field(default_factory=set)
    """Sandboxes that were stopped in order, network and all."""


@dataclass(frozen=True, slots=True)
class _Running:
    """The sandbox that containers are started in."""

    id: str
    ips: tuple[str, ...]
    config: pb.PodSandboxConfig
    setting: PodStartContext


class ActionExecutor:
    """Carries out decisions."""

    def __init__(
        self,
        *,
        starter: ContainerStarter,
        remover: ContainerRemover,
        killer: ContainerKiller,
        volumes: Volumes,
        cgroups: Cgroups,
        dirs: PodDirs,
        journal: PodHistory,
        gate: StartLimiter,
        crash_back_off: BackOff,
        user_namespaces: UserNamespaces,
        handler_of: HandlerOf,
        claims: PodClaims = NO_CLAIMS,
        resizing: PodResizeStep | None = None,
        network_errors: Callable[[], Sequence[str]] = lambda: (),
        metrics: StartMetrics | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._starter = starter
        self._remover = remover
        self._killer = killer
        self._volumes = volumes
        self._cgroups = cgroups
        self._dirs = dirs
        self._journal = journal
        self._gate = gate
        self._back_off = crash_back_off
        self._user_namespaces = user_namespaces
        self._handler_of = handler_of
        self._claims = claims
        self._resizing = resizing or PodResizeStep(AllocationManager(journal))
        self._network_errors = network_errors
        self._metrics = metrics or StartMetrics()
        self._clock = clock

    async def apply(
        self, pod: Pod, observed: ObservedPod, actions: Actions, memory: PodSyncState
    ) -> float | None:
        """Do what was decided; gives in how many seconds to try again what failed.

        Raises StepError when nothing more can be done now.
        """
        if actions.create_sandbox and not pod.spec.host_network:
            self._check_network(pod)
        if actions.create_sandbox and actions.sandbox_id:
            message = "Pod sandbox changed, it will be killed and re-created."
            self._journal.event(pod, "Normal", "SandboxChanged", message)
        try:
            await self._kill(pod, observed, actions)
        except (KillError, CriError) as err:
            raise SyncError(str(err)) from err
        if actions.kill_pod and not actions.create_sandbox:
            return None
        waits, due = self._due(pod, observed, actions, memory)
        if actions.resize and not await self._resizing.apply(pod, actions):
            waits.append(RETRY_SECONDS)
        if not due and not actions.create_sandbox:
            return min(waits, default=None)
        async with self._gate.turn(memory.order) as turn:
            memory.mounted = True
            setting = await self._prepare(pod, turn)
            if actions.create_sandbox:
                await self._prepare_claims(pod, turn)
            config = self._sandbox_config(pod, actions, setting)
            try:
                async with asyncio.TaskGroup() as group:
                    images = {
                        container.name: group.create_task(self._image(pod, container, config))
                        for container in due
                    }
                    running = await self._sandbox(pod, observed, actions, config, setting)
                    for container in due:
                        image = await turn.while_away(images[container.name])
                        failure = await self._start(pod, container, image, running, observed, turn)
                        if failure is None:
                            memory.failures.pop(container.name, None)
                            if container.name in actions.start_init and is_sidecar(container):
                                # It does not end, so no event will tell that the next one may start.
                                waits.append(0.0)
                            continue
                        memory.failures[container.name] = StartFailure(failure.reason, failure.message)
                        waits.append(_wait_after(failure))
                        if container.name in actions.start_init and not is_sidecar(container):
                            break
            except ExceptionGroup as failures:
                # A group wraps what goes wrong in it; callers know the failure itself.
                raise failures.exceptions[0] from None
        return min(waits, default=None)

    def _check_network(self, pod: Pod) -> None:
        """Have a pod that needs the pods' network wait for it: its sandbox could not be made."""
        if problems := self._network_errors():
            why = "; ".join(problems)
            message = f"network is not ready: container runtime network not ready: {why}"
            self._journal.event(pod, "Warning", "NetworkNotReady", message)
            raise SyncError(message, NETWORK_SECONDS)

    def _due(
        self, pod: Pod, observed: ObservedPod, actions: Actions, memory: PodSyncState
    ) -> tuple[list[float], list[Container]]:
        """Split what shall start into what must wait after a crash (seconds) and what may start now."""
        containers, waits, due = containers_by_name(pod), [], []
        for name in (*actions.start_ephemeral, *actions.start_init, *actions.start):
            if wait := self._crash_wait(pod, containers[name], observed, memory):
                waits.append(wait)
                if name in actions.start_init and not is_sidecar(containers[name]):
                    break
            else:
                due.append(containers[name])
        return waits, due

    async def _kill(self, pod: Pod, observed: ObservedPod, actions: Actions) -> None:
        for kill in actions.kill:
            await self._killer.container(pod, kill.container, kill.message, kill.reason)
        if not actions.kill_pod:
            return
        killed = {kill.container.id for kill in actions.kill}
        others = tuple(container for container in observed.containers if container.id not in killed)
        if observed.sandboxes or others:
            await self._killer.pod(pod, msgspec.structs.replace(observed, containers=others))
        if actions.create_sandbox:
            # Traces of an earlier sandbox's initialization would pass for this one's.
            initial = {container.name for container in pod.spec.init_containers}
            for container in observed.containers:
                if container.name in initial:
                    await self._remover.remove(pod, container)

    async def _prepare(self, pod: Pod, turn: StartSlot) -> PodStartContext:
        reason, doing = "FailedCreatePodContainer", "unable to ensure pod container exists"
        try:
            cgroup_parent = await self._cgroups.ensure(pod)
            self._resizing.made(pod)
            reason, doing = "Failed", "error making pod data directories"
            self._dirs.make(pod.uid)
        except OSError as err:
            self._journal.event(pod, "Warning", reason, f"{doing}: {err}")
            raise SyncError(f"{doing}: {err}") from err
        try:
            volumes = {}
            if pod.spec.volumes:
                volumes = await turn.while_away(self._volumes.mount(pod), after=MOUNT_SECONDS)
        except VolumeError as err:
            if err.refusal:
                raise PodRejected(err.refusal, str(err)) from err
            for problem in err.problems:
                self._journal.event(pod, "Warning", failure_event(problem), problem)
            self._journal.note(pod.uid, "volumes", str(err))
            raise SyncError(str(err), err.retry_after) from err
        try:
            mappings = self._user_namespaces.of(pod)
        except (ContainerConfigError, OSError) as err:
            message = f"Failed to create pod sandbox: {err}"
            self._journal.event(pod, "Warning", "FailedCreatePodSandBox", message)
            raise SyncError(str(err)) from err
        return PodStartContext(
            cgroup_parent=cgroup_parent,
            volumes=volumes,
            id_mappings=mappings,
            extra_groups=extra_groups(pod, volumes.values()),
        )

    async def _prepare_claims(self, pod: Pod, turn: StartSlot) -> None:
        work = self._claims.prepare(pod)
        try:
            # A driver may take its time; without claims nobody waits for anything.
            await (turn.while_away(work, after=MOUNT_SECONDS) if has_claims(pod) else work)
        except ClaimError as err:
            message = f"Failed to prepare dynamic resources: {err}"
            self._journal.event(pod, "Warning", "FailedPrepareDynamicResources", message)
            self._journal.note(pod.uid, "claims", str(err))
            raise SyncError(str(err)) from err

    def _sandbox_config(self, pod: Pod, actions: Actions, setting: PodStartContext) -> pb.PodSandboxConfig:
        try:
            return self._starter.sandbox_config(pod, actions.attempt, setting)
        except (ContainerConfigError, OSError) as err:
            message = f"Failed to create pod sandbox: {err}"
            self._journal.event(pod, "Warning", "FailedCreatePodSandBox", message)
            raise SyncError(str(err)) from err

    async def _sandbox(
        self,
        pod: Pod,
        observed: ObservedPod,
        actions: Actions,
        config: pb.PodSandboxConfig,
        setting: PodStartContext,
    ) -> _Running:
        if not actions.create_sandbox:
            return _Running(actions.sandbox_id, observed.ips, config, setting)
        with self._metrics.sandbox(pod):
            sandbox_id, ips = await self._new_sandbox(pod, config)
        where = ", ".join(ips) or "the host's network"
        self._journal.note(pod.uid, "sandbox", f"running as {sandbox_id[:13]} with {where}")
        return _Running(sandbox_id, ips, config, setting)

    async def _new_sandbox(self, pod: Pod, config: pb.PodSandboxConfig) -> tuple[str, tuple[str, ...]]:
        try:
            handler = await self._handler_of(pod)
        except ObjectError as err:
            self._journal.event(
                pod, "Warning", "FailedCreatePodSandBox", f"Failed to create pod sandbox: {err}"
            )
            raise SyncError(str(err)) from err
        try:
            return await self._starter.sandbox(pod, config, handler)
        except CriError as err:
            raise SyncError(str(err)) from err

    async def _image(
        self, pod: Pod, container: Container, config: pb.PodSandboxConfig
    ) -> PresentImage | StartError:
        try:
            return await self._starter.image(pod, container, config)
        except StartError as err:
            return err

    async def _start(
        self,
        pod: Pod,
        container: Container,
        image: PresentImage | StartError,
        running: _Running,
        observed: ObservedPod,
        turn: StartSlot,
    ) -> StartError | None:
        """Start one container; gives a failure instead of raising it, so that the next ones get their try."""
        self._metrics.container(pod, container)
        try:
            if isinstance(image, StartError):
                raise image
            # A device plugin may hang.
            grants = await turn.while_away(self._starter.grants(pod, container), after=MOUNT_SECONDS)
            self._resizing.starting(pod, container)
            container_id = await self._starter.container(
                pod,
                container,
                image,
                running.id,
                running.config,
                running.setting,
                running.ips,
                observed,
                grants,
            )
            if container.lifecycle is not None and container.lifecycle.post_start is not None:
                await turn.while_away(self._starter.post_start(pod, container, container_id))
        except StartError as err:
            self._metrics.container_failed(pod, container, err.reason)
            self._journal.note(pod.uid, "start", f"{container.name}: {err.reason}: {err.message}")
            return err
        self._journal.note(pod.uid, "start", f"{container.name} started")
        return None

    def _crash_wait(
        self, pod: Pod, container: Container, observed: ObservedPod, memory: PodSyncState
    ) -> float:
        """Seconds until a crashed container may start again; 0 starts its next pause."""
        ended = [c for c in observed.containers if c.name == container.name and c.phase == "exited"]
        if not ended:
            return 0.0
        key = f"{pod.uid}/{container.name}/{container_hash(container)}"
        since, now = self._end_of(ended[0], memory), asyncio.get_running_loop().time()
        wait = self._back_off.remaining(key, since, now)
        if wait <= 0:
            # Only what has no pause to wait for any more: memory must not grow with the node's history.
            self._back_off.prune(now - self._back_off.limit)
            self._back_off.attempt(key, since, now)
            return 0.0
        who = f"{pod.metadata.name}_{pod.metadata.namespace}({pod.uid})"
        message = f"Back-off restarting failed container {container.name} in pod {who}"
        self._journal.event(pod, "Warning", "BackOff", message, field_of(pod, container.name))
        pause = Duration.of(self._back_off.pause(key))
        if container.name not in memory.failures:
            memory.untold.add(container.name)
        memory.failures[container.name] = StartFailure(
            "CrashLoopBackOff", f"back-off {pause} restarting failed container={container.name} pod={who}"
        )
        return wait

    def _end_of(self, container: ObservedContainer, memory: PodSyncState) -> float:
        """When a container ended, in the loop's time; found out once: setting the clock is harmless."""
        known_id, moment = memory.ends.get(container.name, ("", 0.0))
        if known_id != container.id:
            age = max(0.0, self._clock() - container.finished_at / 1e9)
            moment = asyncio.get_running_loop().time() - age
            memory.ends[container.name] = container.id, moment
        return moment
