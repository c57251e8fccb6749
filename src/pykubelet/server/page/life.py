"""The life of a pod on one time axis, from its status, its events and its timeline. Pure.

`lanes` has one lane for the pod (queued, sandbox, readiness) and one per container (pull, runs, kills). Times
that neither the runtime nor the history has any more are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import ContainerState, ContainerStatus
from pykubelet.podconfig.pod_history import Event, TimelineEntry
from pykubelet.server.page.drawings import Lane, Span
from pykubelet.status.columns import termination_reason

_DOTS = {
    "BackOff": "warn",
    "Failed": "bad",
    "FailedMount": "bad",
    "FailedCreatePodSandBox": "bad",
    "Killing": "warn",
    "Unhealthy": "bad",
    "ProcessOOMKilled": "bad",
    "Evicted": "bad",
    "Preempting": "bad",
    "FailedPostStartHook": "bad",
    "FailedKillPod": "bad",
}


def start_of(pod: Pod, events: Sequence[Event], timeline: Sequence[TimelineEntry], now: float) -> float:
    """Return when the pod came to the node, as far as it is known."""
    times = [entry.time for entry in timeline[:1]] + [event.first for event in events]
    if pod.status.start_time is not None:
        times.append(pod.status.start_time.timestamp())
    return min(times, default=now)


def start_end(pod: Pod, start: float, now: float) -> float:
    """Return the end of the pod's start: when it became ready the first time, or now."""
    ready = next((c for c in pod.status.conditions if c.type == "Ready" and c.status == "True"), None)
    began = [
        status.state.running.started_at.timestamp()
        for status in pod.status.container_statuses
        if status.state.running is not None and status.state.running.started_at is not None
    ]
    if ready is not None and ready.last_transition_time is not None:
        end = ready.last_transition_time.timestamp() + 1
        return end if end - start < 1800 else start + 120
    if began and now - max(began) > 120:
        return min(max(began) + 5, start + 1800)
    return now


def lanes(
    pod: Pod, events: Sequence[Event], timeline: Sequence[TimelineEntry], start: float, now: float
) -> list[Lane]:
    """Return the lanes of the axis."""
    found = [_pod_lane(pod, events, timeline, start, now)]
    containers = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    found += [_container_lane(status, events, timeline, now) for status in containers]
    return found


def _pod_lane(
    pod: Pod, events: Sequence[Event], timeline: Sequence[TimelineEntry], start: float, now: float
) -> Lane:
    admitted = next((e.time for e in timeline if e.component == "admission" and e.text == "admitted"), None)
    creating = next((e.time for e in timeline if e.component == "sandbox"), None)
    sandbox = next((e.time for e in timeline if e.component == "sandbox" and e.text != "create"), None)
    began = [
        time
        for status in (*pod.status.init_container_statuses, *pod.status.container_statuses)
        for state in (status.last_state, status.state)
        if (time := _started(state)) is not None
    ]
    spans = []
    if admitted is not None and began and min(began) < admitted:
        # A previous kubelet process started the pod; this one only admitted it again.
        spans.append(_span(start, max(min(began), start), "setup", "volumes and sandbox"))
        sandbox = min(began)
    elif admitted is not None:
        spans.append(_span(start, admitted, "queued", "waiting for admission"))
        until = sandbox if sandbox is not None else now
        if sandbox is None and pod.status.phase not in ("", "Pending"):
            until = admitted
        mounted = min(creating, until) if creating is not None else until
        spans.append(_span(admitted, mounted, "volumes", "volumes"))
        if creating is not None:
            spans.append(_span(mounted, until, "setup", "sandbox"))
    ready = next((c for c in pod.status.conditions if c.type == "Ready"), None)
    if (
        ready is not None
        and ready.status == "True"
        and (since := _time(ready.last_transition_time)) is not None
    ):
        spans.append(_span(since, now, "ready", "ready"))
    elif sandbox is not None and pod.status.phase == "Running":
        spans.append(_span(sandbox, now, "unready", "not ready"))
    return Lane("pod", tuple(spans), tuple(_moments(events, "")))


def _started(state: ContainerState) -> float | None:
    ran = state.running or state.terminated
    return _time(ran.started_at) if ran is not None else None


def _container_lane(
    status: ContainerStatus, events: Sequence[Event], timeline: Sequence[TimelineEntry], now: float
) -> Lane:
    where = f"{{{status.name}}}"
    own = [event for event in events if event.where.endswith(where)]
    spans = list(_earlier_runs(status, timeline))
    pulling = max((e.last for e in own if e.reason == "Pulling"), default=None)
    if pulling is not None:
        ends = [e.last for e in own if e.reason in ("Pulled", "Failed") and e.last >= pulling]
        spans.append(_span(pulling, min(ends, default=now), "pull", "pulling the image"))
    for ended in (status.last_state.terminated, status.state.terminated):
        if ended is None or (since := _time(ended.started_at)) is None:
            continue
        until = _time(ended.finished_at) or since
        reason = termination_reason(ended)
        kind = "ended" if ended.exit_code == 0 else "failed"
        spans.append(_span(since, until, kind, f"ran, then {reason} (exit code {ended.exit_code})"))
    running = status.state.running
    if running is not None and (since := _time(running.started_at)) is not None:
        kind = "ready" if status.ready else "unready"
        spans.append(_span(since, now, kind, "runs and is ready" if status.ready else "runs, not ready"))
    starts = [
        Span(entry.time, entry.time, "start", f"{entry.text}")
        for entry in timeline
        if entry.component == "start" and entry.text == f"{status.name} started"
    ]
    return Lane(status.name, tuple(spans), (*starts, *_moments(events, where)))


def _earlier_runs(status: ContainerStatus, timeline: Sequence[TimelineEntry]) -> Iterator[Span]:
    """Yield the runs before those that the status has, from their starts and ends in the timeline."""
    reported = [
        since for state in (status.last_state, status.state) if (since := _started(state)) is not None
    ]
    first, started = min(reported, default=math.inf), None
    for entry in timeline:
        name, _, what = entry.text.partition(" ")
        if name != status.name:
            continue
        if entry.component == "start" and what == "started":
            started = entry.time
        elif entry.component == "exit" and started is not None and entry.time <= first:
            kind = "ended" if what == "exited with code 0" else "failed"
            yield _span(started, entry.time, kind, f"ran, then {what}")
            started = None


def _moments(events: Sequence[Event], where: str) -> Iterator[Span]:
    for event in events:
        if event.reason in _DOTS and (event.where.endswith(where) if where else not event.where):
            times = f", {event.count} times" if event.count > 1 else ""
            label = f"{event.reason}{times}: {event.message}"[:300]
            for time in sorted({event.first, event.last}):
                yield Span(time, time, _DOTS[event.reason], label)


def _span(start: float, end: float, kind: str, label: str) -> Span:
    end = max(start, end)
    length = end - start
    shown = (
        f"{length * 1000:.0f} ms"
        if length < 1
        else f"{length:.1f} s"
        if length < 60
        else f"{length / 60:.1f} min"
    )
    return Span(start, end, kind, f"{label}: {shown}")


def _time(moment: datetime | None) -> float | None:
    return moment.timestamp() if moment is not None else None
