"""Pod syncer that traces the steps of another one; used only when tracing is on.

Each step is a span with the upstream kubelet's name and attributes; what happens within it (stages, calls to
the runtime, pulls, mounts) are its children. The syncs from the creation of a pod until its containers run
have one trace, of which the first sync is the root, so that the start of a pod is one trace also when init
containers or retries need several syncs. A pod that does not start in time gets a trace for each further
sync, as a running pod: a trace must not grow for days.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pykubelet.api.pod import Pod
from pykubelet.podsync.contract import KillPodOptions, Outcome, PodSyncer, Remnants
from pykubelet.tracing.span import AttributeValue, SpanContext, Tracer

START_SECONDS = 600.0
"""Seconds after a pod's first sync until its further syncs have traces of their own."""


@dataclass(slots=True)
class _Traced:
    """What is known of a pod that was synced before."""

    pod: Pod
    start: SpanContext | None
    """First sync of a pod that has not started yet."""
    deadline: float


class TracedPodSyncer:
    """Pod syncer with a span for each step; `has_started` returns whether all containers of a pod run."""

    def __init__(self, syncer: PodSyncer, tracer: Tracer, has_started: Callable[[Pod], bool]) -> None:
        self._syncer = syncer
        self._tracer = tracer
        self._has_started = has_started
        self._pods: dict[str, _Traced] = {}

    async def sync(self, pod: Pod, *, resync: bool = False) -> Outcome:
        """Sync in the span `syncPod`."""
        known, now = self._pods.get(pod.uid), asyncio.get_running_loop().time()
        update_type = "create" if known is None else "sync" if known.pod is pod else "update"
        attributes = {**_attributes(pod.uid, pod), "k8s.pod.update_type": update_type}
        parent = known.start if known is not None and now < known.deadline else None
        with self._tracer.start("syncPod", attributes, parent=parent, root=True) as span:
            if known is None:
                known = self._pods[pod.uid] = _Traced(pod, span.context, now + START_SECONDS)
            known.pod = pod
            finished, again = await self._syncer.sync(pod, resync=resync)
            if finished or self._has_started(pod):
                known.start = None
            return finished, again

    async def terminate(self, uid: str, pod: Pod | None, options: KillPodOptions) -> None:
        """Terminate in the span `syncTerminatingPod`."""
        with self._tracer.start("syncTerminatingPod", _attributes(uid, pod), root=True):
            await self._syncer.terminate(uid, pod, options)

    async def clean_up(self, uid: str, pod: Pod | None) -> Remnants | None:
        """Clean up in the span `syncTerminatedPod`."""
        with self._tracer.start("syncTerminatedPod", _attributes(uid, pod), root=True):
            remnants = await self._syncer.clean_up(uid, pod)
        # A pod that stays known has no further sync; a restarted one begins with a new trace.
        self._pods.pop(uid, None)
        return remnants

    async def remove(self, remnants: Remnants) -> None:
        """Remove in the span `removePod`, which upstream does not have."""
        with self._tracer.start("removePod", _attributes(remnants.uid, remnants.pod), root=True):
            await self._syncer.remove(remnants)


def _attributes(uid: str, pod: Pod | None) -> dict[str, AttributeValue]:
    """Return upstream's attributes of a pod; only the uid of an orphan is known."""
    if pod is None:
        return {"k8s.pod.uid": uid}
    return {
        "k8s.pod.uid": uid,
        "k8s.pod": pod.full_name,
        "k8s.pod.name": pod.metadata.name,
        "k8s.namespace.name": pod.metadata.namespace,
    }
