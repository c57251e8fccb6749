"""What is held to be true of each container now, and who wants to hear when it changes.

The one place where verdicts live: the decision asks here whether a container failed, the sync loop
subscribes, the status is made from it.

From single outcomes to a verdict: so many in a row, then it counts.

A pure state machine, one state per container and kind. A container begins as started: unknown,
ready: no, alive: yes. A verdict changes after `failures` failed or `successes` passed outcomes in
a row. Whoever failed liveness, or has been told its startup either way, is *held*: there is
nothing more to ask of that container, a new one begins anew.

Whether a container counts as started and ready: from its state, its probes, and its past.

A container without a startup probe is started when it runs; one without a readiness probe is ready
when it is started. Ordinary init containers are ready once they have succeeded.

An agent that restarts finds containers running that it never asked. What its predecessor knew is in
the pod's status, from the API server or wherever statuses are kept: the same container stays as it
was until its own probes say otherwise, so readiness does not flap. Where the pod has no status at
all, a container older than the agent is presumed started and ready for as long as that is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.probes.types import KINDS, Health, Kind, ProbeParameters, RuntimeContainer, RuntimePod, Verdict


@dataclass(frozen=True, slots=True)
class ProbeUpdate:
    """A verdict that changed."""

    pod_uid: str
    container_name: str
    container_id: str
    kind: Kind
    verdict: Verdict


Listener = Callable[[ProbeUpdate], None]


class ResultsManager:
    """Verdicts by container id and kind."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[str, Kind], Verdict] = {}
        self._listeners: list[Listener] = []

    def verdict(self, kind: Kind, container_id: str) -> Verdict | None:
        """What holds for a container, or None where nobody asks."""
        return self._verdicts.get((container_id, kind))

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` at every change, in the loop; it must not wait. Returns how to stop that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def begin(self, kind: Kind, container_id: str, verdict: Verdict) -> None:
        """Set what holds before a container is asked; nobody is told, nothing has happened yet."""
        self._verdicts[container_id, kind] = verdict

    def publish(self, update: ProbeUpdate) -> None:
        """Set a new verdict and tell everyone."""
        self._verdicts[update.container_id, update.kind] = update.verdict
        for listener in tuple(self._listeners):
            listener(update)

    def forget(self, container_id: str, *kinds: Kind) -> None:
        """Drop what is known of a container, of all kinds unless some are named."""
        for kind in kinds or KINDS:
            self._verdicts.pop((container_id, kind), None)


_BEGINNING: dict[Kind, Verdict] = {"startup": "unknown", "readiness": "failure", "liveness": "success"}


@dataclass(frozen=True, slots=True)
class ProbeState:
    """Where one probe of one container stands."""

    verdict: Verdict
    last_passed: bool = True
    run: int = 0
    """How many outcomes in a row were like the last one."""
    held: bool = False


def begin(kind: Kind, verdict: Verdict | None = None) -> ProbeState:
    """The state of a container that was never asked; `verdict` is what an earlier agent knew."""
    if verdict is None:
        verdict = _BEGINNING[kind]
    return ProbeState(verdict, held=_is_final(kind, verdict))


def step(
    state: ProbeState, passed: bool, kind: Kind, terms: ProbeParameters
) -> tuple[ProbeState, Verdict | None]:
    """Take one outcome into account; the second value is the new verdict, if it changed."""
    run = state.run + 1 if passed == state.last_passed else 1
    if run < (terms.successes if passed else terms.failures):
        return ProbeState(state.verdict, passed, run, state.held), None
    verdict: Verdict = "success" if passed else "failure"
    after = ProbeState(verdict, passed, run, _is_final(kind, verdict))
    return after, verdict if verdict != state.verdict else None


def _is_final(kind: Kind, verdict: Verdict) -> bool:
    match kind:
        case "startup":
            return verdict != "unknown"
        case "readiness":
            return False
        case "liveness":
            return verdict == "failure"


VerdictOf = Callable[[Kind, str], Verdict | None]
"""What holds for a container's id, None where nobody asked yet."""
IsOlder = Callable[[str, RuntimeContainer], bool]
"""Whether a container (its name and what is seen of it) is older than the agent."""


def health(pod: Pod, seen: RuntimePod, verdict: VerdictOf, is_older: IsOlder) -> dict[str, Health]:
    """Give every container's health by name.

    A container that the runtime no longer has is neither started nor ready, also an init container
    that has succeeded and was cleaned up: for that one, its earlier status still holds.
    """

    def judge(container: Container) -> Health:
        found = seen.latest(container.name)
        if found is None or found.phase != "running":
            return Health(False, False)
        return _judge_running(pod, container, found, verdict, is_older(container.name, found))

    def judge_init(container: Container) -> Health:
        if is_sidecar(container):
            return judge(container)
        found = seen.latest(container.name)
        if found is None:
            return Health(False, False)
        return Health(found.phase == "running", found.phase == "exited" and found.exit_code == 0)

    return {container.name: judge_init(container) for container in pod.spec.init_containers} | {
        container.name: judge(container) for container in pod.spec.containers
    }


def beginning(pod: Pod, kind: Kind, name: str, container_id: str, older: bool) -> ProbeState:
    """Give the state in which a container begins that this agent never asked."""
    known = _remembered(pod, name, container_id)
    if known is None:
        return begin(kind, "unknown" if older and kind == "readiness" else None)
    passed = (kind == "startup" and known.started) or (kind == "readiness" and known.ready)
    return begin(kind, "success" if passed else None)


def _judge_running(
    pod: Pod, container: Container, found: RuntimeContainer, verdict: VerdictOf, older: bool
) -> Health:
    def holds(kind: Kind) -> Verdict:
        known = verdict(kind, found.id)
        return known or beginning(pod, kind, container.name, found.id, older).verdict

    if container.startup_probe is not None:
        startup = holds("startup")
        # By now the status may be one that this agent wrote from its own presumption.
        known = _remembered(pod, container.name, found.id)
        presumed = older and (known is None or known.started)
        if startup == "failure" or (startup == "unknown" and not presumed):
            return Health(False, False)
    return Health(True, container.readiness_probe is None or holds("readiness") != "failure")


def _remembered(pod: Pod, name: str, container_id: str) -> Health | None:
    """What an earlier agent said of this very container; None if it said nothing of the whole pod."""
    statuses = [*pod.status.container_statuses, *pod.status.init_container_statuses]
    if not statuses:
        return None
    for status in statuses:
        known_id = "" if status.container_id is msgspec.UNSET else status.container_id
        if status.name == name and known_id.rpartition("://")[2] == container_id:
            return Health(status.started is True, status.ready)
    return Health(False, False)
