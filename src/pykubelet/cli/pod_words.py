"""A pod's status in one word, and what else fits into a line: what `kubectl get pods` shows.

People have learned to read these words (`Init:0/2`, `CrashLoopBackOff`, `Completed`…), and scripts
match on them, so they are the reference's to the letter. Pure functions of the pod's document and
of where its worker is: a static pod that is being stopped has no deletion time that would tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from pykubelet.api.pod import Pod, is_sidecar
from pykubelet.api.pod_status import ContainerStateTerminated, ContainerStatus
from pykubelet.cli.ages import pod_birth, since

NONE = "<none>"


@dataclass(frozen=True, slots=True)
class Row:
    """One pod in a table."""

    name: str
    namespace: str
    ready: str
    status: str
    restarts: str
    ip: str
    age: str


def row(pod: Pod, state: str, now: datetime) -> Row:
    """Give a pod's line; `state` is its worker's."""
    ready, total = ready_count(pod)
    return Row(
        name=pod.metadata.name,
        namespace=pod.metadata.namespace,
        ready=f"{ready}/{total}",
        status=status_word(pod, state),
        restarts=restarts(pod, now),
        ip=pod.status.pod_ip or NONE,
        age=since(pod_birth(pod), now),
    )


def status_word(pod: Pod, state: str = "syncing") -> str:
    """Say how a pod is."""
    if is_leaving(pod, state) and not is_finished(pod):
        return "Unknown" if pod.status.reason == "NodeLost" else "Terminating"
    word = _scheduling_word(pod) or pod.status.reason or pod.status.phase or "Unknown"
    initializing = _init_word(pod)
    if initializing and not has_condition(pod, "Initialized"):
        return initializing
    return _running_word(pod, initializing or word)


def ready_count(pod: Pod) -> tuple[int, int]:
    """How many of the pod's lasting containers are ready, and how many there are."""
    sidecars = _sidecar_names(pod)
    ready = sum(
        status.ready and status.started is True
        for status in pod.status.init_container_statuses
        if status.name in sidecars and not _ended_well(status)
    )
    if not _init_word(pod) or has_condition(pod, "Initialized"):
        ready += sum(
            status.ready and status.state.running is not None for status in pod.status.container_statuses
        )
    return ready, len(pod.spec.containers) + len(sidecars)


def restarts(pod: Pod, now: datetime) -> str:
    """How often its containers were restarted, and when last: `3 (5m ago)`."""
    sidecars = _sidecar_names(pod)
    if _init_word(pod) and not has_condition(pod, "Initialized"):
        counted = pod.status.init_container_statuses
    else:
        lasting = [status for status in pod.status.init_container_statuses if status.name in sidecars]
        counted = [*lasting, *pod.status.container_statuses]
    count = sum(status.restart_count for status in counted)
    ends = [ended.finished_at for ended in _last_ends(counted) if ended.finished_at is not None]
    return f"{count} ({since(max(ends), now)} ago)" if count and ends else str(count)


def is_leaving(pod: Pod, state: str) -> bool:
    """Whether the pod is being stopped, or was."""
    return pod.metadata.deletion_timestamp is not None or state in ("terminating", "terminated")


def is_finished(pod: Pod) -> bool:
    """Whether nothing of the pod will run again."""
    return pod.status.phase in ("Succeeded", "Failed")


def has_condition(pod: Pod, kind: str) -> bool:
    """Whether a condition of the pod holds."""
    return any(found.type == kind and found.status == "True" for found in pod.status.conditions)


def ended_word(ended: ContainerStateTerminated) -> str:
    """Say how a container ended."""
    if ended.reason:
        return ended.reason
    return f"Signal:{ended.signal}" if ended.signal else f"ExitCode:{ended.exit_code}"


def _scheduling_word(pod: Pod) -> str:
    gated = any(
        found.type == "PodScheduled" and found.reason == "SchedulingGated" for found in pod.status.conditions
    )
    return "SchedulingGated" if gated else ""


def _init_word(pod: Pod) -> str:
    """Say what the first init container that is not through is doing; "" when all are."""
    sidecars = _sidecar_names(pod)
    for index, status in enumerate(pod.status.init_container_statuses):
        if _ended_well(status) or (status.name in sidecars and status.started is True):
            continue
        ended, waiting = status.state.terminated, status.state.waiting
        if ended is not None:
            return f"Init:{ended_word(ended)}"
        if waiting is not None and waiting.reason not in ("", "PodInitializing"):
            return f"Init:{waiting.reason}"
        return f"Init:{index}/{len(pod.spec.init_containers)}"
    return ""


def _running_word(pod: Pod, word: str) -> str:
    """Let the first container that does not run speak for the pod, unless others make up for it."""
    words, failures = [], []
    for status in pod.status.container_statuses:
        ended, waiting = status.state.terminated, status.state.waiting
        if waiting is not None and waiting.reason:
            words.append(waiting.reason)
        elif ended is not None:
            words.append(ended_word(ended))
            failures += [ended_word(ended)] if ended.exit_code else []
    word = words[0] if words else word
    if word != "Completed":
        return word
    running = any(s.ready and s.state.running is not None for s in pod.status.container_statuses)
    if running and has_condition(pod, "Ready"):
        return "Running"
    return failures[0] if failures else "NotReady" if running else word


def _sidecar_names(pod: Pod) -> set[str]:
    return {container.name for container in pod.spec.init_containers if is_sidecar(container)}


def _ended_well(status: ContainerStatus) -> bool:
    return status.state.terminated is not None and status.state.terminated.exit_code == 0


def _last_ends(statuses: Iterable[ContainerStatus]) -> Iterator[ContainerStateTerminated]:
    return (status.last_state.terminated for status in statuses if status.last_state.terminated is not None)
