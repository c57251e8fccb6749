"""Pod syncer: each sync observes the pod in the runtime, computes and executes actions, sets the status.

Each part of a sync adds a note to the pod's history. A failure ends the sync; the next one observes the
runtime first, so a sync may be interrupted at any point. Active deadlines (`activeDeadlineSeconds`) are
evaluated with every status.

A pod whose cgroup was removed runs without limits. Its processes cannot be returned to a cgroup with their
usage, so the pod is stopped, and the next sync starts it again if its restart policy allows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, Protocol

import msgspec

from pykubelet.admission.handler import AdmitRejection
from pykubelet.api.meta import now as api_now
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus, StatusResources
from pykubelet.cm.dra.claims import ClaimError
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.decide import Actions, ProbeResults, decide, sandbox_is_stale
from pykubelet.kuberuntime.kill import ContainerKiller, KillError, grace_of, restored_pod
from pykubelet.kuberuntime.observe import Observer
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.kuberuntime.removal import ContainerRemover, remove_container
from pykubelet.kuberuntime.start import ContainerStarter
from pykubelet.logs import get_logger
from pykubelet.objects.base import PodObjects
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.podsync.contract import (
    KillPodOptions,
    Outcome,
    PodLifecycleEvent,
    PodRejected,
    PodStatusFunc,
    Remnants,
    SyncError,
)
from pykubelet.podsync.executor import ActionExecutor, Cgroups, PodSyncState, Volumes
from pykubelet.podsync.resource_allocator import NO_CLAIMS, DeviceHealth, PodClaims, no_health
from pykubelet.podsync.restart_all import RestartAll
from pykubelet.probes.prober import Prober
from pykubelet.resize.allocation_manager import AllocationManager
from pykubelet.status.compute import TERMINAL, StatusStore, compute_status, final_status
from pykubelet.status.containers import StartFailure, StatusInputs, api_time, says_restarting
from pykubelet.status.patch import status_patch
from pykubelet.transport.errors import CriError, NotFound
from pykubelet.util.tasks import finish_in_thread
from pykubelet.volumes.errors import VolumeError, failure_event

log = get_logger(__name__)


def ended(observed: ObservedPod) -> set[str]:
    """Return the ids of exited containers."""
    return {container.id for container in observed.containers if container.phase == "exited"}


def status_before(pod: Pod, observed: ObservedPod) -> PodStatus:
    """Return the status of a pod that an earlier kubelet process started, with its original start time."""
    began = min((sandbox.created_at for sandbox in observed.sandboxes), default=0)
    return msgspec.structs.replace(pod.status, start_time=pod.status.start_time or api_time(began))


def told(actions: Actions) -> str:
    """Describe the actions in one line."""
    parts = []
    if actions.create_sandbox:
        parts.append(f"new sandbox ({actions.why})")
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


EXCEEDED = "DeadlineExceeded"
MESSAGE = "Pod was active on the node longer than the specified deadline"


def time_left(pod: Pod, status: PodStatus, memory: PodSyncState, now: float, clock: float) -> float | None:
    """Return the seconds until a pod's active deadline, None without one.

    `now` is the loop time, `clock` seconds since 1970. The clock is read once: setting it later has no
    effect.
    """
    if pod.spec.active_deadline_seconds is None or status.start_time is None:
        return None
    if memory.began is None:
        memory.began = now - max(0.0, clock - status.start_time.timestamp())
    return memory.began + pod.spec.active_deadline_seconds - now


def ended_in_time(pod: Pod, status: PodStatus) -> bool:
    """Return whether all containers exited by themselves before the deadline.

    A kubelet that was not running at the deadline observes both later.
    """
    if status.phase not in TERMINAL or status.start_time is None or pod.spec.active_deadline_seconds is None:
        return False
    deadline = status.start_time.timestamp() + pod.spec.active_deadline_seconds
    states = (one.state.terminated for one in status.container_statuses)
    ends = [state.finished_at for state in states if state is not None and state.finished_at]
    return bool(ends) and all(end.timestamp() < deadline for end in ends)


def exceeded(status: PodStatus) -> PodStatus:
    """Return the status of a pod that exceeded its active deadline."""
    return msgspec.structs.replace(status, phase="Failed", reason=EXCEEDED, message=MESSAGE)


async def stop_unbound(pod: Pod, observed: ObservedPod, killer: ContainerKiller, journal: PodHistory) -> None:
    """Stop a pod that runs without its cgroup. Raises SyncError."""
    log.info("Stopping pod whose cgroup was removed", pod=pod.full_name, podUID=pod.uid)
    journal.note(pod.uid, "cgroup", "it is gone: the pod is stopped, to run within its limits again")
    try:
        await killer.pod(pod, observed)
    except KillError as err:
        raise SyncError(str(err)) from err


LAG_SECONDS = 0.05
"""Seconds until the next observation of an exit that an event reported and CRI does not report yet."""
REFRESH_SECONDS = 10.0
"""Seconds until the next attempt to update volumes after a failure."""
Fate = Literal["wanted", "restarted", "leaving", "gone"]
"""Fate of a terminated pod: it stays known, the same static pod starts again with its restart counts, its
deletion in the API server is pending, or no source has it."""


class PodSourceClient(Protocol):
    """Interface to the API server for the end of its pods."""

    def stopped(self, uid: str) -> None:
        """Record that no container of a pod runs."""
        ...

    async def told(self, uid: str) -> None:
        """Wait until the API server has the pod's final status."""
        ...

    async def remove(self, pod: Pod) -> None:
        """Complete the deletion of a finished pod in the API server."""
        ...


class NodePodSyncer:
    """Pod syncer of a node; see `PodSyncer` for its contract."""

    def __init__(
        self,
        *,
        cri: RuntimeConnection,
        observer: Observer,
        doer: ActionExecutor,
        starter: ContainerStarter,
        remover: ContainerRemover,
        killer: ContainerKiller,
        prober: Prober,
        volumes: Volumes,
        cgroups: Cgroups,
        dirs: PodDirs,
        journal: PodHistory,
        statuses: StatusStore,
        objects: PodObjects,
        host_ips: Sequence[str],
        fate_of: Callable[[str], Fate],
        is_new: Callable[[str], bool],
        on_gone: Callable[[str], None],
        refuse: Callable[[Pod, AdmitRejection], None] = lambda pod, refusal: None,
        on_stopped: Callable[[str], None] = lambda uid: None,
        on_removed: Callable[[str], None] = lambda uid: None,
        device_health: Callable[[Pod], DeviceHealth] = no_health,
        recursive_handlers: frozenset[str] = frozenset(),
        resizing: AllocationManager | None = None,
        restart_all: bool = True,
        claims: PodClaims = NO_CLAIMS,
        registrar: PodSourceClient | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cri = cri
        self._observer = observer
        self._doer = doer
        self._starter = starter
        self._killer = killer
        self._prober = prober
        self._volumes = volumes
        self._cgroups = cgroups
        self._dirs = dirs
        self._journal = journal
        self._statuses = statuses
        self._objects = objects
        self._host_ips = host_ips
        self._fate_of = fate_of
        self._is_new = is_new
        self._on_gone = on_gone
        self._refuse = refuse
        self._on_stopped = on_stopped
        self._on_removed = on_removed
        self._device_health = device_health
        self._recursive_handlers = recursive_handlers
        self._resizing = resizing or AllocationManager(journal)
        self._restart_all = RestartAll(killer, remover, journal, clock, enabled=restart_all)
        self._stays_initialized = restart_all
        self._claims = claims
        self.registrar = registrar
        self._clock = clock
        self._memories: dict[str, PodSyncState] = {}
        self._arrivals = 0

    def observed(self, uid: str) -> ObservedPod | None:
        """Return the last observed state of a pod."""
        memory = self._memories.get(uid)
        return memory.observed if memory else None

    def take(self, change: PodLifecycleEvent) -> bool:
        """Handle a runtime event; return whether the pod's worker should be woken.

        Events that arrive during a sync are deferred to its end, whose observation mostly contains them.
        """
        memory = self._memories.get(change.uid)
        if memory is None:
            return True
        if memory.busy:
            memory.late.append(change)
            return False
        return self._is_news(memory, change)

    def _is_news(self, memory: PodSyncState, change: PodLifecycleEvent) -> bool:
        """Return whether an event differs from the last observed state."""
        if memory.observed is None or not change.container_id:
            return True
        known = memory.observed.phase_of(change.container_id)
        if change.what == "ended" and known == "running":
            memory.ended.add(change.container_id)
        old = known == "exited" or (known == "running" and change.what == "started")
        return not old or change.what == "oom"  # also after the exit, because it is the reason

    def request_restart(self, uid: str, container: str | None) -> list[str]:
        """Request an in-place restart of running containers at the next sync; return their names."""
        memory = self._memory(uid)
        running = memory.observed.running if memory.observed else ()
        chosen = [c for c in running if container in (None, c.name)]
        memory.restart_requested.update(c.id for c in chosen)
        return [c.name for c in chosen]

    async def sync(self, pod: Pod) -> Outcome:
        """Bring the pod closer to its desired state."""
        pod = self._to_run(pod)
        memory = self._memory(pod.uid)
        memory.busy = True
        try:
            finished, again = await self._sync(pod, memory)
        except PodRejected as err:
            self._refuse(pod, AdmitRejection(err.reason, err.message))
            finished, again = True, None
        finally:
            memory.busy = False
            late, memory.late = memory.late, []
        news = [change for change in late if self._is_news(memory, change)]
        if news:
            again = LAG_SECONDS
        return finished, again

    async def _sync(self, pod: Pod, memory: PodSyncState) -> Outcome:
        memory.untold.clear()
        observed = await self._look(pod.uid, pod)
        self._resizing.observe(pod, observed)
        status = self._report(pod, observed)
        if status.phase in TERMINAL:
            return True, None
        left = time_left(pod, status, memory, asyncio.get_running_loop().time(), self._clock())
        if memory.registered != pod.spec:
            self._objects.register(pod)
            memory.registered = pod.spec
        requested, plan = frozenset(memory.restart_requested), self._resizing.plan(pod, observed)
        anew = says_restarting(status)
        actions = decide(pod, observed, self._verdicts(observed), requested, plan, restart_all=anew)
        if actions.reset:
            return False, await self._restart_all.clear(pod, actions.reset, memory)
        if (actions.idle or actions.resize) and observed.running and not self._cgroups.exists(pod):
            memory.current = False
            await stop_unbound(pod, observed, self._killer, self._journal)
            return False, 0
        if actions.idle:
            again = await self._refresh(pod)
            waits = (again, left, LAG_SECONDS if memory.ended else None)
            return False, min((seconds for seconds in waits if seconds is not None), default=None)
        self._journal.note(pod.uid, "decide", told(actions))
        before = observed
        memory.current = memory.mounted = False
        again = await self._doer.apply(pod, observed, actions, memory)
        if observed.running and not memory.mounted and not actions.kill_pod:
            # Containers in back-off must not keep volumes of running ones from being updated.
            refresh = await self._refresh(pod)
            again = min((seconds for seconds in (again, refresh) if seconds is not None), default=None)
        observed = await self._look(pod.uid)
        self._resizing.observe(pod, observed)
        status = self._report(pod, observed)
        if status.phase in TERMINAL:
            return True, None
        if ended(observed) - ended(before):
            # A fast init container: its event is no news, so nothing else would cause the next sync.
            return False, 0
        if memory.ended or (sandbox_is_stale(pod, observed) and not actions.create_sandbox):
            again = LAG_SECONDS
        return False, min((seconds for seconds in (again, left) if seconds is not None), default=None)

    def _to_run(self, pod: Pod) -> Pod:
        return self._restart_all.honoured(self._resizing.allocated(pod))

    async def _refresh(self, pod: Pod) -> float | None:
        """Update the pod's volumes; return the seconds until a retry after a failure."""
        if not pod.spec.volumes:
            return None
        try:
            await self._volumes.refresh(pod)
        except VolumeError as err:
            for problem in err.problems:
                self._journal.event(pod, "Warning", failure_event(problem), problem)
            self._journal.note(pod.uid, "volumes", str(err))
            return max(REFRESH_SECONDS, err.retry_after or 0.0)
        return None

    def probed(self, pod: Pod) -> None:
        """Report new probe results of a pod that is being stopped, which takes long."""
        memory = self._memories.get(pod.uid)
        if memory is not None and memory.observed is not None:
            self._report(self._to_run(pod), memory.observed)

    async def terminate(self, uid: str, pod: Pod | None, options: KillPodOptions) -> None:
        """Stop all containers of the pod."""
        pod = self._to_run(pod) if pod is not None else None
        memory = self._memory(uid)
        observed = await self._picture(memory, uid, pod)
        if pod is not None and (self.registrar is not None or options.pod_status is not None):
            self._report(pod, observed, override=options.pod_status)
        self._prober.stop_liveness_and_startup(uid)
        self._journal.note(uid, "terminate", f"stopping {len(observed.running)} running containers")
        memory.current = False
        grace = options.grace if pod is not None else max(1, grace_of(restored_pod(observed), None))
        try:
            await self._killer.pod(pod, observed, grace)
        except KillError as err:
            message = f"error killing pod: {err}"
            self._journal.event(pod or restored_pod(observed), "Warning", "FailedKillPod", message)
            raise SyncError(message) from err
        memory.stopped.update(sandbox.id for sandbox in observed.sandboxes)
        observed = await self._look(uid)
        if observed.running:
            raise SyncError(f"containers still run after being stopped: {[c.name for c in observed.running]}")
        await self._give_back_claims(uid)
        if pod is not None:
            self._report(pod, observed, terminal=True, override=options.pod_status)
        self._prober.remove_pod(uid)

    async def _give_back_claims(self, uid: str) -> None:
        """Unprepare the pod's claims before its final status, after which other pods may get its devices."""
        try:
            await self._claims.unprepare(uid)
        except ClaimError as err:
            self._journal.note(uid, "claims", str(err))
            if self._fate_of(uid) != "gone":
                raise SyncError(str(err)) from err
            # It was deleted by force, so it does not wait for a driver.
            log.error(err, "Failed to unprepare claims of a removed pod, retrying later", podUID=uid)

    async def clean_up(self, uid: str, pod: Pod | None) -> Remnants | None:
        """Release volumes and cgroup, and complete the deletion of a pod that is being deleted."""
        self._on_stopped(uid)
        if self.registrar is not None:
            self.registrar.stopped(uid)
        fate: Fate = "wanted"
        while True:
            try:
                fate = self._fate_of(uid)
                await self._finish(uid, pod, fate)
            except VolumeError as err:
                if pod is not None:
                    self._journal.event(pod, "Warning", "FailedUnMount", str(err))
                raise SyncError(f"cleaning up: {err}") from err
            except (OSError, CriError) as err:
                raise SyncError(f"cleaning up: {err}") from err
            # It may have been deleted concurrently; then the rest has to be cleaned up here.
            if fate != "wanted" or self._fate_of(uid) == "wanted":
                break
        memory = self._memories.pop(uid, None)
        if fate != "wanted":
            self._statuses.forget(uid)
            self._journal.forget(uid)
            self._on_gone(uid)
            if fate == "restarted":
                # The exited containers stay: the next worker of this pod continues its restart counts.
                return None
            known = memory if memory is not None and memory.current and not memory.ended else None
            return Remnants(
                uid,
                pod,
                known.observed if known is not None else None,
                memory.stopped if memory is not None else set(),
            )
        self._journal.note(uid, "clean-up", "volumes and cgroup are removed")
        if memory is not None and memory.observed is not None:
            memory.registered = None
            self._memories[uid] = memory
        return None

    async def _finish(self, uid: str, pod: Pod | None, fate: Fate) -> None:
        """Release what other pods and nodes may wait for; this does not depend on removing containers."""
        await self._volumes.unmount(uid)
        await self._cgroups.remove(uid)
        self._objects.unregister(uid)
        if fate == "leaving" and self.registrar is not None and pod is not None:
            # Until the status is reported, only the containers contain the exit codes.
            await self.registrar.told(uid)
            await self.registrar.remove(pod)

    async def remove(self, remnants: Remnants) -> None:
        """Remove containers, sandboxes, logs and directory of a finished pod.

        Raises SyncError after having tried everything.
        """
        uid = remnants.uid
        # After a failed attempt, the runtime has to be queried for what is left.
        observed, remnants.observed = remnants.observed, None
        try:
            if observed is None:
                observed = await self._observer.pod(uid)
        except CriError as err:
            raise SyncError(f"cannot remove pod: {err}") from err
        problems = await self._remove_from_runtime(observed, remnants.stopped)
        pod = remnants.pod or restored_pod(observed)
        try:
            # In a thread: containers may have created any number of files there.
            await finish_in_thread(lambda: self._starter.remove_logs(pod))
            await finish_in_thread(lambda: self._dirs.remove(uid))
        except OSError as err:
            problems.append(str(err))
        if problems:
            raise SyncError(f"cannot remove pod: {'; '.join(problems)}")
        self._on_removed(uid)

    async def _remove_from_runtime(self, observed: ObservedPod, stopped: AbstractSet[str]) -> list[str]:
        """Remove containers and sandboxes; return the errors. `stopped` sandboxes are not stopped again."""
        problems: list[str] = []
        held = set()
        for container in observed.containers:
            try:
                await remove_container(self._cri, container.id)
            except CriError as err:
                problems.append(str(err))
                held.add(container.sandbox_id)
        for sandbox in observed.sandboxes:
            # Removing a sandbox would force the removal of its containers.
            if sandbox.id in held:
                continue
            try:
                # Stop once: tearing down a network again takes as long as the first time.
                if sandbox.id not in stopped:
                    await self._cri.runtime.stop_pod_sandbox(sandbox.id)
                await self._cri.runtime.remove_pod_sandbox(sandbox.id)
            except NotFound:
                continue
            except CriError as err:
                problems.append(str(err))
        return problems

    def _memory(self, uid: str) -> PodSyncState:
        memory = self._memories.get(uid)
        if memory is None:
            self._arrivals += 1
            memory = self._memories[uid] = PodSyncState(self._arrivals)
        return memory

    async def _picture(self, memory: PodSyncState, uid: str, pod: Pod | None = None) -> ObservedPod:
        """Return the state of a pod to terminate; query the runtime only if it may have changed."""
        if memory.observed is not None and memory.current and not memory.ended:
            return memory.observed
        return await self._look(uid, pod)

    async def _look(self, uid: str, pod: Pod | None = None) -> ObservedPod:
        """Observe the pod in the runtime; a failure becomes an event of `pod`. Raises SyncError."""
        memory = self._memory(uid)
        try:
            if memory.observed is None and self._is_new(uid):
                observed = ObservedPod(uid=uid)  # the runtime has nothing of it: no query needed
            else:
                observed = await self._observer.pod(uid)
        except CriError as err:
            if pod is not None:
                self._journal.event(pod, "Warning", "FailedSync", f"error determining status: {err.rpc_text}")
            raise SyncError(str(err)) from err
        memory.observed, memory.current = observed, True
        running = {c.id for c in observed.running}
        memory.restart_requested &= running
        memory.ended &= running | {sandbox.id for sandbox in observed.sandboxes if sandbox.ready}
        return observed

    def _report(
        self,
        pod: Pod,
        observed: ObservedPod,
        *,
        terminal: bool = False,
        override: PodStatusFunc | None = None,
    ) -> PodStatus:
        self._prober.add_pod(pod)
        self._prober.observe(pod, observed)
        memory = self._memory(pod.uid)
        for container in observed.running:
            memory.failures.pop(container.name, None)
        previous = self._statuses.get(pod.uid) or status_before(pod, observed)
        view = StatusInputs(
            pod=pod,
            observed=observed,
            previous=previous,
            failures=self._told_failures(memory),
            health=self._prober.update_status(pod, observed),
            terminal=terminal,
            host_ips=self._host_ips,
            runtime_name=self._cri.version.runtime_name,
            recursive_handlers=self._recursive_handlers,
            stays_initialized=self._stays_initialized,
            resizes=self._resizing.shown(pod.uid),
            actuated=self._resizing.actuated(pod.uid),
            in_force=self._in_force(pod, previous),
            device_health=self._device_health(pod),
        )
        status = compute_status(view, api_now())
        if view.in_force is not None and status_patch(previous, status).keys() == {"resources"}:
            # Not reported on its own: the next status contains it.
            status.resources = previous.resources
        if previous.phase not in TERMINAL:
            status = self._past_deadline(pod, status, memory)
            status = override(status) if override is not None else status
        if terminal and not is_static_pod(pod):
            status = final_status(pod, status)
        before = view.previous.phase
        if self._statuses.set(pod, status) and status.phase != before:
            self._journal.note(pod.uid, "status", f"{before or 'new'} → {status.phase}")
        return status

    def _past_deadline(self, pod: Pod, status: PodStatus, memory: PodSyncState) -> PodStatus:
        """Return the status of a pod, Failed when the pod has exceeded activeDeadlineSeconds."""
        left = time_left(pod, status, memory, asyncio.get_running_loop().time(), self._clock())
        if left is None or left > 0 or ended_in_time(pod, status):
            return status
        self._journal.event(pod, "Normal", EXCEEDED, MESSAGE)
        return exceeded(status)

    def _told_failures(self, memory: PodSyncState) -> dict[str, StartFailure]:
        """Return why containers wait; in a cluster a crash is reported first, then its back-off.

        Upstream does the same. A standalone node reports the back-off immediately.
        """
        if self.registrar is None:
            return memory.failures
        return {name: failure for name, failure in memory.failures.items() if name not in memory.untold}

    def _in_force(self, pod: Pod, previous: PodStatus) -> StatusResources | None:
        """Return the enforced resources of a running pod of the API server; they stay after its end."""
        if previous.phase in TERMINAL:
            return previous.resources
        if previous.phase != "Running" or is_static_pod(pod):
            return None
        found = self._cgroups.in_force(pod, self._resizing.settings(pod))
        return StatusResources(limits=found[0], requests=found[1]) if found is not None else None

    def _verdicts(self, observed: ObservedPod) -> ProbeResults:
        def known(kind: Literal["liveness", "startup"]) -> dict[str, bool]:
            found = {c.id: self._prober.results.verdict(kind, c.id) for c in observed.running}
            return {
                id: verdict == "success" for id, verdict in found.items() if verdict in ("success", "failure")
            }

        return ProbeResults(liveness=known("liveness"), startup=known("startup"))
