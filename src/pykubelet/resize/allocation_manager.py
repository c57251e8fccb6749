"""Allocation manager: in-place resize of pods, from desired to allocated to actuated resources.

All components use a pod with its allocated resources (`allocated`). A desired spec that differs is evaluated
when it arrives, and again whenever resources may have become free: a pod has ended, another has shrunk, or
RETRY_SECONDS have passed. Granting it is one durable entry in the checkpoint of allocated resources
(`cm/resize.py`), which survives the kubelet; the pod worker applies it in its next sync, records the actuated
resources in a second checkpoint, and reports the progress in the pod's status.

    desired ─ infeasible? ─ no capacity? ─ allocated ───── actuated in the cgroups ─ completed
              not retried   Deferred       (checkpoint 1)  (checkpoint 2)

`PodResizeStep` is the part of a pod's sync that resizes it; its failure does not stop the rest of the sync.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace

import msgspec

from pykubelet.admission.handler import AdmitRejection, AdmitResult, DeferredResult, Preempt
from pykubelet.api.pod import Container, Pod, ResourceRequirements
from pykubelet.api.pod_status import PodCondition
from pykubelet.cm.cgroups.pod_cgroups import PodCgroup
from pykubelet.cm.cgroups.values import CgroupValues
from pykubelet.cm.resize import (
    NO_RESIZE,
    AllocationState,
    PodResources,
    ResizePlan,
    Resource,
    effective_resources,
    in_memory_allocation_state,
    plan_resize,
    resources_of,
    with_larger_requests,
    with_resources,
)
from pykubelet.kuberuntime.decide import Actions
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.kuberuntime.resize import ResizeError, Resizer
from pykubelet.logs import get_logger
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.resize.conditions import ResizeConditions
from pykubelet.resize.feasibility import (
    ERROR,
    INFEASIBLE,
    ResizeMetrics,
    ResizeRules,
    infeasible,
    requested_changes,
    summary,
    urgency,
)
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
RETRY_SECONDS = 180.0
"""Seconds after which pending resizes are evaluated again without another trigger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeCollaborators:
    """Callbacks of the allocation manager."""

    pod: Callable[[str], Pod | None]
    """Returns the pod with its desired spec; None if it is not to run any more."""
    evaluate: Callable[[Pod], AdmitResult | DeferredResult]
    """Evaluates whether the node has the resources that a pod desires."""
    preempt: Callable[[Pod, Preempt], Awaitable[None]]
    """Preempts the victims for a pod, and waits for their end."""
    wake: Callable[[str], None]
    """Wakes a pod's worker."""
    is_ready: Callable[[], bool]
    """Returns whether all pods are known: before that, the free resources are unknown."""
    later: Callable[[Callable[[], None]], None]
    """Makes a call after all queued updates have been handled."""


class AllocationManager:
    """Resizes of the pods of one node."""

    def __init__(
        self,
        journal: PodHistory,
        state: AllocationState | None = None,
        rules: ResizeRules | None = None,
        *,
        scope: TaskScope | None = None,
        group_of: Callable[[Pod], PodCgroup | None] = lambda pod: None,
        metrics: ResizeMetrics | None = None,
    ) -> None:
        """Initialize with the pod history, checkpoints and rules; nothing is resized before `start`."""
        self.state = state or in_memory_allocation_state()
        self.metrics = metrics or ResizeMetrics()
        self.conditions = ResizeConditions(self.metrics.now)
        self._journal = journal
        self._rules = rules or ResizeRules()
        self._collaborators: ResizeCollaborators | None = None
        self._group_of = group_of
        self._scope = scope
        self._views: dict[str, tuple[Pod, PodResources, Pod]] = {}
        self._bound: dict[str, PodResources] = {}
        """Allocation to which each pod's own cgroup was last set, for cgroups ensured by this process."""
        self._pending: set[str] = set()
        self._waiting: set[str] = set()
        """Pods whose resize waits for a deferred admission result or a preemption."""
        self._trigger: str | None = None
        """Trigger of the scheduled evaluation of all pending resizes; None if none is scheduled."""
        self._next_retry = 0.0

    def start(self, collaborators: ResizeCollaborators) -> None:
        """Evaluate pending resizes from now on, with parts of the pod engine that use this manager."""
        self._collaborators = collaborators

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the uid of each pod whose `counted` resources may have changed."""
        self.state.allocated.add_listener(listener)
        self.state.actuated.add_listener(listener)
        self.conditions.add_listener(listener)

    # Views of the pod.

    def allocated(self, pod: Pod) -> Pod:
        """Return the pod with its allocated resources."""
        allocated = self.state.allocated.get(pod.uid)
        if allocated is None:
            return pod
        known = self._views.get(pod.uid)
        if known is None or known[0] is not pod or known[1] is not allocated:
            known = pod, allocated, with_resources(pod, allocated, self._rules.scope)
            self._views[pod.uid] = known
        return known[2]

    def counted(self, pod: Pod) -> Pod:
        """Return the pod with the resources that others cannot use: the allocated and those it still has."""
        pod, actual = self.allocated(pod), self.state.actuated.get(pod.uid)
        if actual is None or not self.conditions.in_progress(pod.uid):
            return pod
        return with_larger_requests(pod, actual, self._rules.scope)

    def actuated(self, uid: str) -> Mapping[str, ResourceRequirements]:
        """Return the actuated resources of a pod's containers."""
        known = self.state.actuated.get(uid)
        return known.containers if known is not None else {}

    def settings(self, pod: Pod) -> CgroupValues | None:
        """Return the values of the pod's cgroup while a resize is in progress, else None."""
        group = self._group_of(pod) if self.conditions.in_progress(pod.uid) else None
        try:
            return group.settings() if group is not None else None
        except OSError as err:
            log.v(4).info("Failed to read pod cgroup", pod=pod.full_name, podUID=pod.uid, err=str(err))
            return None

    def status_conditions(self, uid: str) -> list[PodCondition]:
        """Return the resize conditions of the pod's status."""
        return self.conditions.get(uid)

    # Pod lifecycle.

    def update_pod(self, pod: Pod, before: Pod | None) -> None:
        """Handle a pod that was admitted or has changed; `before` is None for a new pod."""
        if before is None:
            self.conditions.restore(pod)
        if self.state.allocated.get(pod.uid) is None:
            self.state.allocated.put(pod.uid, resources_of(pod, self._rules.scope))
        elif before is not None and not self._desires_change(before, pod):
            return
        if self.allocated(pod) is not pod:
            self._pending.add(pod.uid)
            self._schedule_retry("pods_added" if before is None else "pod_updated")
        else:
            self.conditions.clear_pending(pod.uid)

    def starting(self, pod: Pod, container: Container) -> None:
        """Record that a container is created with the resources of the pod's spec."""
        if container not in pod.spec.ephemeral_containers:
            self._set(pod.uid, container.name, effective_resources(container, pod, self._rules.scope))

    def on_cgroup_created(self, pod: Pod) -> None:
        """Record that the pod's cgroup exists; a new one has the resources of the pod's spec."""
        if pod.uid not in self._bound:
            self.on_cgroup_set(pod)
        if self._rules.scope.pod_level and pod.spec.resources is not None:
            known = self.state.actuated.get(pod.uid) or PodResources()
            if known.pod_level is None:
                self._record_actuated(
                    pod.uid, PodResources(known.containers, pod.spec.resources), durable=False
                )

    def on_cgroup_set(self, pod: Pod) -> None:
        """Record that the pod's own cgroup was set to the resources of the pod's spec."""
        self._bound[pod.uid] = resources_of(pod, self._rules.scope)

    def resized(self, pod: Pod, container: Container, resources: ResourceRequirements) -> None:
        """Record that the runtime has set a container to these resources."""
        self._set(pod.uid, container.name, resources)

    def resized_pod_level(self, pod: Pod, resource: Resource) -> None:
        """Record that the pod-level allocation of a resource was actuated."""
        allocated = pod.spec.resources
        if allocated is None:
            return
        known = self.state.actuated.get(pod.uid) or PodResources()
        had = known.pod_level or ResourceRequirements()
        limits, requests = dict(had.limits), dict(had.requests)
        for actuated_amounts, allocated_amounts in (
            (limits, allocated.limits),
            (requests, allocated.requests),
        ):
            if resource in allocated_amounts:
                actuated_amounts[resource] = allocated_amounts[resource]
        pod_level = msgspec.structs.replace(had, limits=limits, requests=requests)
        self._record_actuated(
            pod.uid,
            PodResources(known.containers, pod_level),
            durable=known.pod_level not in (None, pod_level),
        )

    def plan(self, pod: Pod, observed: ObservedPod) -> ResizePlan:
        """Return the changes by which running containers and the pod's cgroup get their allocation."""
        actuated = self.state.actuated.get(pod.uid)
        containers = (*pod.spec.init_containers, *pod.spec.containers)
        running = {
            container.name
            for container in containers
            if (status := observed.latest(container.name)) is not None and status.phase == "running"
        }
        plan = plan_resize(pod, running, actuated, self._rules.scope) if running else NO_RESIZE
        # Also if no container runs: containers will be started in that cgroup.
        bound, allocated = self._bound.get(pod.uid), self.state.allocated.get(pod.uid)
        stale = bound is not None and allocated is not None and bound != allocated
        return replace(plan, pod=True) if stale else plan

    def observe(self, pod: Pod, observed: ObservedPod) -> None:
        """Update the resize conditions from the observed pod."""
        # A new allocation may have been granted since the worker began this sync.
        pod = self.allocated(pod)
        plan = self.plan(pod, observed)
        known = self.state.actuated.get(pod.uid) or PodResources()
        if any(resize.current is not None for resize in plan.containers.values()) or (
            plan.pod_level and known.pod_level is not None
        ):
            self.conditions.ensure_in_progress(pod)
        if plan:
            return
        generation = self.conditions.clear_in_progress(pod.uid)
        if generation is not None:
            self._journal.note(pod.uid, "resize", "done")
            message = summary("Pod resize completed", pod, generation)
            self._journal.event(pod, "Normal", "ResizeCompleted", message)
            self._schedule_retry("pod_resized")

    def failed(self, pod: Pod, message: str) -> None:
        """Record that a resize failed, or was applied only partly; it will be retried."""
        self._journal.note(pod.uid, "resize", message)
        generation = self.conditions.set_error(pod, ERROR, message)
        if generation is not None:
            text = summary("Pod resize error", pod, generation, message)
            self._journal.event(pod, "Warning", "ResizeError", text)

    def on_pod_terminated(self, uid: str) -> None:
        """Handle the end of a pod's containers: its resources may be free for others."""
        self._leave(uid, "pod_terminated")

    def on_pod_removed(self, uid: str) -> None:
        """Remove a pod of which nothing is left."""
        self._views.pop(uid, None)
        self.state.allocated.forget(uid)
        self.state.actuated.forget(uid)
        self._leave(uid, "pods_removed")

    def tidy(self, uids: Collection[str]) -> None:
        """Remove the state of all pods but these, and evaluate pending resizes after RETRY_SECONDS."""
        self.state.allocated.retain(uids)
        self.state.actuated.retain(uids)
        if self._pending and asyncio.get_running_loop().time() >= self._next_retry:
            self._schedule_retry("periodic_retry")

    def _leave(self, uid: str, trigger: str) -> None:
        self._pending.discard(uid)
        self._bound.pop(uid, None)
        self.conditions.forget(uid)
        self._schedule_retry(trigger)

    # Decisions on pending resizes.

    def _desires_change(self, before: Pod, after: Pod) -> bool:
        changes = list(requested_changes(before, after, self._rules.scope))
        for change in changes:
            self.metrics.requested(*change)
        return bool(changes) or before.spec.resources != after.spec.resources

    def _schedule_retry(self, trigger: str) -> None:
        """Schedule one evaluation of all pending resizes, unless one is scheduled already."""
        if self._collaborators is None or not self._pending:
            return
        if self._trigger is None:
            self._collaborators.later(self._retry)
        self._trigger = trigger

    def _retry(self) -> None:
        trigger, self._trigger = self._trigger or "periodic_retry", None
        assert self._collaborators is not None
        if not self._collaborators.is_ready():
            return  # `tidy` retries
        self._next_retry = asyncio.get_running_loop().time() + RETRY_SECONDS
        uids, self._pending = self._pending, set()
        found = [pod for uid in uids if (pod := self._collaborators.pod(uid)) is not None]
        for pod in sorted(found, key=self._urgency):
            self._decide(pod, trigger)

    def _urgency(self, pod: Pod) -> tuple[object, ...]:
        since = self.conditions.waiting_since(pod.uid)
        return urgency(pod, self.allocated(pod), since, pod_level=self._rules.pod_level)

    def _decide(self, pod: Pod, trigger: str) -> None:
        assert self._collaborators is not None
        allocated = self.allocated(pod)
        if allocated is pod:
            self.conditions.clear_pending(pod.uid)
            self._collaborators.wake(pod.uid)
            return
        if (why := infeasible(pod, allocated, self._rules)) is not None:
            self.metrics.infeasible(why.detail)
            self._wait(pod, INFEASIBLE, why.message)
            return
        self._apply_decision(pod, self._collaborators.evaluate(pod), trigger)

    def _apply_decision(self, pod: Pod, result: AdmitResult | DeferredResult, trigger: str) -> None:
        match result:
            case AdmitRejection():
                self._pending.add(pod.uid)
                self._wait(pod, result.reason, result.message)
            case DeferredResult() | Preempt():
                self._pending.add(pod.uid)
                if self._scope is not None and pod.uid not in self._waiting:
                    self._waiting.add(pod.uid)
                    self._scope.start(self._decide_after_wait(pod, result, trigger), name=f"resize-{pod.uid}")
            case None:
                self._grant(pod, trigger)

    async def _decide_after_wait(self, pod: Pod, result: DeferredResult | Preempt, trigger: str) -> None:
        """Wait for the deferred result or the preemption, then decide if the desired spec is unchanged."""
        assert self._collaborators is not None
        admission: AdmitResult = None
        try:
            if isinstance(result, DeferredResult):
                admission = await result.result()
            else:
                await self._collaborators.preempt(pod, result)
        finally:
            self._waiting.discard(pod.uid)
        now = self._collaborators.pod(pod.uid)
        if isinstance(result, Preempt) or now is None or now.spec != pod.spec:
            self._schedule_retry(trigger)
            return
        self._pending.discard(pod.uid)
        self._apply_decision(now, admission, trigger)

    def _wait(self, pod: Pod, reason: str, message: str) -> None:
        assert self._collaborators is not None
        before = self.status_conditions(pod.uid)
        if self.conditions.set_pending(pod, reason, message):
            self._journal.note(pod.uid, "resize", f"{reason}: {message}")
            kind = "ResizeInfeasible" if reason == INFEASIBLE else "ResizeDeferred"
            text = summary(f"Pod resize {reason}", pod, pod.metadata.generation, message)
            self._journal.event(pod, "Warning", kind, text)
        if self.status_conditions(pod.uid) != before:
            self._collaborators.wake(pod.uid)

    def _grant(self, pod: Pod, trigger: str) -> None:
        assert self._collaborators is not None
        try:
            self.state.allocated.put_durable(pod.uid, resources_of(pod, self._rules.scope))
        except OSError as err:
            log.error(err, "Failed to checkpoint allocated resources, will retry", pod=pod.full_name)
            self._pending.add(pod.uid)
            return
        if self.conditions.is_deferred(pod.uid):
            self.metrics.accepted(trigger)
        self.conditions.clear_pending(pod.uid)
        self.conditions.set_in_progress(pod)
        self._journal.note(pod.uid, "resize", "promised")
        message = summary("Pod resize started", pod, pod.metadata.generation)
        self._journal.event(pod, "Normal", "ResizeStarted", message)
        self._collaborators.wake(pod.uid)

    def _set(self, uid: str, container: str, resources: ResourceRequirements) -> None:
        known = self.state.actuated.get(uid) or PodResources()
        # Starting a pod does not wait for the disk, but an existing entry must not become wrong.
        changes = known.containers.get(container) not in (None, resources)
        pod = PodResources({**known.containers, container: resources}, known.pod_level)
        self._record_actuated(uid, pod, durable=changes)

    def _record_actuated(self, uid: str, resources: PodResources, *, durable: bool) -> None:
        self.state.actuated.put(uid, resources)
        if not durable:
            return
        try:
            self.state.actuated.write()
        except OSError as err:
            # The resize is repeated if the kubelet ends before the disk has space: harmless, but not free.
            log.error(err, "Failed to checkpoint actuated resources", podUID=uid)
            self.state.actuated.changed.set()


class PodResizeStep:
    """Resize step of a pod's sync; without a resizer it only records the actuated resources."""

    def __init__(
        self,
        resizing: AllocationManager,
        resizer: Resizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resizing = resizing
        self._resizer = resizer
        self._clock = clock

    async def apply(self, pod: Pod, actions: Actions) -> bool:
        """Set the pod's containers to their allocation; return False on failure, which is reported."""
        if self._resizer is None:
            return True
        started_at = self._clock()
        failure = ""
        try:
            sandbox_id = "" if actions.create_sandbox else actions.sandbox_id
            await self._resizer.apply(pod, sandbox_id, actions.resize)
            self._resizing.on_cgroup_set(pod)
        except ResizeError as err:
            failure = str(err)
            self._resizing.failed(pod, failure)
        self._resizing.metrics.resized(self._clock() - started_at, success=not failure)
        return not failure
