"""A pod's status in one word, and what else fits into a line: what `kubectl get pods` shows.

People have learned to read these words (`Init:0/2`, `CrashLoopBackOff`, `Completed`…), and scripts
match on them, so they are the reference's to the letter. Pure functions of the pod's document and
of where its worker is: a static pod that is being stopped has no deletion time that would tell.

Spans of time the way `kubectl` shows them: two numbers at most, the smaller the older.

Tables and text for terminals: plain columns, and nothing that a terminal would obey.

What containers and registries say ends up on the screen of root. Escape sequences in it are shown,
not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from pykubelet.api.pod import Pod, is_sidecar
from pykubelet.api.pod_status import ContainerStateTerminated, ContainerStatus
from pykubelet.podconfig.static_pods import SEEN_ANNOTATION

_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 365 * 86400


def span(seconds: float) -> str:
    """Write a length of time for people: `45s`, `5m30s`, `3h`, `2d4h`."""
    whole = int(seconds)
    if whole < -1:
        return "<invalid>"
    if whole < 2 * _MINUTE:
        return f"{max(whole, 0)}s"
    # From where on a unit stands alone, and until where it is the leading one.
    for unit, name, part, part_name, alone, end in (
        (_MINUTE, "m", 1, "s", 10 * _MINUTE, 3 * _HOUR),
        (_HOUR, "h", _MINUTE, "m", 8 * _HOUR, 2 * _DAY),
        (_DAY, "d", _HOUR, "h", 8 * _DAY, 2 * _YEAR),
    ):
        if whole < end:
            return _two(whole, unit, name, part, part_name, alone)
    return _two(whole, _YEAR, "y", _DAY, "d", 8 * _YEAR)


def _two(whole: int, unit: int, name: str, part: int, part_name: str, alone: int) -> str:
    leading, rest = divmod(whole, unit)
    parts = rest // part
    return f"{leading}{name}" if whole >= alone or not parts else f"{leading}{name}{parts}{part_name}"


def since(moment: datetime | None, now: datetime) -> str:
    """How long ago something was."""
    return "<unknown>" if moment is None else span((now - moment).total_seconds())


def pod_birth(pod: Pod) -> datetime | None:
    """When a pod came to be: as its API server says, or when this node first saw it."""
    if pod.metadata.creation_timestamp is not None:
        return pod.metadata.creation_timestamp
    if pod.status.start_time is not None:
        return pod.status.start_time
    try:
        # Nine digits of a second are three more than Python reads.
        seen = pod.metadata.annotations[SEEN_ANNOTATION]
        moment = datetime.fromisoformat(seen[:26] + seen[29:])
    except (KeyError, ValueError):
        return None
    return moment if moment.tzinfo is not None else None


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


_GAP = "   "


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Write rows as lines with aligned columns, the first row being the heading."""
    cells = [[visible(cell, lines=False) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        _GAP.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def visible(text: str, *, lines: bool = True) -> str:
    """Show what a terminal would take for a command; `lines` lets line breaks and tabs through."""
    kept = "\n\t" if lines else ""
    return "".join(
        character if character.isprintable() or character in kept else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()
