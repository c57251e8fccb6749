"""Pod syncer: each sync observes the pod in the runtime, computes and executes actions, sets the status.

Each part of a sync adds a note to the pod's history. A failure ends the sync; the next one observes the
runtime first, so a sync may be interrupted at any point.

A pod that has lost something it needs, such as its cgroup, is stopped, and the next sync starts it again if
its restart policy allows: a process cannot be returned to a cgroup with its usage.

`ActionExecutor` executes the actions: kill, prepare the stages, sandbox, containers. Concurrent starts are
limited (`start_limiter.py`): a pod holds a slot from its sandbox to its last container and releases it while
it waits for an image, a volume or a hook. Images are pulled while the sandbox is created.
"""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

import msgspec

from pykubelet.admission.handler import AdmitRejection
from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.decide import Actions, ProbeResults, decide, stale_sandbox_is_due
from pykubelet.kuberuntime.kill import ContainerKiller, KillError, grace_period_for, restored_pod
from pykubelet.kuberuntime.observe import Observer
from pykubelet.kuberuntime.observed import ObservedPod, PodStates
from pykubelet.kuberuntime.removal import ContainerRemover
from pykubelet.logs import get_logger
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import (
    KillPodOptions,
    Outcome,
    PodLifecycleEvent,
    PodRejected,
    PodSyncState,
    Remnants,
    StartDelayed,
    SyncError,
)
from pykubelet.podsync.remnants import RemnantRemover
from pykubelet.podsync.reporter import StatusReporter
from pykubelet.podsync.restart_all import RestartAll
from pykubelet.podsync.stages.base import PodStart, StageList
from pykubelet.podsync.stages.containers import RETRY_SECONDS, ContainerStage
from pykubelet.podsync.stages.sandbox import SandboxStage
from pykubelet.podsync.start_limiter import StartLimiter
from pykubelet.probes.prober import Prober
from pykubelet.probes.types import ProbeHistory
from pykubelet.resize.allocation_manager import AllocationManager, PodResizeStep
from pykubelet.status.compute import TERMINAL
from pykubelet.status.containers import StartFailure, has_restart_condition
from pykubelet.transport.errors import CriError

log = get_logger(__name__)

LAG_SECONDS = 0.05
"""Seconds until the next observation of an exit that an event reported and CRI does not report yet."""
SANDBOX_RETRY_SECONDS = 1.0
"""Seconds until the next sync of a pod whose new sandbox has ended, as after upstream's next relist."""
Fate = Literal["desired", "restarted", "deleted", "gone"]
"""Fate of a terminated pod: it stays known, the same static pod starts again with its restart counts, its
deletion in the API server is pending, or no source has it."""


class PodSources(Protocol):
    """Sources of pods, as the syncer queries them and reports to them."""

    @property
    def clustered(self) -> bool:
        """Whether pods come from an API server."""

    def fate_of(self, uid: str) -> Fate:
        """Return the fate of a pod."""

    def is_new(self, uid: str) -> bool:
        """Return whether the runtime certainly has nothing of this pod."""

    def reject(self, pod: Pod, rejection: AdmitRejection) -> None:
        """Reject a pod that was admitted before."""

    def listed_since(self, uid: str, time: float) -> PodStates | None:
        """Return a pod's states in the last relist; None if that began before this loop time."""

    def on_terminated(self, uid: str) -> None:
        """Record that no container of a pod runs: from now on a terminal status may be sent."""

    async def complete_deletion(self, pod: Pod) -> None:
        """Wait until the API server has the pod's final status, and delete the pod there."""

    def on_removed(self, uid: str) -> None:
        """Drop the state of a pod that has left the node."""


def ended(observed: ObservedPod) -> set[str]:
    """Return the ids of exited containers."""
    return {container.id for container in observed.containers if container.phase == "exited"}


def lost(before: ObservedPod, after: ObservedPod) -> set[str]:
    """Return the ids of containers that ran and do not exist any more."""
    return {container.id for container in before.running} - {container.id for container in after.containers}


def is_complete(observed: ObservedPod) -> bool:
    """Return whether nothing of an observation changes without a change of `observed.states`."""
    return all(box.ips or box.host_network or not box.ready for box in observed.sandboxes) and all(
        container.phase in ("running", "exited") for container in observed.containers
    )


def describe(actions: Actions) -> str:
    """Describe the actions in one line."""
    parts = []
    if actions.create_sandbox:
        parts.append(f"new sandbox ({actions.reason})")
    elif actions.kill_pod:
        parts.append("stop the pod: nothing of it shall run again")
    parts += [kill.message for kill in actions.kill]
    if resized := [resize.name for resize in actions.resize.containers.values()]:
        parts.append(f"resize {', '.join(resized)}")
    elif actions.resize:
        parts.append("resize the pod")
    starts = [*actions.start_ephemeral, *actions.start_init, *actions.start]
    if starts:
        parts.append(f"start {', '.join(starts)}")
    return "; ".join(parts)


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


class NodePodSyncer:
    """Pod syncer of a node; see `PodSyncer` for its contract."""

    def __init__(
        self,
        *,
        observer: Observer,
        executor: ActionExecutor,
        stages: StageList,
        reporter: StatusReporter,
        remover: RemnantRemover,
        restart_all: RestartAll,
        allocation: AllocationManager,
        prober: Prober,
        history: PodHistory,
        sources: PodSources,
    ) -> None:
        self._observer = observer
        self._executor = executor
        self._stages = stages
        self._reporter = reporter
        self._remover = remover
        self._restart_all = restart_all
        self._allocation = allocation
        self._prober = prober
        self._history = history
        self._sources = sources
        self._states: dict[str, PodSyncState] = {}
        self._arrivals = 0
        self._observations = 0

    @property
    def observations(self) -> int:
        """Number of observations so far: while it is the same, `observed` returns the same."""
        return self._observations

    def observed(self, uid: str) -> ObservedPod | None:
        """Return the last observed state of a pod."""
        state = self._states.get(uid)
        return state.observed if state else None

    def probe_history(self, uid: str) -> list[ProbeHistory]:
        """Return the last results of a pod's probes."""
        return self._prober.history(uid)

    def take(self, change: PodLifecycleEvent) -> bool:
        """Handle a runtime event; return whether the pod's worker should be woken.

        Events that arrive during a sync are deferred to its end, whose observation mostly contains them.
        """
        state = self._states.get(change.uid)
        if state is None:
            return True
        if state.busy:
            state.late.append(change)
            return False
        return self._has_changed(state, change)

    def _has_changed(self, state: PodSyncState, change: PodLifecycleEvent) -> bool:
        """Return whether an event differs from the last observed state."""
        if state.observed is None:
            return True
        if not change.container_id:
            # Relists are seldom, so most of what they find was observed by a sync before.
            return change.states is None or change.states != state.observed.states
        known = state.observed.phase_of(change.container_id)
        if change.what == "ended" and known == "running":
            state.ended.add(change.container_id)
        old = known == "exited" or (known == "running" and change.what == "started")
        return not old or change.what == "oom"  # also after the exit, because it is the reason

    def request_restart(self, uid: str, container: str | None) -> list[str]:
        """Request an in-place restart of running containers at the next sync; return their names."""
        state = self._state(uid)
        running = state.observed.running if state.observed else ()
        chosen = [c for c in running if container in (None, c.name)]
        state.restart_requested.update(c.id for c in chosen)
        return [c.name for c in chosen]

    async def sync(self, pod: Pod, *, resync: bool = False) -> Outcome:
        """Bring the pod closer to its desired state.

        A `resync` does not query the runtime if a relist has confirmed the last observation since.
        """
        pod = self._to_run(pod)
        state = self._state(pod.uid)
        state.busy = True
        try:
            finished, again = await self._sync(pod, state, resync=resync)
        except PodRejected as err:
            self._sources.reject(pod, AdmitRejection(err.reason, err.message))
            finished, again = True, None
        finally:
            state.busy = False
            late, state.late = state.late, []
        changes = [change for change in late if self._has_changed(state, change)]
        if changes:
            again = LAG_SECONDS
        return finished, again

    async def _sync(self, pod: Pod, state: PodSyncState, *, resync: bool) -> Outcome:
        state.unreported_failures.clear()
        observed = self._confirmed(pod.uid, state) if resync else None
        if observed is None:
            observed = await self._look(pod.uid, pod)
        self._allocation.observe(pod, observed)
        status = self._reporter.report(pod, observed, state)
        if status.phase in TERMINAL:
            return True, None
        left = self._reporter.time_left(pod, status, state)
        self._stages.update(pod)
        requested, plan = frozenset(state.restart_requested), self._allocation.plan(pod, observed)
        restarting_all = has_restart_condition(status)
        actions = decide(pod, observed, self._verdicts(observed), requested, plan, restart_all=restarting_all)
        if actions.reset:
            return False, await self._restart_all.clear(pod, actions.reset, state)
        if (actions.idle or actions.resize) and observed.running and not self._stages.is_intact(pod):
            state.current = False
            await self._stop_damaged(pod, observed)
            return False, 0
        if actions.idle:
            again = await self._stages.refresh(pod)
            waits = (again, left, LAG_SECONDS if state.ended else None)
            return False, min((seconds for seconds in waits if seconds is not None), default=None)
        self._history.note(pod.uid, "decide", describe(actions))
        before = observed
        state.current = state.mounted = False
        again = await self._executor.apply(pod, observed, actions, state)
        if observed.running and not state.mounted and not actions.kill_pod:
            # Containers in back-off must not keep volumes of running ones from being updated.
            refresh = await self._stages.refresh(pod)
            again = min((seconds for seconds in (again, refresh) if seconds is not None), default=None)
        observed = await self._look(pod.uid)
        self._allocation.observe(pod, observed)
        status = self._reporter.report(pod, observed, state)
        if status.phase in TERMINAL:
            return True, None
        if ended(observed) - ended(before) or lost(before, observed):
            # A fast init container, or one that another client of the runtime has removed: the observation
            # contains it already, so neither an event nor a relist would cause the next sync.
            return False, 0
        if actions.create_sandbox and observed.sandboxes and not observed.sandboxes[0].ready:
            # The new sandbox has ended already, which is observed here and nowhere else. Not immediately: the
            # next one may end as fast.
            again = SANDBOX_RETRY_SECONDS if again is None else min(again, SANDBOX_RETRY_SECONDS)
        if state.ended or (stale_sandbox_is_due(pod, observed) and not actions.create_sandbox):
            again = LAG_SECONDS
        return False, min((seconds for seconds in (again, left) if seconds is not None), default=None)

    def _to_run(self, pod: Pod) -> Pod:
        return self._restart_all.honoured(self._allocation.allocated(pod))

    def probed(self, pod: Pod) -> None:
        """Report new probe results of a pod that is being stopped, which takes long."""
        state = self._states.get(pod.uid)
        if state is not None and state.observed is not None:
            self._reporter.report(self._to_run(pod), state.observed, state)

    def pulling(self, pod: Pod) -> None:
        """Report the progress of a long pull that the sync in progress waits for."""
        state = self._states.get(pod.uid)
        if state is not None and state.busy and state.observed is not None:
            self._reporter.report(self._to_run(pod), state.observed, state)

    async def terminate(self, uid: str, pod: Pod | None, options: KillPodOptions) -> None:
        """Stop all containers of the pod."""
        pod = self._to_run(pod) if pod is not None else None
        state = self._state(uid)
        observed = await self._picture(state, uid, pod)
        if pod is not None and (self._sources.clustered or options.pod_status is not None):
            self._reporter.report(pod, observed, state, override=options.pod_status)
        self._prober.stop_liveness_and_startup(uid)
        self._history.note(uid, "terminate", f"stopping {len(observed.running)} running containers")
        state.current = False
        grace = options.grace if pod is not None else max(1, grace_period_for(restored_pod(observed), None))
        try:
            await self._executor.stop(pod, observed, grace)
        except KillError as err:
            message = f"error killing pod: {err}"
            self._history.event(pod or restored_pod(observed), "Warning", "FailedKillPod", message)
            raise SyncError(message) from err
        state.stopped.update(sandbox.id for sandbox in observed.sandboxes)
        observed = await self._look(uid)
        if observed.running:
            raise SyncError(f"containers still run after being stopped: {[c.name for c in observed.running]}")
        await self._stages.release(uid, pod, before_final_status=True)
        if pod is not None:
            self._reporter.report(pod, observed, state, terminal=True, override=options.pod_status)
        self._prober.remove_pod(uid)

    async def clean_up(self, uid: str, pod: Pod | None) -> Remnants | None:
        """Release volumes and cgroup, and complete the deletion of a pod that is being deleted."""
        self._sources.on_terminated(uid)
        while True:
            fate = self._sources.fate_of(uid)
            await self._release(uid, pod, fate)
            # It may have been deleted concurrently; then the rest has to be cleaned up here.
            if fate != "desired" or self._sources.fate_of(uid) == "desired":
                break
        state = self._states.pop(uid, None)
        self._observations += 1
        if fate != "desired":
            self._reporter.forget(uid)
            self._history.forget(uid)
            self._stages.forget(uid)
            self._sources.on_removed(uid)
            if fate == "restarted":
                # The exited containers stay: the next worker of this pod continues its restart counts.
                return None
            known = state if state is not None and state.current and not state.ended else None
            return Remnants(
                uid,
                pod,
                known.observed if known is not None else None,
                state.stopped if state is not None else set(),
            )
        self._history.note(uid, "clean-up", "stages are released")
        if state is not None and state.observed is not None:
            self._states[uid] = state
            self._observations += 1
        return None

    async def _release(self, uid: str, pod: Pod | None, fate: Fate) -> None:
        """Release what other pods and nodes may wait for; this does not depend on removing containers."""
        await self._stages.release(uid, pod, before_final_status=False)
        if fate == "deleted" and pod is not None:
            # Until the status is reported, only the containers contain the exit codes.
            try:
                await self._sources.complete_deletion(pod)
            except OSError as err:
                raise SyncError(f"cleaning up: {err}") from err

    async def remove(self, remnants: Remnants) -> None:
        """Remove containers, sandboxes, logs and directory of a finished pod. Raises SyncError."""
        await self._remover.remove(remnants)

    async def _stop_damaged(self, pod: Pod, observed: ObservedPod) -> None:
        """Stop a pod that has lost something it needs. Raises SyncError."""
        log.info("Stopping pod whose cgroup was removed", pod=pod.full_name, podUID=pod.uid)
        self._history.note(
            pod.uid, "cgroup", "it is gone: the pod is stopped, to run within its limits again"
        )
        try:
            await self._executor.stop(pod, observed)
        except KillError as err:
            raise SyncError(str(err)) from err

    def _state(self, uid: str) -> PodSyncState:
        state = self._states.get(uid)
        if state is None:
            self._arrivals += 1
            state = self._states[uid] = PodSyncState(self._arrivals)
        return state

    async def _picture(self, state: PodSyncState, uid: str, pod: Pod | None = None) -> ObservedPod:
        """Return the state of a pod to terminate; query the runtime only if it may have changed."""
        if state.observed is not None and state.current and not state.ended:
            return state.observed
        return await self._look(uid, pod)

    def _confirmed(self, uid: str, state: PodSyncState) -> ObservedPod | None:
        """Return the last observation if a later relist contains the same states; otherwise None.

        One relist answers for all pods what would be three calls for each of them.
        """
        observed = state.observed
        if observed is None or not state.current or state.ended or not is_complete(observed):
            return None
        listed = self._sources.listed_since(uid, state.observed_at)
        return observed if listed is not None and listed == observed.states else None

    async def _look(self, uid: str, pod: Pod | None = None) -> ObservedPod:
        """Observe the pod in the runtime; a failure becomes an event of `pod`. Raises SyncError."""
        state = self._state(uid)
        try:
            if state.observed is None and self._sources.is_new(uid):
                observed = ObservedPod(uid=uid)  # the runtime has nothing of it: no query needed
            else:
                observed = await self._observer.observe_pod(uid)
        except CriError as err:
            if pod is not None:
                self._history.event(pod, "Warning", "FailedSync", f"error determining status: {err.rpc_text}")
            raise SyncError(str(err)) from err
        state.observed, state.current = observed, True
        state.observed_at = asyncio.get_running_loop().time()
        self._observations += 1
        running = {c.id for c in observed.running}
        state.restart_requested &= running
        state.ended &= running | {sandbox.id for sandbox in observed.sandboxes if sandbox.ready}
        return observed

    def _verdicts(self, observed: ObservedPod) -> ProbeResults:
        def known(kind: Literal["liveness", "startup"]) -> dict[str, bool]:
            found = {c.id: self._prober.results.get(kind, c.id) for c in observed.running}
            return {
                id: verdict == "success" for id, verdict in found.items() if verdict in ("success", "failure")
            }

        return ProbeResults(liveness=known("liveness"), startup=known("startup"))
