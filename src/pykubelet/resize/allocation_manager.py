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

from pykubelet.admission.handler import AdmitRejection, Answer, DeferredResult, Preempt
from pykubelet.api.pod import Container, Pod, ResourceRequirements
from pykubelet.api.pod_status import PodCondition
from pykubelet.cm.cgroups.pod_cgroups import PodCgroup
from pykubelet.cm.cgroups.values import CgroupValues
from pykubelet.cm.resize import (
    NOTHING,
    AllocationState,
    PodResources,
    ResizePlan,
    Resource,
    at_most,
    in_effect,
    no_books,
    plan_resize,
    resources_of,
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
    summary,
    urgency,
    wishes,
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
    judge: Callable[[Pod], Answer | DeferredResult]
    """Evaluates whether the node has the resources that a pod desires."""
    make_room: Callable[[Pod, Preempt], Awaitable[None]]
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
        books: AllocationState | None = None,
        rules: ResizeRules | None = None,
        *,
        others: ResizeCollaborators | None = None,
        scope: TaskScope | None = None,
        group_of: Callable[[Pod], PodCgroup | None] = lambda pod: None,
        metrics: ResizeMetrics | None = None,
    ) -> None:
        """Initialize with the pod history, checkpoints and rules; without `others` nothing is resized."""
        self.books = books or no_books()
        self.metrics = metrics or ResizeMetrics()
        self.conditions = ResizeConditions(self.metrics.now)
        self._journal = journal
        self._rules = rules or ResizeRules()
        self.others = others
        """Callbacks; None until they are set."""
        self._group_of = group_of
        self._scope = scope
        self._views: dict[str, tuple[Pod, PodResources, Pod]] = {}
        self._bound: dict[str, PodResources] = {}
        """Allocation to which each pod's own cgroup was last set, for cgroups ensured by this process."""
        self._pending: set[str] = set()
        self._asked: set[str] = set()
        """Pods whose resize waits for a deferred admission result or a preemption."""
        self._trigger: str | None = None
        """Trigger of the scheduled evaluation of all pending resizes; None if none is scheduled."""
        self._next_retry = 0.0

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the uid of each pod whose `counted` resources may have changed."""
        self.books.allocated.add_listener(listener)
        self.books.actuated.add_listener(listener)
        self.conditions.add_listener(listener)

    # Views of the pod.

    def allocated(self, pod: Pod) -> Pod:
        """Return the pod with its allocated resources."""
        promised = self.books.allocated.of(pod.uid)
        if promised is None:
            return pod
        known = self._views.get(pod.uid)
        if known is None or known[0] is not pod or known[1] is not promised:
            known = pod, promised, with_resources(pod, promised, self._rules.scope)
            self._views[pod.uid] = known
        return known[2]

    def counted(self, pod: Pod) -> Pod:
        """Return the pod with the resources that others cannot use: the allocated and those it still has."""
        pod, actual = self.allocated(pod), self.books.actuated.of(pod.uid)
        if actual is None or not self.conditions.in_progress(pod.uid):
            return pod
        return at_most(pod, actual, self._rules.scope)

    def actuated(self, uid: str) -> Mapping[str, ResourceRequirements]:
        """Return the actuated resources of a pod's containers."""
        known = self.books.actuated.of(uid)
        return known.containers if known is not None else {}

    def settings(self, pod: Pod) -> CgroupValues | None:
        """Return the values of the pod's cgroup while a resize is in progress, else None."""
        group = self._group_of(pod) if self.conditions.in_progress(pod.uid) else None
        try:
            return group.settings() if group is not None else None
        except OSError as err:
            log.v(4).info("Failed to read pod cgroup", pod=pod.full_name, podUID=pod.uid, err=str(err))
            return None

    def shown(self, uid: str) -> list[PodCondition]:
        """Return the resize conditions of the pod's status."""
        return self.conditions.of(uid)

    # Pod lifecycle.

    def take(self, pod: Pod, before: Pod | None) -> None:
        """Handle a pod that was admitted or has changed; `before` is None for a new pod."""
        if before is None:
            self.conditions.take_over(pod)
        if self.books.allocated.of(pod.uid) is None:
            self.books.allocated.put(pod.uid, resources_of(pod, self._rules.scope))
        elif before is not None and not self._wishes_otherwise(before, pod):
            return
        if self.allocated(pod) is not pod:
            self._pending.add(pod.uid)
            self._look_again("pods_added" if before is None else "pod_updated")
        else:
            self.conditions.wait_no_more(pod.uid)

    def starting(self, pod: Pod, container: Container) -> None:
        """Record that a container is created with the resources of the pod's spec."""
        if container not in pod.spec.ephemeral_containers:
            self._set(pod.uid, container.name, in_effect(container, pod, self._rules.scope))

    def made(self, pod: Pod) -> None:
        """Record that the pod's cgroup exists; a new one has the resources of the pod's spec."""
        if pod.uid not in self._bound:
            self.settled(pod)
        if self._rules.scope.whole and pod.spec.resources is not None:
            known = self.books.actuated.of(pod.uid) or PodResources()
            if known.whole is None:
                self._keep(pod.uid, PodResources(known.containers, pod.spec.resources), at_once=False)

    def settled(self, pod: Pod) -> None:
        """Record that the pod's own cgroup was set to the resources of the pod's spec."""
        self._bound[pod.uid] = resources_of(pod, self._rules.scope)

    def resized(self, pod: Pod, container: Container, resources: ResourceRequirements) -> None:
        """Record that the runtime has set a container to these resources."""
        self._set(pod.uid, container.name, resources)

    def resized_pod_level(self, pod: Pod, resource: Resource) -> None:
        """Record that the pod-level allocation of a resource was actuated."""
        promised = pod.spec.resources
        if promised is None:
            return
        known = self.books.actuated.of(pod.uid) or PodResources()
        had = known.whole or ResourceRequirements()
        limits, requests = dict(had.limits), dict(had.requests)
        for has, wants in ((limits, promised.limits), (requests, promised.requests)):
            if resource in wants:
                has[resource] = wants[resource]
        whole = msgspec.structs.replace(had, limits=limits, requests=requests)
        self._keep(pod.uid, PodResources(known.containers, whole), at_once=known.whole not in (None, whole))

    def plan(self, pod: Pod, observed: ObservedPod) -> ResizePlan:
        """Return the changes by which running containers and the pod's cgroup get their allocation."""
        actuated = self.books.actuated.of(pod.uid)
        containers = (*pod.spec.init_containers, *pod.spec.containers)
        running = {
            one.name
            for one in containers
            if (last := observed.latest(one.name)) is not None and last.phase == "running"
        }
        plan = plan_resize(pod, running, actuated, self._rules.scope) if running else NOTHING
        # Also if no container runs: containers will be started in that cgroup.
        bound, promised = self._bound.get(pod.uid), self.books.allocated.of(pod.uid)
        stale = bound is not None and promised is not None and bound != promised
        return replace(plan, pod=True) if stale else plan

    def observe(self, pod: Pod, observed: ObservedPod) -> None:
        """Update the resize conditions from the observed pod."""
        # A new allocation may have been granted since the worker began this sync.
        pod = self.allocated(pod)
        plan = self.plan(pod, observed)
        known = self.books.actuated.of(pod.uid) or PodResources()
        if any(one.current is not None for one in plan.containers.values()) or (
            plan.whole and known.whole is not None
        ):
            self.conditions.go_on(pod)
        if plan:
            return
        generation = self.conditions.end(pod.uid)
        if generation is not None:
            self._journal.note(pod.uid, "resize", "done")
            message = summary("Pod resize completed", pod, generation)
            self._journal.event(pod, "Normal", "ResizeCompleted", message)
            self._look_again("pod_resized")

    def failed(self, pod: Pod, message: str) -> None:
        """Record that a resize failed, or was applied only partly; it will be retried."""
        self._journal.note(pod.uid, "resize", message)
        generation = self.conditions.fail(pod, ERROR, message)
        if generation is not None:
            text = summary("Pod resize error", pod, generation, message)
            self._journal.event(pod, "Warning", "ResizeError", text)

    def ended(self, uid: str) -> None:
        """Handle the end of a pod's containers: its resources may be free for others."""
        self._leave(uid, "pod_terminated")

    def gone(self, uid: str) -> None:
        """Remove a pod of which nothing is left."""
        self._views.pop(uid, None)
        self.books.allocated.forget(uid)
        self.books.actuated.forget(uid)
        self._leave(uid, "pods_removed")

    def tidy(self, uids: Collection[str]) -> None:
        """Remove the state of all pods but these, and evaluate pending resizes after RETRY_SECONDS."""
        self.books.allocated.keep_only(uids)
        self.books.actuated.keep_only(uids)
        if self._pending and asyncio.get_running_loop().time() >= self._next_retry:
            self._look_again("periodic_retry")

    def _leave(self, uid: str, trigger: str) -> None:
        self._pending.discard(uid)
        self._bound.pop(uid, None)
        self.conditions.forget(uid)
        self._look_again(trigger)

    # Decisions on pending resizes.

    def _wishes_otherwise(self, before: Pod, after: Pod) -> bool:
        changes = list(wishes(before, after, self._rules.scope))
        for change in changes:
            self.metrics.requested(*change)
        return bool(changes) or before.spec.resources != after.spec.resources

    def _look_again(self, trigger: str) -> None:
        """Schedule one evaluation of all pending resizes, unless one is scheduled already."""
        if self.others is None or not self._pending:
            return
        if self._trigger is None:
            self.others.later(self._retry)
        self._trigger = trigger

    def _retry(self) -> None:
        trigger, self._trigger = self._trigger or "periodic_retry", None
        assert self.others is not None
        if not self.others.is_ready():
            return  # `tidy` retries
        self._next_retry = asyncio.get_running_loop().time() + RETRY_SECONDS
        uids, self._pending = self._pending, set()
        found = [pod for uid in uids if (pod := self.others.pod(uid)) is not None]
        for pod in sorted(found, key=self._urgency):
            self._decide(pod, trigger)

    def _urgency(self, pod: Pod) -> tuple[object, ...]:
        since = self.conditions.waiting_since(pod.uid)
        return urgency(pod, self.allocated(pod), since, pod_level=self._rules.pod_level)

    def _decide(self, pod: Pod, trigger: str) -> None:
        assert self.others is not None
        allocated = self.allocated(pod)
        if allocated is pod:
            self.conditions.wait_no_more(pod.uid)
            self.others.wake(pod.uid)
            return
        if (why := infeasible(pod, allocated, self._rules)) is not None:
            self.metrics.infeasible(why.detail)
            self._wait(pod, INFEASIBLE, why.message)
            return
        self._settle(pod, self.others.judge(pod), trigger)

    def _settle(self, pod: Pod, answer: Answer | DeferredResult, trigger: str) -> None:
        match answer:
            case AdmitRejection():
                self._pending.add(pod.uid)
                self._wait(pod, answer.reason, answer.message)
            case DeferredResult() | Preempt():
                self._pending.add(pod.uid)
                if self._scope is not None and pod.uid not in self._asked:
                    self._asked.add(pod.uid)
                    self._scope.start(self._patiently(pod, answer, trigger), name=f"resize-{pod.uid}")
            case None:
                self._grant(pod, trigger)

    async def _patiently(self, pod: Pod, answer: DeferredResult | Preempt, trigger: str) -> None:
        """Wait for the deferred result or the preemption, then decide if the desired spec is unchanged."""
        assert self.others is not None
        found: Answer = None
        try:
            if isinstance(answer, DeferredResult):
                found = await answer.answer()
            else:
                await self.others.make_room(pod, answer)
        finally:
            self._asked.discard(pod.uid)
        now = self.others.pod(pod.uid)
        if isinstance(answer, Preempt) or now is None or now.spec != pod.spec:
            self._look_again(trigger)
            return
        self._pending.discard(pod.uid)
        self._settle(now, found, trigger)

    def _wait(self, pod: Pod, reason: str, message: str) -> None:
        assert self.others is not None
        before = self.shown(pod.uid)
        if self.conditions.wait(pod, reason, message):
            self._journal.note(pod.uid, "resize", f"{reason}: {message}")
            kind = "ResizeInfeasible" if reason == INFEASIBLE else "ResizeDeferred"
            text = summary(f"Pod resize {reason}", pod, pod.metadata.generation, message)
            self._journal.event(pod, "Warning", kind, text)
        if self.shown(pod.uid) != before:
            self.others.wake(pod.uid)

    def _grant(self, pod: Pod, trigger: str) -> None:
        assert self.others is not None
        try:
            self.books.allocated.put_for_good(pod.uid, resources_of(pod, self._rules.scope))
        except OSError as err:
            log.error(err, "Failed to checkpoint allocated resources, will retry", pod=pod.full_name)
            self._pending.add(pod.uid)
            return
        if self.conditions.is_deferred(pod.uid):
            self.metrics.accepted(trigger)
        self.conditions.wait_no_more(pod.uid)
        self.conditions.begin(pod)
        self._journal.note(pod.uid, "resize", "promised")
        message = summary("Pod resize started", pod, pod.metadata.generation)
        self._journal.event(pod, "Normal", "ResizeStarted", message)
        self.others.wake(pod.uid)

    def _set(self, uid: str, container: str, resources: ResourceRequirements) -> None:
        known = self.books.actuated.of(uid) or PodResources()
        # Starting a pod does not wait for the disk, but an existing entry must not become wrong.
        changes = known.containers.get(container) not in (None, resources)
        pod = PodResources({**known.containers, container: resources}, known.whole)
        self._keep(uid, pod, at_once=changes)

    def _keep(self, uid: str, resources: PodResources, *, at_once: bool) -> None:
        self.books.actuated.put(uid, resources)
        if not at_once:
            return
        try:
            self.books.actuated.write()
        except OSError as err:
            # The resize is repeated if the kubelet ends before the disk has space: harmless, but not free.
            log.error(err, "Failed to checkpoint actuated resources", podUID=uid)
            self.books.actuated.changed.set()


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
        began = self._clock()
        failure = ""
        try:
            sandbox_id = "" if actions.create_sandbox else actions.sandbox_id
            await self._resizer.apply(pod, sandbox_id, actions.resize)
            self._resizing.settled(pod)
        except ResizeError as err:
            failure = str(err)
            self._resizing.failed(pod, failure)
        self._resizing.metrics.resized(self._clock() - began, success=not failure)
        return not failure

    def starting(self, pod: Pod, container: Container) -> None:
        """Record that a container is created with the resources of the pod's spec."""
        self._resizing.starting(pod, container)

    def made(self, pod: Pod) -> None:
        """Record that the pod's cgroup exists."""
        self._resizing.made(pod)
