"""Computation of pod statuses, also of terminated and rejected pods, and the status store.

`compute_status` is a pure function of the spec, the observed runtime state and the probe results. It
returns the complete status; the status manager sends only what changed.

`final_status` is the last status of a pod of which nothing runs any more. Controllers wait for the end of a
pod and act on its result, so the phase is always Succeeded or Failed, also for a pod deleted before it
started; and a container whose result is unknown is reported as failed instead of waiting for a start that
never comes.

The status of a pod rejected at admission has no conditions and no containers, because the node never ran
it. After a kubelet restart it is recognized by its message. Clients match the reasons and messages.

`StatusStore` has the last status of every pod: pod workers write it, listeners are notified of changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from pykubelet.admission.handler import AdmitRejection
from pykubelet.api.ip import by_family
from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.api.pod_status import (
    AddressStatus,
    ContainerState,
    ContainerStateTerminated,
    ContainerStatus,
    PodCondition,
    PodStatus,
    StatusResources,
)
from pykubelet.cm.qos import pod_limits, pod_requests, qos_class
from pykubelet.kuberuntime.decide import restarts_after_exit, sandbox_is_stale
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.resize.feasibility import IN_PROGRESS, PENDING
from pykubelet.status.containers import (
    LOST_EXIT_CODE,
    RESTART_CONDITION,
    StatusInputs,
    container_statuses,
    restart_condition,
    will_run_again,
)

TERMINAL = ("Succeeded", "Failed")


@dataclass(slots=True)
class _Counts:
    unknown: int = 0
    running: int = 0
    waiting: int = 0
    stopped: int = 0
    stopped_for_good: int = 0
    succeeded: int = 0


def phase_of(
    pod: Pod, statuses: Mapping[str, ContainerStatus], *, terminal: bool, initialized: bool, static: bool
) -> str:
    """Return the phase of a pod from its containers' statuses.

    `initialized` is whether an ordinary container is or was active, so that a restarting sidecar does not
    set the pod back to Pending; `terminal` is whether no container will run again.
    """
    init_pending, init_failed = _initialization(pod, statuses)
    sidecars_pending, counts = _sidecars(pod, statuses)
    for container in pod.spec.containers:
        _count(pod, container, statuses.get(container.name), counts)
    if init_failed:
        return "Failed"
    if init_pending or (sidecars_pending and not initialized) or counts.waiting:
        return "Pending"
    if counts.running and not counts.unknown:
        return "Running"
    if not counts.running and counts.stopped and not counts.unknown:
        ended = "Succeeded" if counts.stopped == counts.succeeded else "Failed"
        if terminal and not static:
            return ended
        return ended if counts.stopped == counts.stopped_for_good else "Running"
    return "Pending"


def _initialization(pod: Pod, statuses: Mapping[str, ContainerStatus]) -> tuple[bool, bool]:
    """Return whether init containers have not completed, and whether one failed for good."""
    pending = failed = False
    for container in pod.spec.init_containers:
        if is_sidecar(container):
            continue
        status = statuses.get(container.name)
        code = _exit_code(status)
        if status is None or code is None:
            pending = True
        elif code != 0:
            failed = failed or not (restarts_after_exit(pod, container, code) or will_run_again(status))
    return pending, failed


def _sidecars(pod: Pod, statuses: Mapping[str, ContainerStatus]) -> tuple[bool, _Counts]:
    pending, counts = False, _Counts()
    for container in pod.spec.init_containers:
        if not is_sidecar(container):
            continue
        status = statuses.get(container.name)
        if status is None:
            counts.unknown += 1
        elif status.state.running is not None:
            pending = pending or status.started is not True
            counts.running += 1
        elif _exit_code(status) is None:
            pending = True
            if status.state.waiting is not None:
                counts.waiting += 1
            else:
                counts.unknown += 1
    return pending, counts


def _count(pod: Pod, container: Container, status: ContainerStatus | None, counts: _Counts) -> None:
    if status is None:
        counts.unknown += 1
    elif status.state.running is not None:
        counts.running += 1
    elif (code := _exit_code(status)) is not None:
        counts.stopped += 1
        counts.stopped_for_good += not (restarts_after_exit(pod, container, code) or will_run_again(status))
        counts.succeeded += status.state.terminated is not None and code == 0
    elif status.state.waiting is not None:
        counts.waiting += 1
    else:
        counts.unknown += 1


def _exit_code(status: ContainerStatus | None) -> int | None:
    """Return the last exit code of a container that does not run; None if it runs or never ran."""
    if status is None or status.state.running is not None:
        return None
    ended = status.state.terminated
    if ended is None and status.state.waiting is not None:
        ended = status.last_state.terminated
    return None if ended is None else ended.exit_code


OWNED = (
    PENDING,
    IN_PROGRESS,
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    "PodScheduled",
    RESTART_CONDITION,
)
"""Conditions that only the kubelet writes; all others are kept as they are."""
SHARED = ("DisruptionTarget",)
"""Conditions that the kubelet and other components write; the kubelet's only if it terminates the pod."""


def compute_status(inputs: StatusInputs, now: datetime) -> PodStatus:
    """Return the pod's status as of `now`."""
    pod, observed, previous = inputs.pod, inputs.observed, inputs.previous
    ordinary = container_statuses(inputs, "ordinary")
    init = container_statuses(inputs, "init")
    by_name = {status.name: status for status in [*ordinary, *init]}
    initialized = _has_created_ordinary(pod, observed)
    phase = phase_of(
        pod, by_name, terminal=inputs.terminal, initialized=initialized, static=is_static_pod(pod)
    )
    # A terminal phase never changes, whatever the exit codes: the kubelet may have decided it.
    for earlier in (previous.phase, pod.status.phase):
        if earlier in TERMINAL:
            phase = earlier
    requests = pod_requests(pod)
    status = PodStatus(
        observed_generation=pod.metadata.generation,
        phase=phase,
        qos_class=qos_class(pod),
        start_time=previous.start_time or pod.status.start_time or now,
        container_statuses=ordinary,
        init_container_statuses=init,
        ephemeral_container_statuses=container_statuses(inputs, "ephemeral"),
        allocated_resources=requests,
        resources=inputs.in_force or StatusResources(limits=pod_limits(pod), requests=requests),
        resource_claim_statuses=pod.status.resource_claim_statuses,
        extended_resource_claim_status=pod.status.extended_resource_claim_status,
        node_allocatable_resource_claim_statuses=pod.status.node_allocatable_resource_claim_statuses,
    )
    if phase == previous.phase:
        status.reason = previous.reason or pod.status.reason
        status.message = previous.message or pod.status.message
    _set_addresses(status, inputs)
    status.conditions = _conditions(inputs, by_name, phase, now)
    return status


def has_external_change(before: Pod, after: Pod) -> bool:
    """Return whether another writer set a terminal phase or changed a readiness gate's condition."""
    if after.status.phase in TERMINAL and before.status.phase not in TERMINAL:
        return True
    gates = {gate.condition_type for gate in after.spec.readiness_gates}
    return bool(gates) and _gate_statuses(before, gates) != _gate_statuses(after, gates)


def _gate_statuses(pod: Pod, gates: set[str]) -> dict[str, str]:
    return {c.type: c.status for c in pod.status.conditions if c.type in gates}


def _set_addresses(status: PodStatus, inputs: StatusInputs) -> None:
    hosts = list(inputs.host_ips) or [address.ip for address in inputs.previous.host_ips]
    own = hosts if inputs.pod.spec.host_network else by_family(inputs.observed.ips, hosts[0] if hosts else "")
    ips = own or [address.ip for address in inputs.previous.pod_ips]
    status.host_ips = [AddressStatus(ip=ip) for ip in hosts]
    status.pod_ips = [AddressStatus(ip=ip) for ip in ips]
    status.host_ip = hosts[0] if hosts else ""
    status.pod_ip = ips[0] if ips else ""


def _conditions(
    inputs: StatusInputs, statuses: dict[str, ContainerStatus], phase: str, now: datetime
) -> list[PodCondition]:
    pod = inputs.pod
    foreign = [condition for condition in pod.status.conditions if condition.type not in OWNED]
    known = {condition.type for condition in foreign}
    foreign += [c for c in inputs.previous.conditions if c.type in SHARED and c.type not in known]
    containers = _containers_ready(pod, statuses, phase)
    ready = containers
    if containers[0] == "True" and (missing := _gates_missing(pod, foreign)):
        ready = ("False", "ReadinessGatesNotReady", ", ".join(missing))
    owned = {
        "PodReadyToStartContainers": ("False" if sandbox_is_stale(pod, inputs.observed) else "True", "", ""),
        "Initialized": _initialized(inputs, statuses, phase),
        "Ready": ready,
        "ContainersReady": containers,
        "PodScheduled": ("True", "", ""),
    }
    if not inputs.reports_ready_to_start:
        del owned["PodReadyToStartContainers"]
    resizes = () if inputs.terminal else inputs.resizes
    restart = restart_condition(
        pod, inputs.observed, inputs.previous, phase, terminal=inputs.terminal, now=now
    )
    usual = (_condition(inputs, kind, *facts, now=now) for kind, facts in owned.items())
    return [*foreign, *resizes, *usual, *restart]


def _condition(
    inputs: StatusInputs, kind: str, status: str, reason: str, message: str, *, now: datetime
) -> PodCondition:
    before = next((condition for condition in inputs.previous.conditions if condition.type == kind), None)
    unchanged = before is not None and before.status == status
    return PodCondition(
        type=kind,
        status=status,
        observed_generation=inputs.pod.metadata.generation or msgspec.UNSET,
        last_transition_time=before.last_transition_time if before is not None and unchanged else now,
        reason=reason or msgspec.UNSET,
        message=message or msgspec.UNSET,
    )


def _names(what: str, names: Sequence[str]) -> list[str]:
    return [f"containers with {what} status: [{' '.join(names)}]"] if names else []


def _containers_ready(pod: Pod, statuses: dict[str, ContainerStatus], phase: str) -> tuple[str, str, str]:
    watched = [c.name for c in [*filter(is_sidecar, pod.spec.init_containers), *pod.spec.containers]]
    unknown = [name for name in watched if name not in statuses]
    unready = [name for name in watched if name in statuses and not statuses[name].ready]
    if phase == "Failed":
        return "False", "PodFailed", ""
    if phase == "Succeeded" and not unknown:
        return "False", "PodCompleted", ""
    problems = [*_names("unknown", unknown), *_names("unready", unready)]
    return ("False", "ContainersNotReady", ", ".join(problems)) if problems else ("True", "", "")


def _has_created_ordinary(pod: Pod, observed: ObservedPod) -> bool:
    """Return whether an ordinary container was created in the current ready sandbox, in any state."""
    newest = next(iter(observed.sandboxes), None)
    if newest is None or not newest.ready:
        return False
    ordinary = {container.name for container in pod.spec.containers}
    return any(c.sandbox_id == newest.id and c.name in ordinary for c in observed.containers)


def _initialized(
    inputs: StatusInputs, statuses: dict[str, ContainerStatus], phase: str
) -> tuple[str, str, str]:
    pod = inputs.pod
    unknown = [c.name for c in pod.spec.init_containers if c.name not in statuses]
    incomplete = [
        c.name
        for c in pod.spec.init_containers
        if c.name in statuses
        and not (statuses[c.name].started is True if is_sidecar(c) else statuses[c.name].ready)
    ]
    if phase == "Succeeded" and not unknown:
        return "True", "PodCompleted", ""
    if any(_has_begun(statuses.get(container.name)) for container in pod.spec.containers):
        return "True", "", ""
    problems = [*_names("unknown", unknown), *_names("incomplete", incomplete)]
    before = inputs.stays_initialized and any(
        c.type == "Initialized" and c.status == "True" for c in inputs.previous.conditions
    )
    if not problems or before:
        return "True", "", ""
    return "False", "ContainersNotInitialized", ", ".join(problems)


def _has_begun(status: ContainerStatus | None) -> bool:
    return status is not None and (status.state.running is not None or status.state.terminated is not None)


def _gates_missing(pod: Pod, conditions: Sequence[PodCondition]) -> list[str]:
    found = {condition.type: condition.status for condition in conditions}
    missing = []
    for gate in pod.spec.readiness_gates:
        if gate.condition_type not in found:
            missing.append(
                f'corresponding condition of pod readiness gate "{gate.condition_type}" does not exist.'
            )
        elif found[gate.condition_type] != "True":
            missing.append(
                f'the status of pod readiness gate "{gate.condition_type}" is not "True", '
                f"but {found[gate.condition_type]}"
            )
    return missing


_MESSAGE = "The container could not be located when the pod was terminated"


def final_status(pod: Pod, status: PodStatus) -> PodStatus:
    """Return the final status of a terminated pod; the argument is not modified."""
    ordinary = status.container_statuses
    if _is_initialized(pod, status):
        ordinary = [_terminated(container) for container in ordinary]
    init = status.init_container_statuses
    started = _count_started(init)
    return msgspec.structs.replace(
        status,
        phase=status.phase if status.phase in TERMINAL else "Failed",
        container_statuses=ordinary,
        init_container_statuses=[*map(_terminated, init[:started]), *init[started:]],
    )


def _terminated(status: ContainerStatus) -> ContainerStatus:
    if status.state.terminated is not None:
        return status
    lost = ContainerStateTerminated(
        exit_code=LOST_EXIT_CODE, reason="ContainerStatusUnknown", message=_MESSAGE
    )
    return msgspec.structs.replace(status, state=ContainerState(terminated=lost))


def _is_initialized(pod: Pod, status: PodStatus) -> bool:
    """Return whether the pod ever completed its initialization."""
    if not pod.spec.init_containers or any(map(_container_has_begun, status.container_statuses)):
        return True
    last = next(reversed(status.init_container_statuses), None)
    if last is None or last.name != pod.spec.init_containers[-1].name:
        return False
    if is_sidecar(pod.spec.init_containers[-1]):
        return last.state.running is not None and last.started is True
    ends = (last.state.terminated, last.last_state.terminated)
    return any(end is not None and end.exit_code == 0 for end in ends)


def _container_has_begun(status: ContainerStatus) -> bool:
    return status.state.waiting is None or status.last_state.terminated is not None


def _count_started(statuses: Sequence[ContainerStatus]) -> int:
    """Return the number of init containers up to the last one that started, at least one if there are any."""
    tried = [number for number, status in enumerate(statuses, 1) if _container_has_begun(status)]
    return tried[-1] if tried else min(1, len(statuses))


PREEMPTING = "Preempting"
PREEMPTED = "Preempted in order to admit critical pod"
_REJECTED = "Pod was rejected: "


def rejected_status(pod: Pod, rejection: AdmitRejection, now: datetime) -> PodStatus:
    """Return the status of a pod that was rejected at admission."""
    return PodStatus(
        observed_generation=pod.metadata.generation,
        phase="Failed",
        reason=rejection.reason,
        message=f"{_REJECTED}{rejection.message}",
        qos_class=qos_class(pod),
        start_time=pod.status.start_time or now,
    )


def preempted_status(pod: Pod, status: PodStatus, now: datetime) -> PodStatus:
    """Return the status of a pod that is preempted for a critical one."""
    target = PodCondition(
        type="DisruptionTarget",
        status="True",
        observed_generation=pod.metadata.generation or msgspec.UNSET,
        last_transition_time=now,
        reason="TerminationByKubelet",
        message="Pod was preempted by Kubelet to accommodate a critical pod.",
    )
    return msgspec.structs.replace(
        status,
        phase="Failed",
        reason=PREEMPTING,
        message=PREEMPTED,
        conditions=[*(c for c in status.conditions if c.type != target.type), target],
    )


def was_rejected(status: PodStatus) -> bool:
    """Return whether a status is that of a pod rejected at admission."""
    return status.phase == "Failed" and status.message.startswith(_REJECTED)


Listener = Callable[[Pod, PodStatus, PodStatus | None], None]
"""Callback with a pod, its new status and the previous one."""


class StatusStore:
    """Last statuses by pod uid; listeners are called only for changes."""

    def __init__(self) -> None:
        self._statuses: dict[str, PodStatus] = {}
        self._listeners: list[Listener] = []

    def add_listener(self, listener: Listener) -> None:
        """Add a listener that is called for every changed status; it must not block."""
        self._listeners.append(listener)

    def get(self, uid: str) -> PodStatus | None:
        """Return the last status of a pod, or None."""
        return self._statuses.get(uid)

    def set(self, pod: Pod, status: PodStatus) -> bool:
        """Set a pod's status; return whether it differs from the last one."""
        before = self._statuses.get(pod.uid)
        if before == status:
            return False
        self._statuses[pod.uid] = status
        for listener in self._listeners:
            listener(pod, status, before)
        return True

    def forget(self, uid: str) -> None:
        """Remove the status of a pod."""
        self._statuses.pop(uid, None)
