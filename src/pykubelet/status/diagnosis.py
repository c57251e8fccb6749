"""Diagnosis of a pod: why it does not run, as the step of its start that fails, with a remedy.

A pod starts in seven steps: admission, volumes, image, sandbox, init containers, containers, probes. The
diagnosis finds how far the pod got and what stopped it, from its status and its events. All functions are
pure; the page and the command line share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from pykubelet.api.pod import Pod, is_sidecar
from pykubelet.api.pod_status import ContainerStateTerminated, ContainerStatus
from pykubelet.podconfig.pod_history import Event
from pykubelet.podconfig.wait_for import CYCLE, FAILED, MISSING, WAITING
from pykubelet.status.columns import (
    has_condition,
    is_finished,
    is_terminating,
    status_text,
    termination_reason,
)
from pykubelet.status.remedies import IMAGE_REASONS, SANDBOX_REASONS, VOLUME_REASONS, remedy

StepName = Literal["admission", "volumes", "image", "sandbox", "init", "containers", "probes"]
StepState = Literal["done", "active", "failed", "waiting"]
STEPS: tuple[StepName, ...] = ("admission", "volumes", "image", "sandbox", "init", "containers", "probes")
RESTART_SECONDS = 600.0
"""Time for which a pod needs attention after a container of it was restarted because of a failure."""
_WAITING_FOR_START = frozenset({"", "ContainerCreating", "PodInitializing"})
_WAIT_FOR = frozenset({WAITING, MISSING, CYCLE, FAILED})
"""Reasons of containers whose pod waits for other pods, before anything of it is set up."""
_WITHOUT_REASON = frozenset({"Running", "Pending", "ContainerCreating", "PodInitializing"})
"""Status texts that do not name a problem."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What stops a pod at one step."""

    reason: str
    message: str
    remedy: str
    container: str = ""
    transient: bool = False
    """Whether it is still ordinary: the step has only not finished yet."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the start of a pod, and how far it is."""

    name: StepName
    state: StepState
    text: str
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All steps of a pod; at most one of them is active or failed, and the following ones wait."""

    steps: tuple[Step, ...]
    problem: Problem | None
    """What the operator should look at; None while the pod is as it should be."""
    is_past: bool = False
    """Whether another pod has done the work since: the pod is only kept for its log."""

    @property
    def needs_attention(self) -> bool:
        """Whether the pod fails, rather than only starting."""
        return self.problem is not None and not self.problem.transient and not self.is_past


@dataclass(frozen=True, slots=True)
class _Found:
    name: StepName
    problem: Problem


def diagnose(
    pod: Pod, state: str, events: Sequence[Event], now: datetime, *, job_completed: bool = False
) -> Diagnosis:
    """Return the diagnosis of a pod; `state` is that of its pod worker.

    A failed pod of a Job that has completed does not need attention: a later pod has succeeded.
    """
    if pod.status.phase == "Succeeded":
        return Diagnosis(tuple(_done(name, pod) for name in STEPS), None)
    found = _find(pod, state, events, now)
    is_past = job_completed and pod.status.phase == "Failed"
    if found is not None and is_past:
        message = "; ".join(filter(None, (found.problem.message, "its Job has completed since")))
        found = replace(found, problem=replace(found.problem, message=message, remedy=""))
    reached = STEPS.index(found.name) if found is not None else len(STEPS)
    steps = []
    for index, name in enumerate(STEPS):
        if index < reached:
            steps.append(_done(name, pod))
        elif index == reached and found is not None:
            problem = found.problem
            text = f"{problem.container}: {problem.reason}" if problem.container else problem.reason
            steps.append(Step(name, "active" if problem.transient else "failed", text, problem))
        else:
            steps.append(Step(name, "waiting", "not reached"))
    return Diagnosis(tuple(steps), found.problem if found is not None else None, is_past)


def node_sentence(problems: Sequence[str], failing: Sequence[str]) -> str:
    """Return the state of the node in one sentence: its own problems, then the pods that need attention."""
    parts = list(problems)
    if failing:
        verb = "1 pod needs attention" if len(failing) == 1 else f"{len(failing)} pods need attention"
        shown = ", ".join(failing[:3]) + (f" and {len(failing) - 3} more" if len(failing) > 3 else "")
        parts.append(f"{verb}: {shown}")
    return "; ".join(parts) if parts else "Healthy"


def failed_run(pod: Pod, diagnosis: Diagnosis) -> tuple[str, bool] | None:
    """Return the container whose log explains the problem, and whether its previous run failed."""
    step = next((step for step in diagnosis.steps if step.state == "failed"), None)
    if step is None or step.problem is None or step.name not in ("init", "containers", "probes"):
        return None
    status = next((each for each in _statuses(pod) if each.name == step.problem.container), None)
    if status is None:
        return None
    has_restarted = status.state.terminated is None and status.last_state.terminated is not None
    return status.name, has_restarted and step.name != "probes"


def _done(name: StepName, pod: Pod) -> Step:
    spec = pod.spec
    texts: dict[StepName, str] = {
        "admission": "admitted",
        "volumes": _count(len(spec.volumes), "volume") if spec.volumes else "none needed",
        "image": _count(len({c.image for c in (*spec.containers, *spec.init_containers)}), "image"),
        "sandbox": pod.status.pod_ip or "created",
        "init": _count(len(spec.init_containers), "container") if spec.init_containers else "none needed",
        "containers": "completed"
        if pod.status.phase == "Succeeded"
        else _count(len(spec.containers), "container"),
        "probes": "ready" if has_condition(pod, "Ready") else "completed" if is_finished(pod) else "passed",
    }
    return Step(name, "done", texts[name])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _find(pod: Pod, state: str, events: Sequence[Event], now: datetime) -> _Found | None:
    """Return the first step that is not done, with its problem."""
    if (rejected := _rejection(pod)) is not None:
        return rejected
    if is_terminating(pod, state) and not is_finished(pod):
        grace = f"its containers get up to {pod.spec.termination_grace_period_seconds or 0} s"
        return _Found("containers", Problem("Terminating", grace, "", transient=True))
    for status in _statuses(pod):
        if (failed := _wait_problem(status) or _image_problem(status)) is not None:
            return failed
    if not _is_started(pod) and (before := _before_containers(pod, events)) is not None:
        return before
    return _init_problem(pod) or _container_problem(pod) or _probe_problem(pod, events) or _restarts(pod, now)


def _rejection(pod: Pod) -> _Found | None:
    """Return why the kubelet ended the pod as a whole."""
    status = pod.status
    if status.phase != "Failed" or not status.reason:
        return None
    ran = any(s.state.running or s.state.terminated or s.last_state.terminated for s in _statuses(pod))
    problem = Problem(status.reason, status.message, remedy(status.reason, status.message))
    return _Found("containers" if ran else "admission", problem)


def _wait_problem(status: ContainerStatus) -> _Found | None:
    """Return what a pod waits for (annotation `pykubelet.dev/wait-for`); the message has the remedy."""
    waiting = status.state.waiting
    if waiting is None or waiting.reason not in _WAIT_FOR:
        return None
    transient = waiting.reason == WAITING
    return _Found("admission", Problem(waiting.reason, waiting.message, "", transient=transient))


def _image_problem(status: ContainerStatus) -> _Found | None:
    waiting = status.state.waiting
    if waiting is None or waiting.reason not in IMAGE_REASONS:
        return None
    text = remedy(waiting.reason, waiting.message)
    return _Found("image", Problem(waiting.reason, waiting.message, text, status.name))


def _is_started(pod: Pod) -> bool:
    """Return whether a container of the pod has run since its sandbox exists."""
    if any(s.state.running is not None for s in _statuses(pod)):
        return True
    waiting = (s.state.waiting.reason for s in _statuses(pod) if s.state.waiting is not None)
    return any(reason not in _WAITING_FOR_START for reason in waiting) or is_finished(pod)


def _before_containers(pod: Pod, events: Sequence[Event]) -> _Found | None:
    """Return the problem of a pod none of whose containers has started."""
    latest = max(events, key=lambda event: event.last, default=None)
    if latest is None and not _statuses(pod):
        return _Found("admission", Problem("Pending", "the pod was not admitted yet", "", transient=True))
    has_sandbox = has_condition(pod, "PodReadyToStartContainers")
    steps: tuple[tuple[StepName, frozenset[str]], ...] = (
        ("admission", frozenset({"AdmissionWaiting"})),
        ("volumes", frozenset() if has_sandbox else VOLUME_REASONS),
        ("sandbox", frozenset() if has_sandbox else SANDBOX_REASONS),
    )
    for name, reasons in steps:
        event = max((e for e in events if e.reason in reasons), key=lambda e: e.last, default=None)
        if event is not None and (name != "admission" or latest is event):
            return _Found(name, Problem(event.reason, event.message, remedy(event.reason, event.message)))
    if (pulling := _pulling(events)) is not None:
        return _Found(
            "image", Problem("Pulling", pulling.message, "", _container_of(pulling), transient=True)
        )
    if pod.status.phase in ("", "Pending") and not has_sandbox:
        return _Found("sandbox", Problem("ContainerCreating", "the pod is being set up", "", transient=True))
    return None


def _pulling(events: Sequence[Event]) -> Event | None:
    """Return the event of an image pull that has not ended."""
    ends: dict[str, float] = {}
    for event in events:
        if event.reason in ("Pulled", "Failed", "BackOff"):
            ends[event.where] = max(ends.get(event.where, 0.0), event.last)
    running = [e for e in events if e.reason == "Pulling" and e.last > ends.get(e.where, 0.0)]
    return max(running, key=lambda event: event.last, default=None)


def _container_of(event: Event) -> str:
    return event.where.partition("{")[2].rstrip("}")


def _init_problem(pod: Pod) -> _Found | None:
    if has_condition(pod, "Initialized"):
        return None
    sidecars = {c.name for c in pod.spec.init_containers if is_sidecar(c)}
    for status in pod.status.init_container_statuses:
        ended = status.state.terminated
        if ended is not None and ended.exit_code == 0:
            continue
        if status.name in sidecars and status.started is True:
            continue
        return _Found(
            "init", _state_problem(status) or Problem("Running", "", "", status.name, transient=True)
        )
    return None


def _container_problem(pod: Pod) -> _Found | None:
    problems = [found for s in pod.status.container_statuses if (found := _state_problem(s)) is not None]
    lasting = [problem for problem in problems if not problem.transient]
    return _Found("containers", (lasting or problems)[0]) if problems else None


def _state_problem(status: ContainerStatus) -> Problem | None:
    """Return the problem of a container that does not run as it should; None if it runs or has succeeded."""
    waiting, ended = status.state.waiting, status.state.terminated
    if ended is not None:
        return None if ended.exit_code == 0 else _end_problem(status.name, ended)
    if waiting is None:
        return None
    if waiting.reason in _WAITING_FOR_START:
        return Problem(waiting.reason or "Waiting", waiting.message, "", status.name, transient=True)
    last = status.last_state.terminated
    if waiting.reason == "CrashLoopBackOff" and last is not None:
        cause = _end_problem(status.name, last)
        # The rest of the message repeats the names of the container and the pod.
        delay = waiting.message.partition(" restarting failed ")[0]
        message = f"{cause.message}; {delay}" if delay else cause.message
        advice = cause.remedy or remedy("CrashLoopBackOff")
        return Problem("CrashLoopBackOff", message, advice, status.name)
    return Problem(waiting.reason, waiting.message, remedy(waiting.reason, waiting.message), status.name)


def _end_problem(container: str, ended: ContainerStateTerminated) -> Problem:
    reason = termination_reason(ended)
    message = f"exited with code {ended.exit_code}" + (f" ({reason})" if reason != "Error" else "")
    if isinstance(ended.message, str) and ended.message.strip():
        message += f": {ended.message.strip()}"
    return Problem(reason, message, remedy(reason, message, ended.exit_code), container)


def _probe_problem(pod: Pod, events: Sequence[Event]) -> _Found | None:
    """Return the problem of a running container that is not ready, or whose probe has just failed."""
    for status in _main_statuses(pod):
        if status.state.running is None or (status.ready and status.started is not False):
            continue
        started = status.state.running.started_at
        since = started.timestamp() if started is not None else 0.0
        failed = [
            event
            for event in events
            if event.reason == "Unhealthy" and _container_of(event) == status.name and event.last >= since
        ]
        if failed:
            event = max(failed, key=lambda event: event.last)
            # A startup probe may fail until its threshold, then the container is restarted.
            is_starting = event.message.startswith("Startup probe failed")
            advice = remedy("Unhealthy")
            problem = Problem("Unhealthy", event.message, advice, status.name, transient=is_starting)
            return _Found("probes", problem)
        return _Found(
            "probes", Problem("NotReady", "the container is not ready yet", "", status.name, transient=True)
        )
    return None


def _restarts(pod: Pod, now: datetime) -> _Found | None:
    """Return the problem of a container that runs again after a recent failure."""
    for status in _main_statuses(pod):
        last = status.last_state.terminated
        if last is None or last.exit_code == 0 or last.finished_at is None or status.state.running is None:
            continue
        if (now - last.finished_at).total_seconds() < RESTART_SECONDS:
            problem = _end_problem(status.name, last)
            message = f"restarted, before it {problem.message}"
            return _Found("containers", Problem("Restarted", message, problem.remedy, status.name))
    return None


def _main_statuses(pod: Pod) -> Iterator[ContainerStatus]:
    sidecars = {c.name for c in pod.spec.init_containers if is_sidecar(c)}
    yield from (status for status in pod.status.init_container_statuses if status.name in sidecars)
    yield from pod.status.container_statuses


def _statuses(pod: Pod) -> list[ContainerStatus]:
    return [*pod.status.init_container_statuses, *pod.status.container_statuses]


def summary_status(
    pod: Pod, state: str, diagnosis: Diagnosis
) -> tuple[str, Literal["ok", "busy", "bad", "off"]]:
    """Return the status text of a pod and its level: as it should be, in progress, failing, finished."""
    text = status_text(pod, state)
    if diagnosis.needs_attention:
        reason = diagnosis.problem.reason if diagnosis.problem is not None else text
        return reason if text in _WITHOUT_REASON else text, "bad"
    if is_finished(pod):
        return text, "off"
    return text, "busy" if diagnosis.problem is not None else "ok"
