"""Termination of all pods before a node shutdown: group by group, the lowest priority first.

A group is complete when no container of its pods runs, their volumes are unmounted, and the API server has
their final statuses: the next group may contain the CSI drivers, the network and the API server that the
others need. A group that is not complete at the end of its period is abandoned, and the next one begins. Pods
that start during the shutdown terminate with the current group.

That a pod is terminated is on disk before its containers are stopped, and its final status before the drain
ends, so that a killed kubelet or a power failure does not start it again (`FinalStatuses`). The drain may be
cancelled at any point: pods that terminate continue to do so, all others stay as they are.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from typing import NoReturn, Protocol

from pykubelet.api.pod import Pod
from pykubelet.logs import get_logger
from pykubelet.node.shutdown_groups import ShutdownPeriod, grace_seconds, group_index, total_seconds
from pykubelet.node.shutdown_state import FinalStatuses
from pykubelet.util.tasks import wait_seconds

log = get_logger(__name__)
STATUS_SECONDS = 5.0
"""Seconds for which each group, and the end of the drain, wait until the API server has final statuses."""
GATHER_SECONDS = 0.5
"""Seconds during which changes of final statuses are collected before they are written."""
POLL_SECONDS = 0.25
"""Seconds after which the state of pods is read again without a notification."""


class ShutdownPods(Protocol):
    """The node's pods, as the drain sees and terminates them."""

    def are_known(self) -> bool:
        """Return whether all sources have reported their pods."""

    def active(self) -> Sequence[Pod]:
        """Return the pods of which something runs or is mounted."""

    def record(self, pod: Pod) -> None:
        """Record in `FinalStatuses` that a pod will be terminated."""

    def terminate(self, pod: Pod, grace: int) -> None:
        """Terminate a pod with a grace period in seconds."""

    def is_stopped(self, uid: str) -> bool:
        """Return whether no container of a pod runs."""

    def is_released(self, uid: str) -> bool:
        """Return whether no container of a pod runs and its volumes are unmounted."""

    def is_reported(self, uid: str) -> bool:
        """Return whether the API server has the final status of a pod, or does not have the pod."""

    def exceeded(self, pod: Pod) -> None:
        """Record an event about a pod that did not terminate within its period."""

    async def changed(self) -> None:
        """Wait until one of the above may have changed."""


class PodDrain:
    """Terminates all pods for a node shutdown, and delivers their final statuses."""

    def __init__(self, pods: ShutdownPods, final: FinalStatuses) -> None:
        self._pods = pods
        self._final = final

    async def run(self, periods: Sequence[ShutdownPeriod], available: float = math.inf) -> None:
        """Terminate the pods; it ends after the sum of the periods and `STATUS_SECONDS` at the latest.

        `available` is the number of seconds until the host goes down regardless.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + min(available, total_seconds(periods) + STATUS_SECONDS)
        requested: set[str] = set()
        # The kubelet may have just started; what this takes is missing at the end.
        known_by = loop.time() + STATUS_SECONDS
        while not self._pods.are_known() and loop.time() < known_by:
            await self._changed(POLL_SECONDS)
        for index, period in enumerate(periods):
            await self._terminate_group(periods, index, period.seconds, requested)
        await self._wait_reported(self._final, min(end, loop.time() + STATUS_SECONDS))
        if self._final:
            log.warning("Final statuses of pods are reported after the next start", pods=len(self._final))
        await self._final.flush()

    async def deliver(self) -> NoReturn:
        """Remove the final statuses that the API server has, and store the others, until cancelled."""
        while True:
            await self._final.wait_any()
            await self._final.flush()
            # A change between the two is noticed: nothing is awaited there.
            if not self._discard_reported():
                await self._pods.changed()
            await asyncio.sleep(GATHER_SECONDS)
            self._discard_reported()
            await self._final.flush()

    async def _terminate_group(
        self, periods: Sequence[ShutdownPeriod], index: int, seconds: int, requested: set[str]
    ) -> None:
        """Terminate the pods of a group, and those of lower groups that started after theirs."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        group: dict[str, Pod] = {}
        while True:
            new = [
                pod
                for pod in self._pods.active()
                if pod.uid not in requested and group_index(periods, pod) <= index
            ]
            if new:
                requested.update(pod.uid for pod in new)
                group |= {pod.uid: pod for pod in new}
                # Late pods have what is left of the period.
                await self._terminate(new, max(0, math.ceil(deadline - loop.time())))
                continue
            remaining = deadline - loop.time()
            if all(self._pods.is_released(uid) for uid in group):
                break
            if remaining <= 0:
                self._report_timeout(group, periods[index])
                return
            await self._changed(min(remaining, POLL_SECONDS))
        if group:
            log.v(1).info(
                "Done waiting for all pods in group to terminate",
                gracePeriod=seconds,
                priority=periods[index].priority,
            )
            await self._wait_reported(group, min(deadline, loop.time() + STATUS_SECONDS))

    async def _terminate(self, pods: Sequence[Pod], seconds: int) -> None:
        before = set(self._final)
        for pod in pods:
            self._pods.record(pod)
        try:
            await self._final.flush()
        except asyncio.CancelledError:
            # These pods stay as they are: the next kubelet process must not terminate them.
            for uid in {pod.uid for pod in pods} - before:
                self._final.discard(uid)
            await self._final.flush()
            raise
        for pod in pods:
            grace = grace_seconds(pod, seconds)
            log.v(1).info(
                "Shutdown manager killing pod with gracePeriod",
                pod=pod.full_name,
                podUID=pod.uid,
                gracePeriod=grace,
            )
            self._pods.terminate(pod, grace)

    def _report_timeout(self, group: dict[str, Pod], period: ShutdownPeriod) -> None:
        running = [pod for pod in group.values() if not self._pods.is_stopped(pod.uid)]
        unreleased = [pod for pod in group.values() if not self._pods.is_released(pod.uid)]
        log.warning(
            "Shutdown manager pod killing time out",
            gracePeriod=period.seconds,
            priority=period.priority,
            runningPods=[pod.full_name for pod in running],
            unreleasedPods=[pod.full_name for pod in unreleased],
        )
        for pod in running:
            self._pods.exceeded(pod)

    async def _wait_reported(self, uids: Collection[str], deadline: float) -> None:
        """Wait until the API server has the final statuses of these pods, at most until the loop time."""
        loop = asyncio.get_running_loop()
        while True:
            self._discard_reported()
            unreported = [uid for uid in uids if uid in self._final]
            remaining = deadline - loop.time()
            if not unreported or remaining <= 0:
                break
            await self._changed(min(remaining, POLL_SECONDS))

    def _discard_reported(self) -> bool:
        """Remove the final statuses that the API server has; return whether there were any."""
        reported = [uid for uid in self._final if self._pods.is_reported(uid)]
        for uid in reported:
            self._final.discard(uid)
        return bool(reported)

    async def _changed(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(wait_seconds(seconds)):
                await self._pods.changed()
        except TimeoutError:
            return
