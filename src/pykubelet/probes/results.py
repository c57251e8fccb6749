"""Probe results after thresholds, by container and kind, and the container health derived from them.

`ResultsManager` is the only store: `decide` reads whether a container failed, the engine subscribes, and
the status is computed from it.

The threshold is a pure state machine, with one state per container and kind. A container begins with startup
unknown, readiness failed and liveness succeeded. The result changes after `failures` failed or `successes`
passed probes in a row. After a failed liveness probe, or any startup result, the state is *held*: that probe
does not run again for this container, and a new container begins with a new state.

`health` computes `started` and `ready`. A container without a startup probe is started when it runs; one
without a readiness probe is ready when it is started. Ordinary init containers are ready once they have
succeeded.

After a restart of the kubelet, the previous results are in the pod's status, from the API server or from the
local status store: the same container keeps them until its own probes return another result, so that
readiness does not flap. If the pod has no status at all, a container that is older than this kubelet process
is presumed started and ready until a probe has a result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.probes.types import KINDS, Health, Kind, ProbeParameters, Result, RuntimeContainer, RuntimePod


@dataclass(frozen=True, slots=True)
class ProbeUpdate:
    """A changed result."""

    pod_uid: str
    container_name: str
    container_id: str
    kind: Kind
    result: Result


Listener = Callable[[ProbeUpdate], None]


class ResultsManager:
    """Probe results by container ID and kind."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, Kind], Result] = {}
        self._listeners: list[Listener] = []

    def get(self, kind: Kind, container_id: str) -> Result | None:
        """Return the current result of a container, or None if it is not probed."""
        return self._results.get((container_id, kind))

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` on the event loop for every change; it must not block. Returns an unsubscriber."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def set_initial(self, kind: Kind, container_id: str, result: Result) -> None:
        """Set the initial result of a container without notifying listeners."""
        self._results[container_id, kind] = result

    def publish(self, update: ProbeUpdate) -> None:
        """Set a new result and notify all listeners."""
        self._results[update.container_id, update.kind] = update.result
        for listener in tuple(self._listeners):
            listener(update)

    def forget(self, container_id: str, *kinds: Kind) -> None:
        """Remove the results of a container, of all kinds unless some are named."""
        for kind in kinds or KINDS:
            self._results.pop((container_id, kind), None)


_INITIAL: dict[Kind, Result] = {"startup": "unknown", "readiness": "failure", "liveness": "success"}


@dataclass(frozen=True, slots=True)
class ProbeState:
    """Threshold state of one probe of one container."""

    result: Result
    last_passed: bool = True
    run: int = 0
    """Number of consecutive probes with the same result as the last one."""
    held: bool = False


def initial_state(kind: Kind, result: Result | None = None) -> ProbeState:
    """Return the state of a container that was never probed; `result` is the previous process's result."""
    if result is None:
        result = _INITIAL[kind]
    return ProbeState(result, held=_is_final(kind, result))


def step(
    state: ProbeState, passed: bool, kind: Kind, parameters: ProbeParameters
) -> tuple[ProbeState, Result | None]:
    """Apply one probe; the second value is the new result, if it changed."""
    if passed == state.last_passed and state.run and state.result == ("success" if passed else "failure"):
        return state, None  # the count matters for a change only
    run = state.run + 1 if passed == state.last_passed else 1
    if run < (parameters.successes if passed else parameters.failures):
        return ProbeState(state.result, passed, run, state.held), None
    result: Result = "success" if passed else "failure"
    new_state = ProbeState(result, passed, run, _is_final(kind, result))
    return new_state, result if result != state.result else None


def _is_final(kind: Kind, result: Result) -> bool:
    match kind:
        case "startup":
            return result != "unknown"
        case "readiness":
            return False
        case "liveness":
            return result == "failure"


ResultOf = Callable[[Kind, str], Result | None]
"""Returns the current result by kind and container ID; None if there is none yet."""
IsOlder = Callable[[str, RuntimeContainer], bool]
"""Returns whether a container, by its name and observed state, is older than this kubelet process."""


def health(
    pod: Pod, seen: RuntimePod, get_result: ResultOf, is_older: IsOlder, *, restores: bool = True
) -> dict[str, Health]:
    """Return the health of every container by name; without `restores` only from results of this process.

    A container that the runtime no longer has is neither started nor ready. That includes an init container
    that has succeeded and was garbage collected: its earlier status still holds.
    """

    def container_health(container: Container) -> Health:
        found = seen.latest(container.name)
        if found is None or found.phase != "running":
            return Health(False, False)
        if not restores:
            return _probed_health(container, found, get_result)
        return _running_health(pod, container, found, get_result, is_older(container.name, found))

    def init_container_health(container: Container) -> Health:
        if is_sidecar(container):
            return container_health(container)
        found = seen.latest(container.name)
        if found is None:
            return Health(False, False)
        return Health(found.phase == "running", found.phase == "exited" and found.exit_code == 0)

    return {container.name: init_container_health(container) for container in pod.spec.init_containers} | {
        container.name: container_health(container) for container in pod.spec.containers
    }


def restored_state(pod: Pod, kind: Kind, name: str, container_id: str, older: bool) -> ProbeState:
    """Return the initial state of a container that this kubelet process has not probed."""
    known = _reported_health(pod, name, container_id)
    if known is None:
        return initial_state(kind, "unknown" if older and kind == "readiness" else None)
    passed = (kind == "startup" and known.started) or (kind == "readiness" and known.ready)
    return initial_state(kind, "success" if passed else None)


def _probed_health(container: Container, found: RuntimeContainer, get_result: ResultOf) -> Health:
    """Return the health of a running container without regard to its earlier status."""

    def has_passed(kind: Kind) -> bool:
        return (get_result(kind, found.id) or initial_state(kind).result) == "success"

    started = container.startup_probe is None or has_passed("startup")
    return Health(started, started and (container.readiness_probe is None or has_passed("readiness")))


def _running_health(
    pod: Pod, container: Container, found: RuntimeContainer, get_result: ResultOf, older: bool
) -> Health:
    def current_result(kind: Kind) -> Result:
        known = get_result(kind, found.id)
        return known or restored_state(pod, kind, container.name, found.id, older).result

    if container.startup_probe is not None:
        startup = current_result("startup")
        # The status may already be one that this process wrote from its own presumption.
        known = _reported_health(pod, container.name, found.id)
        presumed = older and (known is None or known.started)
        if startup == "failure" or (startup == "unknown" and not presumed):
            return Health(False, False)
    return Health(True, container.readiness_probe is None or current_result("readiness") != "failure")


def _reported_health(pod: Pod, name: str, container_id: str) -> Health | None:
    """Return the health of this container in the pod's status; None if the pod has no statuses."""
    statuses = [*pod.status.container_statuses, *pod.status.init_container_statuses]
    if not statuses:
        return None
    for status in statuses:
        known_id = "" if status.container_id is msgspec.UNSET else status.container_id
        if status.name == name and known_id.rpartition("://")[2] == container_id:
            return Health(status.started is True, status.ready)
    return Health(False, False)
