"""Execution of the actions that were decided for a pod: kill, prepare the stages, sandbox, containers.

Concurrent starts are limited (`start_limiter.py`): a pod holds a slot from its sandbox to its last container
and releases it while it waits for an image, a volume or a hook. Images are pulled while the sandbox is
created.
"""

from __future__ import annotations

import asyncio

import msgspec

from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.decide import Actions
from pykubelet.kuberuntime.kill import ContainerKiller, KillError
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.kuberuntime.removal import ContainerRemover
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import PodSyncState, StartDelayed, SyncError
from pykubelet.podsync.stages.base import PodStart, StageList
from pykubelet.podsync.stages.containers import RETRY_SECONDS, ContainerStage
from pykubelet.podsync.stages.sandbox import SandboxStage
from pykubelet.podsync.start_limiter import StartLimiter
from pykubelet.resize.allocation_manager import PodResizeStep
from pykubelet.status.containers import StartFailure
from pykubelet.transport.errors import CriError


class ActionExecutor:
    """Executor of the actions of a sync."""

    def __init__(
        self,
        *,
        stages: StageList,
        sandbox: SandboxStage,
        containers: ContainerStage,
        killer: ContainerKiller,
        remover: ContainerRemover,
        resize: PodResizeStep,
        limiter: StartLimiter,
        history: PodHistory,
    ) -> None:
        self._stages = stages
        self._sandbox = sandbox
        self._containers = containers
        self._killer = killer
        self._remover = remover
        self._resize = resize
        self._limiter = limiter
        self._history = history

    async def apply(
        self, pod: Pod, observed: ObservedPod, actions: Actions, state: PodSyncState
    ) -> float | None:
        """Execute the actions; return the seconds until failed ones should be retried.

        Raises SyncError when the sync cannot continue.
        """
        if actions.create_sandbox:
            self._sandbox.check_network(pod)
        if actions.create_sandbox and actions.sandbox_id:
            message = "Pod sandbox changed, it will be killed and re-created."
            self._history.event(pod, "Normal", "SandboxChanged", message)
        try:
            await self._kill(pod, observed, actions)
        except (KillError, CriError) as err:
            raise SyncError(str(err)) from err
        if actions.kill_pod and not actions.create_sandbox:
            return None
        waits, due = self._containers.due(pod, observed, actions, state)
        if actions.resize and not await self._resize.apply(pod, actions):
            waits.append(RETRY_SECONDS)
        if not due and not actions.create_sandbox:
            return min(waits, default=None)
        async with self._limiter.turn(state.order) as slot:
            state.mounted = True
            start = PodStart(pod, observed, actions, slot)
            delayed, state.delayed = state.delayed, frozenset()
            for name in delayed:
                state.failures.pop(name, None)
            try:
                await self._stages.prepare(start)
            except StartDelayed as err:
                state.delayed = frozenset(container.name for container in due)
                state.failures.update(dict.fromkeys(state.delayed, StartFailure(err.reason, err.message)))
                return err.retry_after
            if delayed:
                # The next sync begins with the status that they do not wait any more: a pull may take long.
                return 0
            context = start.context()
            config = self._sandbox.config(start, context)
            try:
                async with asyncio.TaskGroup() as group:
                    images = self._containers.pull(start, due, config, group)
                    sandbox = await self._sandbox.ensure(start, config, context)
                    waits += await self._containers.start(start, due, images, sandbox, state)
            except ExceptionGroup as failures:
                # The task group wraps the exception; callers handle the exception itself.
                raise failures.exceptions[0] from None
        return min(waits, default=None)

    async def stop(self, pod: Pod | None, observed: ObservedPod, grace: int | None = None) -> None:
        """Stop all containers and sandboxes of a pod, None for an orphan. Raises KillError."""
        await self._killer.kill_pod(pod, observed, grace)

    async def _kill(self, pod: Pod, observed: ObservedPod, actions: Actions) -> None:
        for kill in actions.kill:
            await self._killer.kill_container(pod, kill.container, kill.message, kill.reason)
        if not actions.kill_pod:
            return
        killed = {kill.container.id for kill in actions.kill}
        remaining = tuple(container for container in observed.containers if container.id not in killed)
        if observed.sandboxes or remaining:
            await self._killer.kill_pod(pod, msgspec.structs.replace(observed, containers=remaining))
        if actions.create_sandbox:
            # Init containers of the old sandbox would count as completed in the new one.
            initial = {container.name for container in pod.spec.init_containers}
            for container in observed.containers:
                if container.name in initial:
                    await self._remover.remove(pod, container)
