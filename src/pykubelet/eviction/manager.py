"""Eviction manager: measures the node, sets its pressure conditions, reclaims resources and evicts pods.

A round runs every ten seconds, and immediately after a notification of the kernel. It acts on the most urgent
threshold: first dead containers and unused images are removed, if they are on the disk that is short; only if
the node is still short, one pod is evicted, and the next round follows when that pod has left the node. Pods
above their own limits on local storage are evicted in any case.

While a pod terminates with a longer grace period, or resources are reclaimed, the node is measured as often
as between rounds, and its conditions are set. A hard threshold ends that grace period, one of memory also the
reclaim.

The state is in memory. After a restart of the kubelet soft thresholds begin their grace periods again, and a
node condition is True again after the first round if its threshold is still met.

A pod that does not terminate in time is not waited for again: the next round evicts another one if the node
is still short. A failure of a part (a runtime that does not respond, statistics that are missing) is logged,
and the round goes on with what is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Histogram

from pykubelet.api.meta import now as api_now
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.eviction.admission import PressureConditions
from pykubelet.eviction.custom_ranking import CustomRanking
from pykubelet.eviction.decide import (
    Decision,
    EvictionState,
    Release,
    decide,
    expected_release,
    is_released,
    reclaim_plan,
    thresholds_met,
)
from pykubelet.eviction.local_storage import exceeded_limit, has_storage_limits
from pykubelet.eviction.memory_notifier import MemoryNotifier
from pykubelet.eviction.messages import EVICTED, evicted_status, eviction_message
from pykubelet.eviction.observations import NodeMeasurements, Observations, PodUsage, observe
from pykubelet.eviction.ranking import PreviewedOrder, RankedPod, rank
from pykubelet.eviction.report import PressureReport, build_report
from pykubelet.eviction.signals import (
    MEMORY,
    Disks,
    NodeConditionType,
    Threshold,
    is_disk_signal,
    with_containerfs,
)
from pykubelet.logs import get_logger
from pykubelet.podconfig.static_pods import is_critical_pod
from pykubelet.util.metrics import SECONDS, PlainCounter
from pykubelet.util.tasks import TaskScope, wait_seconds

log = get_logger(__name__)
MONITORING_SECONDS = 10.0
MIN_ROUND_SECONDS = 1.0
"""Seconds between two rounds that notifications of the kernel cause."""
CLEANUP_TIMEOUT_SECONDS = 30.0
"""Seconds for which a round waits until evicted pods have left the node."""
RECLAIM_TIMEOUT_SECONDS = 300.0
"""Seconds for the removal of dead containers, and of images."""
RELEASE_TIMEOUT_SECONDS = 10.0
"""Seconds for which the next eviction waits until the files of an evicted pod are deleted.

containerd deletes the writable layer of a removed container later, by its own garbage collection.
"""
RELEASE_POLL_SECONDS = 0.25
IMMEDIATE_GRACE_SECONDS = 1
"""Grace period of pods that are evicted for a hard threshold or a limit of their own."""
StatusFunction = Callable[[PodStatus], PodStatus]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionSettings:
    """Configuration of the eviction manager; times are in seconds."""

    thresholds: Sequence[Threshold]
    transition_period: float = 300.0
    max_pod_grace_period: int = 0
    """Longest grace period of pods that are evicted for a soft threshold."""
    local_storage: bool = True
    """Whether limits on local storage are enforced (`localStorageCapacityIsolation`)."""
    pod_level: bool = True
    """Whether pod-level resources count (`PodLevelResources`)."""
    separate_disks: bool = True
    """Whether images and writable layers may be on different disks (`KubeletSeparateDiskGC`)."""
    interval: float = MONITORING_SECONDS


class Measurements(Protocol):
    """Provider of the measured facts."""

    async def node(self) -> NodeMeasurements:
        """Measure the node now."""

    async def pods(
        self, uids: Collection[str], *, detailed: bool, volumes: bool = False
    ) -> Mapping[str, PodUsage]:
        """Return the usage of pods by uid; `detailed` includes the number of processes.

        `volumes` measures their volumes now: the last measurement may be two minutes old, and a pod can fill
        a disk in seconds.
        """


class PodKiller(Protocol):
    """Termination of pods."""

    async def kill(self, pod: Pod, grace: int, status: StatusFunction) -> bool:
        """Terminate a pod with a grace period in seconds; return whether it terminated in time."""

    async def wait_finished(self, uids: Collection[str]) -> None:
        """Wait until the pods have left the node."""

    def is_finished(self, uid: str) -> bool:
        """Return whether a pod has left the node."""


class EventSink(Protocol):
    """Recorder of events."""

    def node_event(self, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Record an event about the node."""

    def pod_event(self, pod: Pod, reason: str, message: str, annotations: Mapping[str, str]) -> None:
        """Record a Warning event about a pod."""


@dataclass(frozen=True, slots=True)
class NodeReclaim:
    """Removal of what no pod needs; both functions may raise."""

    containers: Callable[[], Awaitable[None]]
    """Removes all dead containers."""
    images: Callable[[], Awaitable[None]]
    """Removes all images that no container uses."""


class EvictionMetrics:
    """Metrics of evictions, with upstream's names; without a registry they are not exposed."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.evictions = PlainCounter(
            "kubelet_evictions", "Evicted pods, by eviction signal.", ["eviction_signal"], registry=registry
        )
        self.stats_age = Histogram(
            "kubelet_eviction_stats_age_seconds",
            "Age in seconds of the sample on which an eviction is based, by eviction signal.",
            ["eviction_signal"],
            buckets=SECONDS,
            registry=registry,
        )


class SplitDiskError(Exception):
    """Raised when images and writable layers are on different disks without `separate_disks`."""


class EvictionManager:
    """Keeps the node from running out of memory, disk space, inodes and process IDs."""

    def __init__(
        self,
        settings: EvictionSettings,
        measurements: Measurements,
        pods: Callable[[], Sequence[Pod]],
        killer: PodKiller,
        reclaim: NodeReclaim,
        events: EventSink,
        conditions: PressureConditions,
        *,
        ranking: CustomRanking | None = None,
        metrics: EvictionMetrics | None = None,
        make_notifier: Callable[[Callable[[], None]], MemoryNotifier] | None = None,
    ) -> None:
        """Initialize; `pods` returns the pods that have a worker and have not terminated.

        `make_notifier` builds the kernel's notification, with the function that it calls.
        """
        self._settings = settings
        self._measurements = measurements
        self._pods = pods
        self._killer = killer
        self._reclaim = reclaim
        self._events = events
        self._conditions = conditions
        self._ranking = ranking
        self._metrics = metrics or EvictionMetrics()
        self._notified = asyncio.Event()
        self._notifier = make_notifier(self._notified.set) if make_notifier is not None else None
        self._state = EvictionState()
        self._disks: Disks | None = None
        self._unmeasured: frozenset[str] = frozenset()
        self._split_logged = False
        self._release: Release | None = None
        self._stuck: set[str] = set()
        """Uids of evicted pods that did not terminate in time."""
        self._warned: set[str] = set()
        """Uids of critical pods above a limit, for which that was logged."""

    def set_settings(self, settings: EvictionSettings) -> None:
        """Replace the configuration, and start a round with it immediately.

        A threshold that stays the same keeps its grace period; one that is no longer configured does not act.
        """
        self._settings = settings
        current = set(with_containerfs(settings.thresholds, self._disks or Disks()))
        self._state = replace(
            self._state, acting=tuple(acting for acting in self._state.acting if acting in current)
        )
        if self._notifier is not None:
            # The next round watches the new thresholds.
            self._notifier.close()
        self._notified.set()

    async def run(self) -> NoReturn:
        """Run rounds until cancelled."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                started = clock()
                self._notified.clear()
                evicted: Sequence[Pod] = ()
                try:
                    evicted = await self.synchronize()
                except SplitDiskError as err:
                    self._log_split(err)
                except Exception as err:  # a bug must not leave the node without eviction
                    log.exception(err, "Eviction round failed")
                if evicted:
                    await self._wait_finished(evicted)
                else:
                    await self._wait(started)
        finally:
            if self._notifier is not None:
                self._notifier.close()

    def _log_split(self, err: SplitDiskError) -> None:
        if not self._split_logged:
            log.error(err, "Failed to relieve the node, pods are only evicted for limits of their own")
        self._split_logged = True

    async def _wait(self, started: float) -> None:
        """Wait until the next round is due, or for a notification of the kernel."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.interval):
                await self._notified.wait()
        except TimeoutError:
            return
        await asyncio.sleep(wait_seconds(started + MIN_ROUND_SECONDS - loop.time()))

    async def synchronize(self) -> Sequence[Pod]:
        """Run one round, and return the evicted pods.

        Raises SplitDiskError if the thresholds cannot act: conditions are set and limits enforced before.
        """
        settings = self._settings
        # Conditions of thresholds that are no longer configured end after the transition period.
        if not settings.thresholds and not settings.local_storage and not self._state.conditions:
            return ()
        decision, observations = await self._update_state()
        pods = self._pods()
        uids = {pod.uid for pod in pods}
        self._stuck &= uids
        self._warned &= uids
        if settings.local_storage and (evicted := await self._enforce_limits(pods)):
            return evicted
        if self._disks is not None and self._disks.split and not settings.separate_disks:
            raise SplitDiskError(
                "KubeletSeparateDiskGC is turned off but we still have a split filesystem: "
                "enable the feature gate, or put images and writable layers on one file system"
            )
        if not decision.to_act:
            return ()
        return await self._relieve(decision.to_act, observations, pods)

    async def report(self, *, measure_volumes: bool = True) -> PressureReport:
        """Return the state of all signals, and which pod would be evicted first for each.

        `measure_volumes` measures volumes now, as an eviction for a disk does, for a bounded time. A custom
        ranking has a bounded time, too, and no round waits for a report.
        """
        thresholds, observations = await self._observe()
        pods = self._pods()
        signals = dict.fromkeys(threshold.signal for threshold in thresholds)
        volumes = measure_volumes and any(map(is_disk_signal, signals))
        usages = await self._measurements.pods({pod.uid for pod in pods}, detailed=True, volumes=volumes)
        deadline = self._ranking.report_deadline() if self._ranking is not None else 0.0
        orders = {}
        for signal in signals:
            ranked = self._built_in_rank(signal, pods, usages)
            orders[signal] = (
                await self._ranking.preview(signal, ranked, deadline)
                if self._ranking is not None
                else PreviewedOrder(ranked)
            )
        return build_report(
            thresholds,
            observations,
            self._state,
            self._conditions.current,
            orders,
            now=asyncio.get_running_loop().time(),
            wall=time.time(),
        )

    # Observation

    async def _observe(self) -> tuple[list[Threshold], Observations]:
        """Measure the node, and return the thresholds for its disks and the observations.

        While it is unknown which disks are the same, there are no observations of disks: the thresholds of
        containerfs, the reclaim and the ranking depend on it.
        """
        node = await self._measurements.node()
        self._disks = node.disks() or self._disks
        thresholds = with_containerfs(self._settings.thresholds, self._disks or Disks())
        observations = observe(node, time.time())
        if self._disks is None:
            observations = {
                signal: observed for signal, observed in observations.items() if not is_disk_signal(signal)
            }
        missing = frozenset(threshold.signal for threshold in thresholds) - observations.keys()
        if missing != self._unmeasured:
            self._unmeasured = missing
            if missing:
                log.warning("No observation found for eviction signals", signals=sorted(missing))
        if self._notifier is not None:
            self._notifier.update(thresholds, node)
        return thresholds, observations

    async def _update_state(self) -> tuple[Decision, Observations]:
        """Measure the node, set its conditions and return both results."""
        thresholds, observations = await self._observe()
        now = asyncio.get_running_loop().time()
        decision = decide(self._state, thresholds, observations, now, self._settings.transition_period)
        self._state = decision.state
        self._set_conditions(decision.conditions)
        return decision, observations

    async def _run_until(self, work: Coroutine[Any, Any, T], urgent: Callable[[Threshold], bool]) -> T | None:
        """Run work, and keep measuring; cancel it and return None when an urgent threshold is met."""
        async with TaskScope() as scope:
            task = scope.start(work, name="eviction-work")
            met = scope.start(self._wait_met(urgent), name="eviction-watch")
            await asyncio.wait((task, met), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None

    async def _wait_met(self, urgent: Callable[[Threshold], bool]) -> None:
        """Measure once per interval and after notifications until an urgent threshold is met."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._wait(clock())
            # Not before: a notification since the last measurement may be the only one.
            self._notified.clear()
            try:
                decision, observations = await self._update_state()
            except Exception as err:  # as in a round
                log.exception(err, "Failed to measure the node")
                continue
            if thresholds_met(filter(urgent, decision.state.first_met), observations):
                return

    def _set_conditions(self, conditions: tuple[NodeConditionType, ...]) -> None:
        before = self._conditions.current
        if conditions != before:
            log.info("Node pressure conditions changed", before=list(before), now=list(conditions))
        self._conditions.set(conditions)

    # Pods above their own limits

    async def _enforce_limits(self, pods: Sequence[Pod]) -> Sequence[Pod]:
        limited = [pod for pod in pods if has_storage_limits(pod) and pod.uid not in self._stuck]
        if not limited:
            return ()
        usages = await self._measurements.pods({pod.uid for pod in limited}, detailed=False)
        # Writable layers count only if they are known to be on nodefs.
        dedicated = self._disks is None or self._disks.dedicated_imagefs
        exceeding = []
        for pod in limited:
            usage = usages.get(pod.uid)
            found = exceeded_limit(pod, usage, dedicated_imagefs=dedicated) if usage is not None else None
            if found is not None:
                exceeding.append((pod, found))
        results = await asyncio.gather(
            *(
                self._evict(pod, found.signal, IMMEDIATE_GRACE_SECONDS, found.message)
                for pod, found in exceeding
            )
        )
        return [pod for (pod, _), evicted in zip(exceeding, results, strict=True) if evicted]

    # Pressure

    async def _relieve(
        self, to_act: Sequence[Threshold], observations: Observations, pods: Sequence[Pod]
    ) -> Sequence[Pod]:
        """Reclaim resources of the node for the most urgent threshold, or else evict a pod."""
        remaining = list(to_act)
        done: set[Callable[[], Awaitable[None]]] = set()
        announced: set[str] = set()
        while remaining:
            threshold = remaining[0]
            if threshold.resource not in announced:
                announced.add(threshold.resource)
                log.info("Attempting to reclaim", resourceName=threshold.resource, signal=threshold.signal)
                message = f"Attempting to reclaim {threshold.resource}"
                self._events.node_event("Warning", "EvictionThresholdMet", message)
            steps = [step for step in self._reclaim_steps(threshold) if step not in done]
            if steps:
                for step in steps:
                    if not await self._run_reclaim(step, threshold.resource):
                        self._notified.set()
                        return ()
                done.update(steps)
                _, observations = await self._observe()
            elif self._release is not None and self._release.signal == threshold.signal:
                observations = await self._wait_released(self._release, threshold)
                self._release = None
            else:
                return await self._evict_one(threshold, remaining, observations, pods)
            self._state = EvictionState(
                first_met=self._state.first_met,
                acting=self._state.acting,
                conditions=self._state.conditions,
                observations=observations,
            )
            remaining = thresholds_met(remaining, observations, with_reclaim=True)
        log.info("Reduced resource pressure without evicting pods")
        return ()

    async def _wait_released(self, release: Release, threshold: Threshold) -> Observations:
        """Measure until the node is not short any more or the last evicted pod's files are deleted."""
        clock = asyncio.get_running_loop().time
        while True:
            _, observations = await self._observe()
            if clock() >= release.deadline or is_released(release, threshold, observations):
                return observations
            await asyncio.sleep(RELEASE_POLL_SECONDS)

    def _reclaim_steps(self, threshold: Threshold) -> list[Callable[[], Awaitable[None]]]:
        plan = reclaim_plan(threshold, self._disks or Disks())
        steps = [self._reclaim.containers] if plan.containers else []
        return [*steps, self._reclaim.images] if plan.images else steps

    async def _run_reclaim(self, step: Callable[[], Awaitable[None]], resource: str) -> bool:
        """Reclaim resources of the node; return whether no hard threshold of memory has interrupted it."""

        async def reclaim() -> bool:
            try:
                async with asyncio.timeout(RECLAIM_TIMEOUT_SECONDS):
                    await step()
            except Exception as err:  # the runtime may be down; pods can still be evicted
                reason = str(err) or type(err).__name__
                log.warning("Failed to reclaim node resources", resourceName=resource, err=reason)
            return True

        if await self._run_until(reclaim(), lambda met: met.is_hard and met.resource == MEMORY):
            return True
        log.info("Interrupted the reclaim for a hard threshold of memory", resourceName=resource)
        return False

    async def _evict_one(
        self,
        threshold: Threshold,
        acting: Sequence[Threshold],
        observations: Observations,
        pods: Sequence[Pod],
    ) -> Sequence[Pod]:
        """Evict the first pod that may be evicted."""
        log.info("Must evict a pod to reclaim", resourceName=threshold.resource, signal=threshold.signal)
        usages = await self._measurements.pods(
            {pod.uid for pod in pods}, detailed=True, volumes=is_disk_signal(threshold.signal)
        )
        ranked = await self._rank(threshold.signal, pods, usages)
        log.info("Pods ranked for eviction", pods=[found.pod.full_name for found in ranked[:_LOGGED_PODS]])
        for met in acting:
            if (observed := observations.get(met.signal)) is not None:
                age = max(0.0, time.time() - observed.time)
                self._metrics.stats_age.labels(met.signal).observe(age)
        for found in ranked:
            pod = found.pod
            if not found.is_evictable:
                continue
            grace = IMMEDIATE_GRACE_SECONDS
            if not threshold.is_hard:
                own = pod.spec.termination_grace_period_seconds
                limit = self._settings.max_pod_grace_period
                grace = limit if own is None else min(limit, own)
            message, annotations = eviction_message(
                pod,
                usages.get(pod.uid),
                threshold.resource,
                acting,
                observations,
                pod_level=self._settings.pod_level,
            )
            if await self._evict(pod, threshold.signal, grace, message, annotations, disrupted=True):
                deadline = asyncio.get_running_loop().time() + RELEASE_TIMEOUT_SECONDS
                self._release = expected_release(threshold, found.usage, observations, deadline)
                return [pod]
        log.warning("Unable to evict any pods from the node", signal=threshold.signal)
        return ()

    async def _rank(
        self, signal: str, pods: Sequence[Pod], usages: Mapping[str, PodUsage]
    ) -> list[RankedPod]:
        """Return the pods in the order of eviction, without those that have not terminated in time."""
        ranked = self._built_in_rank(signal, pods, usages)
        return ranked if self._ranking is None else await self._ranking.order(signal, ranked)

    def _built_in_rank(
        self, signal: str, pods: Sequence[Pod], usages: Mapping[str, PodUsage]
    ) -> list[RankedPod]:
        pods = [pod for pod in pods if pod.uid not in self._stuck]
        return rank(signal, pods, usages, self._disks or Disks(), pod_level=self._settings.pod_level)

    # Eviction of a pod

    async def _evict(
        self,
        pod: Pod,
        signal: str,
        grace: int,
        message: str,
        annotations: Mapping[str, str] | None = None,
        *,
        disrupted: bool = False,
    ) -> bool:
        """Evict a pod and wait until it has terminated, for a bounded time; return whether it was begun."""
        names = {"pod": pod.full_name, "podUID": pod.uid}
        if is_critical_pod(pod):
            if pod.uid not in self._warned:
                self._warned.add(pod.uid)
                log.warning("Cannot evict a critical pod", signal=signal, message=message, **names)
            return False
        log.info("Evicting pod", signal=signal, gracePeriod=grace, message=message, **names)
        self._events.pod_event(pod, EVICTED, message, annotations or {})
        self._metrics.evictions.labels(signal).inc()
        now = api_now()

        def status(before: PodStatus) -> PodStatus:
            return evicted_status(pod, before, message, now, disrupted=disrupted)

        terminated = await self._kill(pod, grace, status)
        if terminated:
            log.info("Pod is evicted successfully", **names)
        else:
            log.warning("Pod failed to terminate in time after its eviction", **names)
        return True

    async def _kill(self, pod: Pod, grace: int, status: StatusFunction) -> bool:
        """Terminate a pod and return whether it terminated in time; a hard threshold shortens the grace."""
        if grace > IMMEDIATE_GRACE_SECONDS:
            kill = self._killer.kill(pod, grace, status)
            terminated = await self._run_until(kill, lambda met: met.is_hard)
            if terminated is not None:
                return terminated
            log.info("Hard eviction threshold is met, shortening the grace period", pod=pod.full_name)
        return await self._killer.kill(pod, min(grace, IMMEDIATE_GRACE_SECONDS), status)

    async def _wait_finished(self, pods: Sequence[Pod]) -> None:
        """Wait until evicted pods have left the node, for a bounded time."""
        try:
            async with asyncio.timeout(CLEANUP_TIMEOUT_SECONDS):
                await self._killer.wait_finished({pod.uid for pod in pods})
        except TimeoutError:
            waiting = [pod for pod in pods if not self._killer.is_finished(pod.uid)]
            names = [pod.full_name for pod in waiting]
            log.warning("Timed out waiting for evicted pods to be cleaned up", pods=names)
            self._stuck.update(pod.uid for pod in waiting)


_LOGGED_PODS = 20
