"""Stage of the pod's containers: crash-loop back-off, images, devices, start and postStart hook."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.images.image_manager import PresentImage
from pykubelet.kuberuntime.decide import Actions
from pykubelet.kuberuntime.errors import StartError
from pykubelet.kuberuntime.kill import containers_by_name
from pykubelet.kuberuntime.labels import container_hash
from pykubelet.kuberuntime.metrics import StartMetrics
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.kuberuntime.start import ContainerStarter
from pykubelet.podconfig.pod_history import PodHistory, field_of
from pykubelet.podsync.contract import PodSyncState
from pykubelet.podsync.stages.base import PodStart
from pykubelet.podsync.stages.sandbox import RunningSandbox
from pykubelet.podsync.stages.volumes import MOUNT_SECONDS
from pykubelet.resize.allocation_manager import AllocationManager
from pykubelet.status.containers import StartFailure
from pykubelet.tracing.span import child_span
from pykubelet.util.backoff import KeyedBackoff

RETRY_SECONDS = 10.0
"""Seconds until the next attempt to start a container that failed to start."""
FAILURE_SECONDS = 5.0
"""Seconds for which a container's status shows the reason of a failed pull before ImagePullBackOff."""
CRASH_EXPIRY_SECONDS = 600.0
"""Seconds that a container must run until its crash-loop back-off is reset, whatever the maximum is."""
CRASH_SECONDS = (10.0, 300.0)
"""The first and the longest crash-loop back-off delay."""
REDUCED_CRASH_SECONDS = (1.0, 60.0)
"""The same with the feature gate ReduceDefaultCrashLoopBackOffDecay."""


def crash_loop_back_off(config: KubeletConfiguration, gates: FeatureGates) -> KeyedBackoff:
    """Return the back-off of crashing containers as the configuration and the feature gates have it.

    `crashLoopBackOff.maxContainerRestartPeriod`, which has a default, wins over the reduced maximum.
    """
    reduced = gates.enabled("ReduceDefaultCrashLoopBackOffDecay")
    first, limit = REDUCED_CRASH_SECONDS if reduced else CRASH_SECONDS
    configured = config.crash_loop_back_off.max_container_restart_period
    if configured is not None and gates.enabled("KubeletCrashLoopBackOffMax"):
        limit = configured.seconds
    return KeyedBackoff(min(first, limit), limit, CRASH_EXPIRY_SECONDS)


class ContainerStage:
    """Containers of a pod; the killer stops them, and the worker removes them with other remnants."""

    def __init__(
        self,
        starter: ContainerStarter,
        allocation: AllocationManager,
        back_off: KeyedBackoff,
        history: PodHistory,
        metrics: StartMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._starter = starter
        self._allocation = allocation
        self._back_off = back_off
        self._history = history
        self._metrics = metrics
        self._clock = clock

    def due(
        self, pod: Pod, observed: ObservedPod, actions: Actions, state: PodSyncState
    ) -> tuple[list[float], list[Container]]:
        """Return the back-off delays of crashed containers in seconds, and the containers to start now."""
        containers, waits, due = containers_by_name(pod), [], []
        for name in (*actions.start_ephemeral, *actions.start_init, *actions.start):
            if wait := self._crash_wait(pod, containers[name], observed, state):
                waits.append(wait)
                if name in actions.start_init and not is_sidecar(containers[name]):
                    break
            else:
                due.append(containers[name])
        return waits, due

    def pull(
        self, start: PodStart, due: Iterable[Container], config: pb.PodSandboxConfig, group: asyncio.TaskGroup
    ) -> dict[str, asyncio.Task[PresentImage | StartError]]:
        """Start to pull the images of containers; return the tasks by container name."""
        return {
            container.name: group.create_task(self._image(start.pod, container, config)) for container in due
        }

    async def start(
        self,
        start: PodStart,
        due: Iterable[Container],
        images: dict[str, asyncio.Task[PresentImage | StartError]],
        sandbox: RunningSandbox,
        state: PodSyncState,
    ) -> list[float]:
        """Start containers in their order; return the seconds until the next sync for each that needs one."""
        waits = []
        for container in due:
            image = await start.slot.while_away(images[container.name])
            is_init = container.name in start.actions.start_init
            with child_span("startContainer", {"k8s.container.name": container.name}) as span:
                failure = await self._start(start, container, image, sandbox)
                if failure is not None:
                    span.fail(f"{failure.reason}: {failure.message}")
            if failure is None:
                state.failures.pop(container.name, None)
                if is_init and is_sidecar(container):
                    # A sidecar does not exit, so no event would start the next container.
                    waits.append(0.0)
                continue
            state.failures[container.name] = StartFailure(failure.reason, failure.message)
            waits.append(_wait_after(failure))
            if is_init and not is_sidecar(container):
                break
        return waits

    async def _image(
        self, pod: Pod, container: Container, config: pb.PodSandboxConfig
    ) -> PresentImage | StartError:
        try:
            with child_span("ensureImage", {"container.image.name": container.image}):
                return await self._starter.ensure_image(pod, container, config)
        except StartError as err:
            return err

    async def _start(
        self, start: PodStart, container: Container, image: PresentImage | StartError, sandbox: RunningSandbox
    ) -> StartError | None:
        """Start one container; return an error instead of raising it, so that the next ones are tried."""
        pod = start.pod
        self._metrics.record_container_start(pod, container)
        try:
            if isinstance(image, StartError):
                raise image
            # A device plugin may hang.
            grants = await start.slot.while_away(
                self._starter.prepare_devices(pod, container), after=MOUNT_SECONDS
            )
            self._allocation.starting(pod, container)
            container_id = await self._starter.start_container(
                pod,
                container,
                image,
                sandbox.id,
                sandbox.config,
                sandbox.context,
                sandbox.ips,
                start.observed,
                grants,
            )
            if container.lifecycle is not None and container.lifecycle.post_start is not None:
                await start.slot.while_away(self._starter.run_post_start_hook(pod, container, container_id))
        except StartError as err:
            self._metrics.record_container_failure(pod, container, err.reason)
            self._history.note(pod.uid, "start", f"{container.name}: {err.reason}: {err.message}")
            return err
        ended = start.observed.latest(container.name)
        if ended is not None and ended.phase == "exited" and ended.finished_at:
            # Until now the status has it; the next end replaces it there.
            text = f"{container.name} exited with code {ended.exit_code}"
            self._history.note(pod.uid, "exit", text, at=ended.finished_at / 1e9)
        self._history.note(pod.uid, "start", f"{container.name} started")
        return None

    def _crash_wait(
        self, pod: Pod, container: Container, observed: ObservedPod, state: PodSyncState
    ) -> float:
        """Return the seconds until a crashed container may restart; 0 counts as the next attempt."""
        exited = [c for c in observed.containers if c.name == container.name and c.phase == "exited"]
        if not exited:
            return 0.0
        key = f"{pod.uid}/{container.name}/{container_hash(container)}"
        since, now = self._exit_time(exited[0], state), asyncio.get_running_loop().time()
        wait = self._back_off.remaining(key, since, now)
        if wait <= 0:
            # Prune expired entries: memory must not grow with the number of containers that ever crashed.
            self._back_off.prune(now - self._back_off.limit)
            self._back_off.attempt(key, since, now)
            return 0.0
        who = f"{pod.metadata.name}_{pod.metadata.namespace}({pod.uid})"
        message = f"Back-off restarting failed container {container.name} in pod {who}"
        self._history.event(pod, "Warning", "BackOff", message, field_of(pod, container.name))
        delay = Duration.from_seconds(self._back_off.delay(key))
        if container.name not in state.failures:
            state.unreported_failures.add(container.name)
        state.failures[container.name] = StartFailure(
            "CrashLoopBackOff", f"back-off {delay} restarting failed container={container.name} pod={who}"
        )
        return wait

    def _exit_time(self, container: ObservedContainer, state: PodSyncState) -> float:
        """Return the loop time of a container's exit, computed once, so that clock changes have no effect."""
        known_id, moment = state.ends.get(container.name, ("", 0.0))
        if known_id != container.id:
            age = max(0.0, self._clock() - container.finished_at / 1e9)
            moment = asyncio.get_running_loop().time() - age
            state.ends[container.name] = container.id, moment
        return moment


def _wait_after(failure: StartError) -> float:
    """Return the seconds until the next attempt to start a container, or to report why it waits."""
    if failure.retry_after is None:
        return RETRY_SECONDS
    if failure.reason == "ImagePullBackOff":
        return failure.retry_after
    # A pull that failed is followed by a back-off delay of minutes, which the status must show soon.
    return min(failure.retry_after, FAILURE_SECONDS)
