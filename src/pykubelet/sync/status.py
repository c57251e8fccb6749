"""A pod's status document, computed purely from its spec, the runtime's picture and the probes.

One call gives the whole document; whoever publishes it compares it with the last one and sends
only what changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from pykubelet.api.ip import by_family
from pykubelet.api.pod import Pod, is_sidecar
from pykubelet.api.pod_status import (
    AddressStatus,
    ContainerStatus,
    PodCondition,
    PodStatus,
    StatusResources,
)
from pykubelet.pods.static import is_static_pod
from pykubelet.resources.qos import pod_limits, pod_requests, qos_class
from pykubelet.runtime.actions import sandbox_is_stale
from pykubelet.runtime.observed import ObservedPod
from pykubelet.sync.resize_rules import IN_PROGRESS, PENDING
from pykubelet.sync.status_containers import PodView, container_statuses
from pykubelet.sync.status_phase import TERMINAL, phase_of
from pykubelet.sync.status_restart import KIND, restart_condition

OWNED = (
    PENDING,
    IN_PROGRESS,
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    "PodScheduled",
    KIND,
)
"""Conditions that only the agent writes; all others are kept as they are."""
SHARED = ("DisruptionTarget",)
"""Conditions that the node and others write: the node's only when the pod ends by it."""


def compute_status(view: PodView, now: datetime) -> PodStatus:
    """Give the pod's status as of `now`."""
    pod, observed, previous = view.pod, view.observed, view.previous
    ordinary = container_statuses(view, "ordinary")
    init = container_statuses(view, "init")
    by_name = {status.name: status for status in [*ordinary, *init]}
    initialized = _got_through(pod, observed)
    phase = phase_of(pod, by_name, terminal=view.terminal, initialized=initialized, static=is_static_pod(pod))
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
        ephemeral_container_statuses=container_statuses(view, "ephemeral"),
        allocated_resources=requests,
        resources=view.in_force or StatusResources(limits=pod_limits(pod), requests=requests),
        resource_claim_statuses=pod.status.resource_claim_statuses,
        extended_resource_claim_status=pod.status.extended_resource_claim_status,
    )
    if phase == previous.phase:
        status.reason = previous.reason or pod.status.reason
        status.message = previous.message or pod.status.message
    _set_addresses(status, view)
    status.conditions = _conditions(view, by_name, phase, now)
    return status


def says_more(before: Pod, after: Pod) -> bool:
    """Whether others have written something into a pod's status that the node must act on."""
    if after.status.phase in TERMINAL and before.status.phase not in TERMINAL:
        return True
    gates = {gate.condition_type for gate in after.spec.readiness_gates}
    return bool(gates) and _verdicts(before, gates) != _verdicts(after, gates)


def _verdicts(pod: Pod, gates: set[str]) -> dict[str, str]:
    return {c.type: c.status for c in pod.status.conditions if c.type in gates}


def _set_addresses(status: PodStatus, view: PodView) -> None:
    hosts = list(view.host_ips) or [address.ip for address in view.previous.host_ips]
    own = hosts if view.pod.spec.host_network else by_family(view.observed.ips, hosts[0] if hosts else "")
    ips = own or [address.ip for address in view.previous.pod_ips]
    status.host_ips = [AddressStatus(ip=ip) for ip in hosts]
    status.pod_ips = [AddressStatus(ip=ip) for ip in ips]
    status.host_ip = hosts[0] if hosts else ""
    status.pod_ip = ips[0] if ips else ""


def _conditions(
    view: PodView, statuses: dict[str, ContainerStatus], phase: str, now: datetime
) -> list[PodCondition]:
    pod = view.pod
    foreign = [condition for condition in pod.status.conditions if condition.type not in OWNED]
    known = {condition.type for condition in foreign}
    foreign += [c for c in view.previous.conditions if c.type in SHARED and c.type not in known]
    containers = _containers_ready(pod, statuses, phase)
    ready = containers
    if containers[0] == "True" and (missing := _gates_missing(pod, foreign)):
        ready = ("False", "ReadinessGatesNotReady", ", ".join(missing))
    owned = {
        "PodReadyToStartContainers": ("False" if sandbox_is_stale(pod, view.observed) else "True", "", ""),
        "Initialized": _initialized(view, statuses, phase),
        "Ready": ready,
        "ContainersReady": containers,
        "PodScheduled": ("True", "", ""),
    }
    resizes = () if view.terminal else view.resizes
    restart = restart_condition(pod, view.observed, view.previous, phase, terminal=view.terminal, now=now)
    usual = (_condition(view, kind, *facts, now=now) for kind, facts in owned.items())
    return [*foreign, *resizes, *usual, *restart]


def _condition(
    view: PodView, kind: str, status: str, reason: str, message: str, *, now: datetime
) -> PodCondition:
    before = next((condition for condition in view.previous.conditions if condition.type == kind), None)
    unchanged = before is not None and before.status == status
    return PodCondition(
        type=kind,
        status=status,
        observed_generation=view.pod.metadata.generation or msgspec.UNSET,
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


def _got_through(pod: Pod, observed: ObservedPod) -> bool:
    """Whether the present sandbox got as far as an ordinary container, whatever became of that."""
    newest = next(iter(observed.sandboxes), None)
    if newest is None or not newest.ready:
        return False
    ordinary = {container.name for container in pod.spec.containers}
    return any(c.sandbox_id == newest.id and c.name in ordinary for c in observed.containers)


def _initialized(view: PodView, statuses: dict[str, ContainerStatus], phase: str) -> tuple[str, str, str]:
    pod = view.pod
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
    before = view.stays_initialized and any(
        c.type == "Initialized" and c.status == "True" for c in view.previous.conditions
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
