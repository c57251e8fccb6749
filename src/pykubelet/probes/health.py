"""Whether a container counts as started and ready: from its state, its probes, and its past.

A container without a startup probe is started when it runs; one without a readiness probe is ready
when it is started. Ordinary init containers are ready once they have succeeded.

An agent that restarts finds containers running that it never asked. What its predecessor knew is in
the pod's status, from the API server or wherever statuses are kept: the same container stays as it
was until its own probes say otherwise, so readiness does not flap. Where the pod has no status at
all, a container older than the agent is presumed started and ready for as long as that is not known.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.probes.kinds import Health, Kind, SeenContainer, SeenPod, Verdict
from pykubelet.probes.threshold import ProbeState, begin

VerdictOf = Callable[[Kind, str], Verdict | None]
"""What holds for a container's id, None where nobody asked yet."""

IsOlder = Callable[[str, SeenContainer], bool]
"""Whether a container (its name and what is seen of it) is older than the agent."""


def health(pod: Pod, seen: SeenPod, verdict: VerdictOf, is_older: IsOlder) -> dict[str, Health]:
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
    pod: Pod, container: Container, found: SeenContainer, verdict: VerdictOf, older: bool
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
