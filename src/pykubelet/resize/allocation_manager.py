"""Pods that shall have other resources while they run: what was promised, what is wished, what is being done.

Everybody works with a pod as it was promised (`allocated`); a wish that differs is looked at when it comes
and again whenever there may be room for it: a pod ended, another gave something back, or some minutes went
by. Granting it is one line in a book that survives the agent (`resize_book.py`); the pod's worker does the
rest in its next step and shows in the pod's status how far it got.

    wish ─ infeasible? ─ no room? ─ promised ─ set in the cgroups ─ done
           left alone     waits      (book 1)    (book 2)

The part of a pod's step that resizes it: done, told and counted; a failure does not stop the rest.
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
from pykubelet.kuberuntime.observe import ObservedPod
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
"""When wishes that wait are looked at again though nothing seems to have happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeCollaborators:
    """Whom resizing asks and tells."""

    pod: Callable[[str], Pod | None]
    """Gives the pod as its author wishes it; None when it is not to run any more."""
    judge: Callable[[Pod], Answer | DeferredResult]
    """Says whether there is room for what a pod wishes."""
    make_room: Callable[[Pod, Preempt], Awaitable[None]]
    """Ends those that have to go for a pod, and waits for it."""
    wake: Callable[[str], None]
    """Has a pod's worker look again."""
    is_ready: Callable[[], bool]
    """Whether all pods are known: before that nobody can say what room there is."""
    later: Callable[[Callable[[], None]], None]
    """Makes a call when all news that is there has been taken."""


class AllocationManager:
    """The resizes of one node."""

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
        """Take where events go, what is remembered, and who is asked; without others nothing is resized."""
        self.books = books or no_books()
        self.metrics = metrics or ResizeMetrics()
        self.conditions = ResizeConditions(self.metrics.now)
        self._journal = journal
        self._rules = rules or ResizeRules()
        self.others = others
        """Whom to ask and tell; None as long as nobody is there."""
        self._group_of = group_of
        self._scope = scope
        self._views: dict[str, tuple[Pod, PodResources, Pod]] = {}
        self._bound: dict[str, PodResources] = {}
        """The promise that each pod's own cgroup was last set to, of pods that have one by us."""
        self._pending: set[str] = set()
        self._asked: set[str] = set()
        """Pods of whose wishes somebody else has to be waited for."""
        self._trigger: str | None = None
        """Why all wishes are to be looked at, when that was asked for already."""
        self._next_retry = 0.0

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the uid of each pod of which `counted` may have changed."""
        self.books.allocated.add_listener(listener)
        self.books.actuated.add_listener(listener)
        self.conditions.add_listener(listener)

    # The pod as others shall see it.

    def allocated(self, pod: Pod) -> Pod:
        """Give the pod with the resources that it was promised."""
        promised = self.books.allocated.of(pod.uid)
        if promised is None:
            return pod
        known = self._views.get(pod.uid)
        if known is None or known[0] is not pod or known[1] is not promised:
            known = pod, promised, with_resources(pod, promised, self._rules.scope)
            self._views[pod.uid] = known
        return known[2]

    def counted(self, pod: Pod) -> Pod:
        """Give the pod with all that nobody else can have: what it was promised, and what it still has."""
        pod, actual = self.allocated(pod), self.books.actuated.of(pod.uid)
        if actual is None or not self.conditions.in_progress(pod.uid):
            return pod
        return at_most(pod, actual, self._rules.scope)

    def actuated(self, uid: str) -> Mapping[str, ResourceRequirements]:
        """Give what a pod's containers were last set to."""
        known = self.books.actuated.of(uid)
        return known.containers if known is not None else {}

    def settings(self, pod: Pod) -> CgroupValues | None:
        """Give what the pod's cgroup is set to, while it may not be what the pod was promised."""
        group = self._group_of(pod) if self.conditions.in_progress(pod.uid) else None
        try:
            return group.settings() if group is not None else None
        except OSError as err:
            log.v(4).info("A pod's cgroup cannot be read", pod=pod.full_name, podUID=pod.uid, err=str(err))
            return None

    def shown(self, uid: str) -> list[PodCondition]:
        """Give the conditions that the pod's status tells."""
        return self.conditions.of(uid)

    # What happens to pods.

    def take(self, pod: Pod, before: Pod | None) -> None:
        """Take a pod that was admitted, or has changed; `before` is None for one that is new here."""
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
        """Take note that a container is made with what the pod says."""
        if container not in pod.spec.ephemeral_containers:
            self._set(pod.uid, container.name, in_effect(container, pod, self._rules.scope))

    def made(self, pod: Pod) -> None:
        """Take note that the pod's cgroup is there; a new one has what the pod says."""
        if pod.uid not in self._bound:
            self.settled(pod)
        if self._rules.scope.whole and pod.spec.resources is not None:
            known = self.books.actuated.of(pod.uid) or PodResources()
            if known.whole is None:
                self._keep(pod.uid, PodResources(known.containers, pod.spec.resources), at_once=False)

    def settled(self, pod: Pod) -> None:
        """Take note that the pod's own cgroup was set to what the pod says."""
        self._bound[pod.uid] = resources_of(pod, self._rules.scope)

    def resized(self, pod: Pod, container: Container, resources: ResourceRequirements) -> None:
        """Take note that the runtime has set a container to this."""
        self._set(pod.uid, container.name, resources)

    def resized_whole(self, pod: Pod, resource: Resource) -> None:
        """Take note that the pod as a whole has what it was promised of a resource."""
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
        """Say what running containers and the pod's cgroup do not have of what the pod was promised."""
        actuated = self.books.actuated.of(pod.uid)
        containers = (*pod.spec.init_containers, *pod.spec.containers)
        running = {
            one.name
            for one in containers
            if (last := observed.latest(one.name)) is not None and last.phase == "running"
        }
        plan = plan_resize(pod, running, actuated, self._rules.scope) if running else NOTHING
        # Also for containers that do not run: they are going to be started in that cgroup.
        bound, promised = self._bound.get(pod.uid), self.books.allocated.of(pod.uid)
        stale = bound is not None and promised is not None and bound != promised
        return replace(plan, pod=True) if stale else plan

    def observe(self, pod: Pod, observed: ObservedPod) -> None:
        """Show whether the pod is being resized, now that it was looked at."""
        # It may have been promised something new since its worker began this step.
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
        """Show that the pod could not be resized, or not wholly; it will be tried again."""
        self._journal.note(pod.uid, "resize", message)
        generation = self.conditions.fail(pod, ERROR, message)
        if generation is not None:
            text = summary("Pod resize error", pod, generation, message)
            self._journal.event(pod, "Warning", "ResizeError", text)

    def ended(self, uid: str) -> None:
        """Take note that nothing of a pod runs any more: there may be room for others."""
        self._leave(uid, "pod_terminated")

    def gone(self, uid: str) -> None:
        """Drop a pod of which nothing is left."""
        self._views.pop(uid, None)
        self.books.allocated.forget(uid)
        self.books.actuated.forget(uid)
        self._leave(uid, "pods_removed")

    def tidy(self, uids: Collection[str]) -> None:
        """Drop what is known of all pods but these, and look at wishes that wait for long."""
        self.books.allocated.keep_only(uids)
        self.books.actuated.keep_only(uids)
        if self._pending and asyncio.get_running_loop().time() >= self._next_retry:
            self._look_again("periodic_retry")

    def _leave(self, uid: str, trigger: str) -> None:
        self._pending.discard(uid)
        self._bound.pop(uid, None)
        self.conditions.forget(uid)
        self._look_again(trigger)

    # What becomes of wishes.

    def _wishes_otherwise(self, before: Pod, after: Pod) -> bool:
        changes = list(wishes(before, after, self._rules.scope))
        for change in changes:
            self.metrics.requested(*change)
        return bool(changes) or before.spec.resources != after.spec.resources

    def _look_again(self, trigger: str) -> None:
        """Have all wishes that wait looked at, once for all that happens now."""
        if self.others is None or not self._pending:
            return
        if self._trigger is None:
            self.others.later(self._retry)
        self._trigger = trigger

    def _retry(self) -> None:
        trigger, self._trigger = self._trigger or "periodic_retry", None
        assert self.others is not None
        if not self.others.is_ready():
            return  # `tidy` asks again
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
        """Wait for somebody else, and decide then, if the wish is still the same."""
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
            log.error(err, "Could not write down a resize, will be tried again", pod=pod.full_name)
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
        # Starting a pod does not wait for the disk; what was written down must not become wrong.
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
            # It is done again if the agent ends before the disk has room: harmless, but not free.
            log.error(err, "Could not write down what a pod has", podUID=uid)
            self.books.actuated.changed.set()


class PodResizeStep:
    """Resizes pods, and keeps the books; without a resizer it only keeps them."""

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
        """Have a pod's containers set to what the pod says; False when that failed, which is told."""
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
        """Take note that a container is made with what the pod says."""
        self._resizing.starting(pod, container)

    def made(self, pod: Pod) -> None:
        """Take note that the pod's cgroup was made."""
        self._resizing.made(pod)
