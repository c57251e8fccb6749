"""Execution of the actions that were decided for a pod: kill, prepare, sandbox, containers.

Concurrent starts are limited (`start_limiter.py`): a pod holds a slot from its sandbox to its last container
and releases it while it waits for an image, a volume or a hook. Images are pulled while the sandbox is
created.
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
"""Seconds that mounting may take before the pod's start slot is released."""
NETWORK_SECONDS = 10.0
"""Seconds until a missing pod network is reported again; pods are woken when it is ready."""
RETRY_SECONDS = 10.0
"""Seconds until the next attempt to start a container that failed to start."""
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
    """Interface of the volume manager."""

    async def mount(self, pod: Pod) -> dict[str, MountedVolume]:
        """Mount all volumes of the pod. Raises VolumeError."""
        ...

    async def sub_paths(
        self, pod: Pod, container: Container, mounted: Mapping[str, MountedVolume], paths: Mapping[int, str]
    ) -> dict[int, str]:
        """Prepare the sub-paths of a container, by the mount's index. Raises VolumeError."""
        ...

    async def refresh(self, pod: Pod) -> None:
        """Update the pod's mounted volumes with the current API objects. Raises VolumeError."""
        ...

    async def unmount(self, uid: str) -> None:
        """Unmount all volumes of a pod. Raises VolumeError."""
        ...


class Cgroups(Protocol):
    """Interface of the pod cgroups."""

    async def ensure(self, pod: Pod) -> str:
        """Ensure that the pod's cgroup has its limits; return its name for the runtime. Raises OSError."""
        ...

    def exists(self, pod: Pod) -> bool:
        """Return whether the pod's cgroup exists in all hierarchies."""
        ...

    def in_force(self, pod: Pod, settings: CgroupValues | None = None) -> tuple[Resources, Resources] | None:
        """Return the limits and requests that the pod's cgroup enforces; None without a pod cgroup.

        `settings`: values that were read from the cgroup, where they may differ from the pod's.
        """
        ...

    def group(self, pod: Pod) -> PodCgroup | None:
        """Return the pod's cgroup, for a resize; None without one."""
        ...

    def uids(self) -> set[str]:
        """Return the uids of pods that have a cgroup."""
        ...

    async def update_qos(self, pods: Sequence[Pod]) -> None:
        """Update the cgroups of the QoS classes for these pods."""
        ...

    async def remove(self, uid: str) -> None:
        """Remove the pod's cgroups and kill processes in them. Raises OSError."""
        ...


HandlerOf = Callable[[Pod], Awaitable[str]]
"""Returns the runtime handler of a pod, empty for the default. Raises ObjectError."""


@dataclass(slots=True)
class PodSyncState:
    """State of a pod between syncs."""

    order: int
    """Rank of the pod by age: older pods start first."""
    failures: dict[str, StartFailure] = field(default_factory=dict)
    untold: set[str] = field(default_factory=set)
    """Containers that entered crash-loop back-off in the last sync; the next status reports it."""
    restart_requested: set[str] = field(default_factory=set)
    observed: ObservedPod | None = None
    mounted: bool = False
    """Whether the last sync mounted the pod's volumes, which also updates them."""
    current: bool = False
    """Whether `observed` is current: nothing was done to the pod since."""
    ended: set[str] = field(default_factory=set)
    """Containers and sandboxes that exited according to an event; CRI may not report it yet."""
    busy: bool = False
    """Whether a sync is in progress."""
    late: list[PodLifecycleEvent] = field(default_factory=list)
    """Runtime events that arrived during the sync."""
    ends: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By container name: id of the container that exited last, and the loop time of its exit."""
    began: float | None = None
    """Loop time at which the pod's active deadline started."""
    registered: PodSpec | None = None
    """Spec for which the API objects are registered."""
    stopped: set[str] = field(default_factory=set)
    """Ids of sandboxes that were stopped, with their network."""


@dataclass(frozen=True, slots=True)
class _Running:
    """Sandbox in which containers are started."""

    id: str
    ips: tuple[str, ...]
    config: pb.PodSandboxConfig
    setting: PodStartContext


class ActionExecutor:
    """Executor of the actions of a sync."""

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
        """Execute the actions; return the seconds until failed ones should be retried.

        Raises SyncError when the sync cannot continue.
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
                                # A sidecar does not exit, so no event would start the next container.
                                waits.append(0.0)
                            continue
                        memory.failures[container.name] = StartFailure(failure.reason, failure.message)
                        waits.append(_wait_after(failure))
                        if container.name in actions.start_init and not is_sidecar(container):
                            break
            except ExceptionGroup as failures:
                # The task group wraps the exception; callers handle the exception itself.
                raise failures.exceptions[0] from None
        return min(waits, default=None)

    def _check_network(self, pod: Pod) -> None:
        """Raise SyncError while the pod network is not ready: the sandbox could not be created."""
        if problems := self._network_errors():
            why = "; ".join(problems)
            message = f"network is not ready: container runtime network not ready: {why}"
            self._journal.event(pod, "Warning", "NetworkNotReady", message)
            raise SyncError(message, NETWORK_SECONDS)

    def _due(
        self, pod: Pod, observed: ObservedPod, actions: Actions, memory: PodSyncState
    ) -> tuple[list[float], list[Container]]:
        """Return the back-off delays of crashed containers in seconds, and the containers to start now."""
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
            # Init containers of the old sandbox would count as completed in the new one.
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
            # A driver may be slow; without claims there is nothing to wait for.
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
        """Start one container; return an error instead of raising it, so that the next ones are tried."""
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
        """Return the seconds until a crashed container may restart; 0 counts as the next attempt."""
        ended = [c for c in observed.containers if c.name == container.name and c.phase == "exited"]
        if not ended:
            return 0.0
        key = f"{pod.uid}/{container.name}/{container_hash(container)}"
        since, now = self._end_of(ended[0], memory), asyncio.get_running_loop().time()
        wait = self._back_off.remaining(key, since, now)
        if wait <= 0:
            # Prune expired entries: memory must not grow with the number of containers that ever crashed.
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
        """Return the loop time of a container's exit, computed once, so that clock changes have no effect."""
        known_id, moment = memory.ends.get(container.name, ("", 0.0))
        if known_id != container.id:
            age = max(0.0, self._clock() - container.finished_at / 1e9)
            moment = asyncio.get_running_loop().time() - age
            memory.ends[container.name] = container.id, moment
        return moment
