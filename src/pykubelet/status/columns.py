"""Columns of `kubectl get pods` for one pod: status, ready containers, restarts, age.

Users know these texts (`Init:0/2`, `CrashLoopBackOff`, `Completed`) and scripts match them, so they equal
upstream's exactly. All functions are pure; they take the pod object and the state of its pod worker, because
a static pod that is being terminated has no deletionTimestamp. The command line and the page share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from pykubelet.api.pod import Pod, is_sidecar
from pykubelet.api.pod_status import ContainerStateTerminated, ContainerStatus
from pykubelet.podconfig.static_pods import SEEN_ANNOTATION

_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 365 * 86400


def format_duration(seconds: float) -> str:
    """Format seconds as kubectl does, in at most two units: `45s`, `5m30s`, `3h`, `2d4h`."""
    total = int(seconds)
    if total < -1:
        return "<invalid>"
    if total < 2 * _MINUTE:
        return f"{max(total, 0)}s"
    # `alone`: seconds from which only the leading unit is shown; `end`: seconds up to which it leads.
    for unit, name, part, part_name, alone, end in (
        (_MINUTE, "m", 1, "s", 10 * _MINUTE, 3 * _HOUR),
        (_HOUR, "h", _MINUTE, "m", 8 * _HOUR, 2 * _DAY),
        (_DAY, "d", _HOUR, "h", 8 * _DAY, 2 * _YEAR),
    ):
        if total < end:
            return _two_units(total, unit, name, part, part_name, alone)
    return _two_units(total, _YEAR, "y", _DAY, "d", 8 * _YEAR)


def _two_units(total: int, unit: int, name: str, part: int, part_name: str, alone: int) -> str:
    leading, rest = divmod(total, unit)
    parts = rest // part
    return f"{leading}{name}" if total >= alone or not parts else f"{leading}{name}{parts}{part_name}"


def format_age(moment: datetime | None, now: datetime) -> str:
    """Return the age of a time, formatted by `format_duration`."""
    return "<unknown>" if moment is None else format_duration((now - moment).total_seconds())


def pod_creation_time(pod: Pod) -> datetime | None:
    """Return the pod's creationTimestamp, else its startTime, else the time when this node first saw it."""
    if pod.metadata.creation_timestamp is not None:
        return pod.metadata.creation_timestamp
    if pod.status.start_time is not None:
        return pod.status.start_time
    try:
        # datetime reads six fractional digits of a second; the annotation has nine.
        seen = pod.metadata.annotations[SEEN_ANNOTATION]
        moment = datetime.fromisoformat(seen[:26] + seen[29:])
    except (KeyError, ValueError):
        return None
    return moment if moment.tzinfo is not None else None


def status_text(pod: Pod, state: str = "syncing") -> str:
    """Return the STATUS column of a pod."""
    if is_terminating(pod, state) and not is_finished(pod):
        return "Unknown" if pod.status.reason == "NodeLost" else "Terminating"
    status = _scheduling_status(pod) or pod.status.reason or pod.status.phase or "Unknown"
    initializing = _init_status(pod)
    if initializing and not has_condition(pod, "Initialized"):
        return initializing
    return _running_status(pod, initializing or status)


def ready_count(pod: Pod) -> tuple[int, int]:
    """Return the number of ready containers and sidecars, and the number of all of them."""
    sidecars = _sidecar_names(pod)
    ready = sum(
        status.ready and status.started is True
        for status in pod.status.init_container_statuses
        if status.name in sidecars and not _has_succeeded(status)
    )
    if not _init_status(pod) or has_condition(pod, "Initialized"):
        ready += sum(
            status.ready and status.state.running is not None for status in pod.status.container_statuses
        )
    return ready, len(pod.spec.containers) + len(sidecars)


def restart_count(pod: Pod) -> int:
    """Return the number of restarts in the RESTARTS column."""
    return sum(status.restart_count for status in _restart_statuses(pod))


def restarts(pod: Pod, now: datetime) -> str:
    """Return the RESTARTS column with the age of the last restart: `3 (5m ago)`."""
    return restarts_text(_restart_statuses(pod), now)


def restarts_text(counted: Sequence[ContainerStatus], now: datetime) -> str:
    """Return the restarts of these containers with the age of the last one."""
    count = sum(status.restart_count for status in counted)
    finish_times = [
        ended.finished_at for ended in _last_terminations(counted) if ended.finished_at is not None
    ]
    return f"{count} ({format_age(max(finish_times), now)} ago)" if count and finish_times else str(count)


def _restart_statuses(pod: Pod) -> list[ContainerStatus]:
    sidecars = _sidecar_names(pod)
    if _init_status(pod) and not has_condition(pod, "Initialized"):
        return pod.status.init_container_statuses
    sidecar_statuses = [status for status in pod.status.init_container_statuses if status.name in sidecars]
    return [*sidecar_statuses, *pod.status.container_statuses]


def is_terminating(pod: Pod, state: str) -> bool:
    """Return whether the pod is terminating or terminated."""
    return pod.metadata.deletion_timestamp is not None or state in ("terminating", "terminated")


def is_finished(pod: Pod) -> bool:
    """Return whether the pod's phase is Succeeded or Failed."""
    return pod.status.phase in ("Succeeded", "Failed")


def has_condition(pod: Pod, kind: str) -> bool:
    """Return whether a condition of the pod is True."""
    return any(found.type == kind and found.status == "True" for found in pod.status.conditions)


def termination_reason(ended: ContainerStateTerminated) -> str:
    """Return the reason of a terminated container, else its signal or exit code."""
    if ended.reason:
        return ended.reason
    return f"Signal:{ended.signal}" if ended.signal else f"ExitCode:{ended.exit_code}"


def _scheduling_status(pod: Pod) -> str:
    gated = any(
        found.type == "PodScheduled" and found.reason == "SchedulingGated" for found in pod.status.conditions
    )
    return "SchedulingGated" if gated else ""


def _init_status(pod: Pod) -> str:
    """Return the `Init:…` status of the first init container that has not completed; "" if all have."""
    sidecars = _sidecar_names(pod)
    for index, status in enumerate(pod.status.init_container_statuses):
        if _has_succeeded(status) or (status.name in sidecars and status.started is True):
            continue
        ended, waiting = status.state.terminated, status.state.waiting
        if ended is not None:
            return f"Init:{termination_reason(ended)}"
        if waiting is not None and waiting.reason not in ("", "PodInitializing"):
            return f"Init:{waiting.reason}"
        return f"Init:{index}/{len(pod.spec.init_containers)}"
    return ""


def _running_status(pod: Pod, default: str) -> str:
    """Return the reason of the first container that does not run, else `default`.

    `Completed` as in kubectl.
    """
    reasons, failures = [], []
    for status in pod.status.container_statuses:
        ended, waiting = status.state.terminated, status.state.waiting
        if waiting is not None and waiting.reason:
            reasons.append(waiting.reason)
        elif ended is not None:
            reasons.append(termination_reason(ended))
            failures += [termination_reason(ended)] if ended.exit_code else []
    text = reasons[0] if reasons else default
    if text != "Completed":
        return text
    running = any(s.ready and s.state.running is not None for s in pod.status.container_statuses)
    if running and has_condition(pod, "Ready"):
        return "Running"
    return failures[0] if failures else "NotReady" if running else text


def _sidecar_names(pod: Pod) -> set[str]:
    return {container.name for container in pod.spec.init_containers if is_sidecar(container)}


def _has_succeeded(status: ContainerStatus) -> bool:
    return status.state.terminated is not None and status.state.terminated.exit_code == 0


def _last_terminations(statuses: Iterable[ContainerStatus]) -> Iterator[ContainerStateTerminated]:
    return (status.last_state.terminated for status in statuses if status.last_state.terminated is not None)
