"""Pod admission: every new pod passes the admission handlers before it is synced, one after the other.

Most pods are admitted or rejected immediately. Some wait: for preempted pods to terminate, for device
plugins, or for the current node object when the known labels would reject them. Later pods wait behind them,
so that no other pod takes the resources freed for them; only a pod that does not compete with others waits
apart, with its resources reserved. The admitted pods are those that were admitted and have not terminated,
and those that an earlier kubelet process started and whose source has not been handled yet: a running pod is
never rejected for lack of resources.

A rejected pod is Failed with the reason, and nothing of it is started. A pod of the API server stays rejected
after a kubelet restart, by its status there; a static pod is evaluated again.

`AdmittedPods` keeps the sum of the resources of all admitted pods, so that the cost of admission does not
grow with their number: `mark` records that the share of a pod may have changed, and `usage_without` reads
only the marked pods again. Whether a pod counts, and with which resources, is decided by `pods_of` alone;
every component that it reads reports its changes to `mark`. The sum is in memory only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
from prometheus_client import CollectorRegistry, Counter

from pykubelet.admission.handler import (
    AdmitHandlerDeps,
    AdmitRejection,
    AdmitResult,
    Amounts,
    DeferredResult,
    PodAdmitAttributes,
    PodAdmitHandler,
    Preempt,
    Usage,
)
from pykubelet.admission.handler_chain import make_chain
from pykubelet.admission.node_support import Sysctls, apparmor_is_enabled, features_of_update, lacking
from pykubelet.admission.predicates import as_amounts, usage_of
from pykubelet.api.meta import Resources
from pykubelet.api.meta import now as api_now
from pykubelet.api.node import Node
from pykubelet.api.pod import Pod, PodSpec
from pykubelet.api.pod_status import PodStatus
from pykubelet.apiserver.errors import KubeError
from pykubelet.cm.qos import pod_requests, qos_class
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.logs import get_logger
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.podworkers.housekeeping import Housekeeping
from pykubelet.podworkers.pod_records import PodRecords
from pykubelet.podworkers.workers import PodWorkers, PodWorkerState
from pykubelet.resize.allocation_manager import AllocationManager
from pykubelet.status.compute import (
    PREEMPTED,
    PREEMPTING,
    TERMINAL,
    preempted_status,
    rejected_status,
    was_rejected,
)
from pykubelet.status.static_readiness import StaticReadiness
from pykubelet.util.metrics import PlainCounter
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)
_NOTHING = Usage(0, {})


class AdmittedPods:
    """Sum of the resources of all admitted pods, by pod uid."""

    def __init__(
        self, pods_of: Callable[[str], Sequence[Pod]], requests_of: Callable[[Pod], Amounts]
    ) -> None:
        """Initialize with the function that returns the pods that count under a uid: none, or one.

        `requests_of` returns the resources of a pod.
        """
        self._pods_of = pods_of
        self._requests_of = requests_of
        self._shares: dict[str, Usage] = {}
        self._count = 0
        self._amounts: dict[str, int] = {}
        self._marked: set[str] = set()

    def mark(self, uid: str) -> None:
        """Record that the share of a pod may have changed."""
        self._marked.add(uid)

    def mark_all(self, uids: Iterable[str]) -> None:
        """Record that the shares of several pods may have changed."""
        self._marked.update(uids)

    def usage_without(self, uid: str) -> Usage:
        """Return the resources of all admitted pods but one."""
        marked, self._marked = self._marked, set()
        for changed in marked:
            self._replace(changed, usage_of(self._pods_of(changed), self._requests_of))
        own = self._shares.get(uid, _NOTHING)
        amounts = {name: amount - own.amounts.get(name, 0) for name, amount in self._amounts.items()}
        return Usage(self._count - own.pods, amounts)

    def _replace(self, uid: str, share: Usage) -> None:
        before = self._shares.pop(uid, _NOTHING)
        if share.pods:
            self._shares[uid] = share
        self._count += share.pods - before.pods
        for name in before.amounts.keys() | share.amounts.keys():
            amount = self._amounts.get(name, 0) + share.amounts.get(name, 0) - before.amounts.get(name, 0)
            if amount:
                self._amounts[name] = amount
            else:
                self._amounts.pop(name, None)


class LazyPods(Sequence[Pod]):
    """Pods that are listed when they are first read: most admission handlers need only their sum."""

    def __init__(self, find: Callable[[], list[Pod]]) -> None:
        self._find = find

    @cached_property
    def _pods(self) -> list[Pod]:
        return self._find()

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._pods[index]

    def __len__(self) -> int:
        return len(self._pods)


_KNOWN = frozenset(
    {
        "AppArmor",
        "Evicted",
        "InitContainerRestartPolicyForbidden",
        "InvalidNodeInfo",
        "NodeShutdown",
        "OutOfcpu",
        "OutOfephemeral-storage",
        "OutOfmemory",
        "OutOfpods",
        "PodFeatureUnsupported",
        "PodLevelResourcesNotSupported",
        "PodOSNotSupported",
        "PodOSSelectorNodeLabelDoesNotMatch",
        "SupplementalGroupsPolicyNotSupported",
        "SysctlForbidden",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
        "UnexpectedPredicateFailureType",
        "UnknownReason",
        "VolumeAttachmentLimitExceeded",
    }
)
"""Rejection reasons with their own metric label; others share one."""


class AdmissionMetrics:
    """Metrics of pod admission; without a registry they are not exposed."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._rejected = Counter(
            "kubelet_admission_rejections_total", "Rejected pods.", ["reason"], registry=registry
        )
        self._preempted = PlainCounter(
            "kubelet_preemptions",
            "Preempted pods, by the resource that was insufficient.",
            ["preemption_signal"],
            registry=registry,
        )

    def rejected(self, reason: str) -> None:
        """Record a rejected pod."""
        if reason not in _KNOWN:
            reason = "OutOfExtendedResources" if reason.startswith("OutOf") else "Other"
        self._rejected.labels(reason).inc()

    def preempted(self, resource: str) -> None:
        """Record a preempted pod."""
        self._preempted.labels(resource).inc()


FETCH_SECONDS = 10.0
"""Seconds to wait for the current node object when the known one would reject a pod."""
SHORTEST_PREEMPTION_SECONDS = 10
WAITING = "AdmissionWaiting"
"""Reason of the event about a pod whose admission may take minutes; its message names the cause."""


class PodStarter:
    """Passes admitted pods to their workers."""

    def __init__(
        self,
        workers: PodWorkers,
        housekeeping: Housekeeping,
        allocation: AllocationManager,
        static_readiness: StaticReadiness,
    ) -> None:
        self._workers = workers
        self._housekeeping = housekeeping
        self._allocation = allocation
        self._static_readiness = static_readiness

    def start(self, pod: Pod) -> None:
        """Sync an admitted pod from now on; it waits for orphans that have its name."""
        self._housekeeping.terminate_namesakes(pod)
        worker = self._workers.get(pod.uid)
        if worker is None and is_static_pod(pod):
            pod = self._static_readiness.restore(pod)
        self._allocation.update_pod(pod, worker.pod if worker is not None else None)
        self._workers.sync(pod)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionNode:
    """The node as pod admission sees it: its object, its features, and further admission handlers."""

    own: Node
    """This node as the kubelet knows it: name, labels, taints, allocatable resources, features."""
    known: Callable[[], Node | None] = lambda: None
    """Returns the last observed node object of the API server."""
    fetch: Callable[[], Awaitable[Node]] | None = None
    """Requests the node object from the API server. Raises KubeError. None on a standalone node."""
    allowed_sysctls: Sequence[str] = ()
    gates: FeatureGates
    devices: Callable[[str], Resources] = lambda uid: {}
    """Returns the devices available to a pod, by its uid."""
    pressure: PodAdmitHandler | None = None
    allocation: PodAdmitHandler | None = None
    released: Callable[[str], None] = lambda uid: None
    """Releases what `allocation` has allocated to a pod that is rejected after all."""
    shutdown: PodAdmitHandler | None = None


class PodAdmission:
    """Admission of new pods; `may_start` is called before a pod is passed to its worker."""

    def __init__(
        self,
        node: AdmissionNode,
        records: PodRecords,
        workers: PodWorkers,
        allocation: AllocationManager,
        *,
        in_runtime: Callable[[], Mapping[str, ObservedPod]],
        start: Callable[[Pod], None],
        scope: TaskScope,
        metrics: AdmissionMetrics | None = None,
    ) -> None:
        """Initialize; `in_runtime` returns the pods of the last relist, `start` starts an admitted pod.

        Resources of a pod are its allocated ones, and for other pods all that they hold, independent of the
        desired ones.
        """
        self._admission_node = node
        self._records = records
        self._store = records.store
        self._statuses = records.statuses
        self._history = records.history
        self._workers = workers
        self._allocation = allocation
        self._in_runtime = in_runtime
        self._start = start
        self._scope = scope
        self._metrics = metrics or AdmissionMetrics()
        self._requests = _Requests(
            pod_level=node.gates.enabled("PodLevelResources"),
            claims=node.gates.enabled("DRANodeAllocatableResources"),
        )
        self.chain = make_chain(
            AdmitHandlerDeps(
                requests_of=self._requests,
                class_of=qos_class,
                gates=node.gates,
                allowed_sysctls=node.allowed_sysctls,
                kernel=os.uname().release,
                apparmor=apparmor_is_enabled(),
                pressure=node.pressure,
                allocation=node.allocation,
                shutdown=node.shutdown,
            )
        )
        self._queue: dict[str, Pod] = {}
        """Pods that wait for admission; the first one is being evaluated."""
        self._apart: dict[str, Pod] = {}
        """Pods whose admission takes long and does not block others; they count as admitted."""
        self._waited: set[str] = set()
        """Uids of queued pods that waited apart before."""
        self._admitted = AdmittedPods(self._counting, self._requests)
        self._relisted: Mapping[str, ObservedPod] = {}
        """Relist for which `_admitted` was last marked."""
        records.store.add_listener(self._admitted.mark)
        workers.add_listener(self._admitted.mark)
        allocation.add_listener(self._admitted.mark)

    def admit(self, pod: Pod) -> None:
        """Start a pod if it is admitted; a waiting pod is started later."""
        if self.may_start(pod):
            self._start(pod)

    def may_start(self, pod: Pod) -> bool:
        """Return whether a pod may be synced now; otherwise it was rejected or will be started later."""
        worker = self._workers.get(pod.uid)
        if worker is not None and worker.state is PodWorkerState.SYNCING:
            if worker.pod is not None:
                self._check_update(worker.pod, pod)
            return True
        if self._workers.is_reborn(pod.uid):
            return True
        if worker is None or not is_static_pod(pod):
            status = self._statuses.get(pod.uid)
            if status is not None and status.phase in TERMINAL:
                return False
        if worker is None and pod.status.phase in TERMINAL:
            return not self._stays_refused(pod)
        if pod.uid in self._apart:
            self._apart[pod.uid] = pod
            self.mark(pod.uid)
            return False
        waits = bool(self._queue) and not (worker is None and self._runs(pod.uid))
        result = self._evaluate_new(pod, self._node()) if not waits else None
        if isinstance(result, DeferredResult) and result.apart:
            self._set_apart(pod, result)
            return False
        if waits or isinstance(result, Preempt | DeferredResult) or self._may_be_stale(result):
            self._enqueue(pod)
            return False
        return self._settle(pod, result)

    def set_allowed_sysctls(self, allowed: Sequence[str]) -> None:
        """Replace `allowedUnsafeSysctls` for pods that are admitted afterwards."""
        for handler in self.chain.handlers:
            if isinstance(handler, Sysctls):
                handler.set_allowed(allowed)

    def set_allocatable(self, allocatable: Resources) -> None:
        """Replace the node's allocatable resources; admitted pods stay, also if they need more."""
        node = self._admission_node
        status = msgspec.structs.replace(node.own.status, allocatable=allocatable)
        self._admission_node = replace(node, own=msgspec.structs.replace(node.own, status=status))

    def allocated(self, pod: Pod) -> Pod:
        """Return a pod with the resources that are allocated to it."""
        return self._allocation.allocated(pod)

    def forget(self, uid: str) -> None:
        """Drop the state of a removed pod."""
        self._requests.forget(uid)
        self.mark(uid)

    def mark(self, uid: str) -> None:
        """Record that it may have changed whether a pod counts as admitted, or with which resources."""
        self._admitted.mark(uid)

    def _check_update(self, before: Pod, after: Pod) -> None:
        """Log an update of a running pod that this node cannot apply."""
        if before.spec is after.spec or not self._admission_node.gates.enabled("NodeDeclaredFeatures"):
            return
        missing = features_of_update(before, after) - set(self._admission_node.own.status.declared_features)
        if missing:
            self._history.event(after, "Warning", "FailedNodeDeclaredFeaturesCheck", lacking(missing))

    def _stays_refused(self, pod: Pod) -> bool:
        """Return whether an earlier kubelet process rejected this pod, and nothing of it is left."""
        if not was_rejected(pod.status) or self._runs(pod.uid):
            return False
        self._statuses.set(pod, pod.status)
        self._history.note(pod.uid, "admission", f"was refused before: {pod.status.reason}")
        return True

    # Evaluation

    def _evaluate_new(self, pod: Pod, node: Node) -> AdmitResult | DeferredResult:
        # Running containers of an earlier pod with this uid are terminating.
        running = self._workers.get(pod.uid) is None and self._runs(pod.uid)
        return self._evaluate(self._allocation.allocated(pod), node, running=running)

    def evaluate_resize(self, pod: Pod) -> AdmitResult | DeferredResult:
        """Evaluate the resize of an admitted pod.

        Exclusive CPUs, NUMA nodes and devices of its containers stay; a resize that would need new ones is
        infeasible and not evaluated here.
        """
        return self._evaluate(pod, self._node())

    def _evaluate(self, pod: Pod, node: Node, *, running: bool = False) -> AdmitResult | DeferredResult:
        return self.chain.admit(self._attempt(pod, node, running=running))

    def _attempt(self, pod: Pod, node: Node, *, running: bool) -> PodAdmitAttributes:
        return PodAdmitAttributes(
            pod=pod,
            node=node,
            other_pods=LazyPods(lambda: self._other_pods(pod)),
            used=self._used_by_others(pod),
            running=running,
            devices=lambda: self._admission_node.devices(pod.uid),
            renew=lambda: self._attempt(pod, self._node(), running=running),
        )

    def _settle(self, pod: Pod, result: AdmitResult) -> bool:
        if isinstance(result, AdmitRejection):
            self.reject(pod, result)
            return False
        self._history.note(pod.uid, "admission", "admitted")
        return True

    def reject(self, pod: Pod, rejection: AdmitRejection) -> None:
        """Reject a pod permanently, also one that was admitted before."""
        log.info(
            "Pod admission denied",
            pod=pod.full_name,
            podUID=pod.uid,
            reason=rejection.reason,
            message=rejection.message,
        )
        self._history.note(pod.uid, "admission", f"rejected: {rejection.reason}")
        self._history.event(pod, "Warning", rejection.reason, rejection.message)
        self._statuses.set(pod, rejected_status(pod, rejection, api_now()))
        self._metrics.rejected(rejection.reason)
        if self._runs(pod.uid):
            self._workers.end(pod)
        self._release(pod.uid)

    def _release(self, uid: str) -> None:
        """Release the allocations of a rejected pod, unless a container of it still runs."""
        if self._workers.get(uid) is None and not self._runs(uid):
            self._admission_node.released(uid)

    def _node(self) -> Node:
        return present_node(self._admission_node.own, self._admission_node.known())

    def _runs(self, uid: str) -> bool:
        seen = self._in_runtime().get(uid)
        return seen is not None and seen.is_alive

    def _used_by_others(self, pod: Pod) -> Usage:
        relisted = self._in_runtime()
        if relisted is not self._relisted:
            self._admitted.mark_all({*self._relisted, *relisted})
            self._relisted = relisted
        return self._admitted.usage_without(pod.uid)

    def _other_pods(self, pod: Pod) -> list[Pod]:
        """Return all admitted pods but one; reads every pod."""
        uids = {known.uid: None for known in self._store.pods()}
        uids.update(dict.fromkeys((*self._in_runtime(), *self._apart)))
        return [other for uid in uids if uid != pod.uid for other in self._counting(uid)]

    def _counting(self, uid: str) -> list[Pod]:
        """Return the pod with this uid, with the resources it counts with, if it counts as admitted.

        What this reads has to be reported to `mark` when it changes.
        """
        found = []
        pod, seen = self._store.get(uid), self._in_runtime().get(uid)
        if pod is not None:
            if self._is_admitted(uid):
                found.append(pod)
        elif (
            # A previous kubelet process started it, and its source has not been handled yet.
            seen is not None
            and seen.is_alive
            and self._workers.get(uid) is None
            and (coming := self._records.mux.get(uid)) is not None
        ):
            found.append(coming)
        if uid in self._apart and self._is_desired(uid):
            found.append(self._apart[uid])
        return [self._allocation.counted(counted) for counted in found]

    def _is_admitted(self, uid: str) -> bool:
        worker = self._workers.get(uid)
        if worker is None:
            return self._workers.is_reborn(uid)
        return worker.state in (PodWorkerState.SYNCING, PodWorkerState.TERMINATING)

    # Waiting

    def _may_be_stale(self, result: AdmitResult | DeferredResult) -> bool:
        return isinstance(result, AdmitRejection) and result.stale and self._admission_node.fetch is not None

    def _enqueue(self, pod: Pod) -> None:
        if not self._queue:
            self._scope.start(self._drain_queue(), name="admission")
        self._queue[pod.uid] = pod

    def _set_apart(self, pod: Pod, later: DeferredResult) -> None:
        if later.why:
            log.info("Pod admission waits", pod=pod.full_name, podUID=pod.uid, reason=later.why)
            self._history.note(pod.uid, "admission", later.why)
            self._history.event(pod, "Warning", WAITING, later.why)
        self._apart[pod.uid] = pod
        self.mark(pod.uid)
        self._scope.start(self._wait_apart(pod.uid, later), name=f"admission of {pod.full_name}")

    async def _wait_apart(self, uid: str, later: DeferredResult) -> None:
        result = await later.result()
        pod = self._apart.pop(uid)
        self.mark(uid)
        if not self._is_desired(uid):
            self._release(uid)
        elif isinstance(result, Preempt) or self._may_be_stale(result):
            # It has what it waited for: it is evaluated again, in its order.
            self._waited.add(uid)
            self._enqueue(pod)
        elif self._settle(pod, result):
            self._start(pod)

    async def _drain_queue(self) -> None:
        """Evaluate the waiting pods, in their order."""
        while self._queue:
            uid, pod = next(iter(self._queue.items()))
            result: AdmitResult = None
            if self._is_desired(uid):
                first = self._evaluate_new(pod, self._node())
                if isinstance(first, DeferredResult) and first.apart and uid not in self._waited:
                    self._set_apart(self._queue.pop(uid), first)
                    continue
                result = await first.result() if isinstance(first, DeferredResult) else first
                if self._may_be_stale(result):
                    result = await self._evaluate_to_end(pod, await self._newest_node())
                if isinstance(result, Preempt):
                    await self.preempt(pod, result)
            pod = self._queue.pop(uid)
            self._waited.discard(uid)
            if not self._is_desired(uid):
                # It was removed concurrently.
                self._release(uid)
            elif self._settle(pod, result):
                self._start(pod)

    async def _evaluate_to_end(self, pod: Pod, node: Node) -> AdmitResult:
        result = self._evaluate_new(pod, node)
        return await result.result() if isinstance(result, DeferredResult) else result

    def _is_desired(self, uid: str) -> bool:
        pod = self._store.get(uid)
        return pod is not None and (pod.metadata.deletion_timestamp is None or is_static_pod(pod))

    async def _newest_node(self) -> Node:
        assert self._admission_node.fetch is not None
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return present_node(self._admission_node.own, await self._admission_node.fetch())
        except (KubeError, TimeoutError) as err:
            log.error(err, "Failed to get the node object, using the last known one")
            return self._node()

    async def preempt(self, pod: Pod, preemption: Preempt) -> None:
        """Preempt pods, and wait until they have terminated, for a bounded time."""
        clock = asyncio.get_running_loop().time
        began = clock()
        for victim in preemption.victims:
            self._preempt_victim(victim, pod, preemption.resource)
        for victim in preemption.victims:
            grace = victim.spec.termination_grace_period_seconds or 0
            timeout = max(grace + grace // 2, SHORTEST_PREEMPTION_SECONDS)
            worker = self._workers.get(victim.uid)
            try:
                async with asyncio.timeout_at(began + timeout):
                    if worker is not None:
                        await worker.stopped.wait()
            except TimeoutError:
                self._history.event(
                    victim,
                    "Warning",
                    "ExceededGracePeriod",
                    "Container runtime did not kill the pod within specified grace period.",
                )
                continue
            self._metrics.preempted(preemption.resource)
            log.info("Pod evicted successfully", pod=victim.full_name, podUID=victim.uid)

    def _preempt_victim(self, victim: Pod, pod: Pod, resource: str) -> None:
        log.v(2).info(
            "Preempting pod to free up resources",
            pod=victim.full_name,
            podUID=victim.uid,
            insufficientResource=resource,
            requestingPod=pod.full_name,
        )
        self._history.note(victim.uid, "admission", f"makes room for {pod.full_name}: too little {resource}")
        self._history.event(victim, "Warning", PREEMPTING, PREEMPTED)

        def preempted(status: PodStatus) -> PodStatus:
            return preempted_status(victim, status, api_now())

        if self._workers.get(victim.uid) is None and self._runs(victim.uid):
            # An earlier kubelet process started it, and its source has not been handled yet.
            self._workers.end(victim, pod_status=preempted)
            return
        if self._workers.get(victim.uid) is None:
            # It waits for its start: without a worker, only its status prevents it.
            self._statuses.set(victim, preempted(self._statuses.get(victim.uid) or victim.status))
        self._workers.terminate(victim.uid, pod_status=preempted)


def present_node(own: Node, known: Node | None) -> Node:
    """Return the node for admission: labels, taints and extended resources are those of the API server.

    The host's capacity comes from the kubelet itself, which knows it first.
    """
    if known is None:
        return own
    status = msgspec.structs.replace(
        own.status,
        allocatable={**known.status.allocatable, **own.status.allocatable},
        features=known.status.features or own.status.features,
    )
    return Node(metadata=known.metadata, spec=known.spec, status=status)


class _Requests:
    """Resource requests of pods, computed once per version of a pod.

    `claims` includes the resources that claims use (feature gate `DRANodeAllocatableResources`).
    """

    def __init__(self, *, pod_level: bool, claims: bool = False) -> None:
        self._pod_level = pod_level
        self._claims = claims
        self._known: dict[str, tuple[PodSpec, Sequence[object], Amounts]] = {}

    def __call__(self, pod: Pod) -> Amounts:
        known = self._known.get(pod.uid)
        statuses = pod.status.node_allocatable_resource_claim_statuses if self._claims else ()
        if known is None or known[0] is not pod.spec or known[1] != statuses:
            requests = pod_requests(pod, pod_level=self._pod_level, claims=self._claims)
            known = pod.spec, statuses, as_amounts(requests)
            self._known[pod.uid] = known
        return known[2]

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)
