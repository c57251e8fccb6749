"""How a pod gets on, and whether it has got there: the decisions behind `pykubelet run`.

Pure functions of the pod's document. A pod is there when it is ready or has finished. It has failed when
it finished badly, or when the node has begun to wait between attempts: the next attempt will most
likely fail in the same way, and whoever started it wants to know now. Work that is tried again until it
succeeds (`restartPolicy: OnFailure`) may crash on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from pykubelet.api.pod import Pod, is_sidecar
from pykubelet.api.pod_status import ContainerStatus
from pykubelet.cli.describe_text import state_text
from pykubelet.cli.pod_words import has_condition, is_leaving, status_word
from pykubelet.pods.journal import Event

STEADY_SECONDS = 2.0
"""How long a pod without readiness probes must be ready to be believed: it may crash at once."""

HOPELESS = frozenset(
    {
        "CrashLoopBackOff",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
    }
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of the waiting."""

    good: bool
    word: str
    """Such as `ready`, `succeeded`, `CrashLoopBackOff`."""


def judge(pod: Pod, state: str, ready_seconds: float) -> Verdict | None:
    """Decide whether there is anything left to wait for.

    `ready_seconds` is for how long the pod has been ready without a break.
    """
    if pod.status.phase == "Succeeded":
        return Verdict(True, "succeeded")
    if pod.status.phase == "Failed":
        return Verdict(False, status_word(pod, state))
    if is_leaving(pod, state):
        return Verdict(False, "Terminating")
    for status in _statuses(pod):
        reason = status.state.waiting.reason if status.state.waiting is not None else ""
        may_crash = pod.spec.restart_policy == "OnFailure" and reason == "CrashLoopBackOff"
        if reason in HOPELESS and not may_crash:
            return Verdict(False, reason)
    if is_ready(pod) and (_has_readiness_probes(pod) or ready_seconds >= STEADY_SECONDS):
        return Verdict(True, "ready")
    return None


def is_ready(pod: Pod) -> bool:
    """Whether the pod says that it is ready."""
    return has_condition(pod, "Ready")


@dataclass(frozen=True, slots=True)
class Step:
    """What one container does at the moment."""

    container: str
    doing: str


def steps(pod: Pod, now: datetime) -> list[Step]:
    """Give a line for each container that has something to say, in the order in which they start."""
    passing = {container.name for container in pod.spec.init_containers if not is_sidecar(container)}
    found = []
    for status in _statuses(pod):
        if status.state.running is not None:
            readiness = "" if status.name in passing else ", ready" if status.ready else ", not ready yet"
            doing = f"running{readiness}"
        else:
            doing = state_text(status.state, now)
        again = f" (restart {status.restart_count})" if status.restart_count else ""
        found.append(Step(status.name, doing + again))
    return found


def explain(pod: Pod, events: Sequence[Event], now: datetime) -> list[str]:
    """Say what went wrong: containers that do not run with the way they ended, and the last warnings."""
    lines = []
    if pod.status.reason or pod.status.message:
        lines.append(f"{pod.status.reason}: {pod.status.message}".strip(": "))
    for status in troubled(pod):
        lines.append(f"container {status.name}: {state_text(status.state, now)}")
        if status.last_state.terminated is not None:
            lines.append(f"container {status.name} before: {state_text(status.last_state, now)}")
    for event in _last_warnings(events, 3):
        times = f" (x{event.count})" if event.count > 1 else ""
        lines.append(f"{event.reason}: {event.message}{times}")
    return lines


def troubled(pod: Pod) -> list[ContainerStatus]:
    """The containers that keep the pod from being well."""
    return [status for status in _statuses(pod) if not _is_well(pod, status)]


def _is_well(pod: Pod, status: ContainerStatus) -> bool:
    if status.state.running is not None:
        return status.ready or not any(status.name == one.name for one in pod.spec.containers)
    if status.state.terminated is not None:
        return status.state.terminated.exit_code == 0
    # Those that wait for others are not what is wrong.
    waiting = status.state.waiting
    return waiting is None or waiting.reason in ("", "PodInitializing", "ContainerCreating")


def _last_warnings(events: Iterable[Event], most: int) -> list[Event]:
    warnings = sorted((e for e in events if e.kind == "Warning"), key=lambda event: event.last)
    return warnings[-most:]


def _has_readiness_probes(pod: Pod) -> bool:
    return all(container.readiness_probe is not None for container in pod.spec.containers)


def _statuses(pod: Pod) -> Iterator[ContainerStatus]:
    yield from pod.status.init_container_statuses
    yield from pod.status.container_statuses
