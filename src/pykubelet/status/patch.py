"""Merge of the kubelet's pod status with the API server's, and the strategic merge patch of two statuses.

Merge: the kubelet owns most of a pod's status, but conditions of controllers and readiness gates belong to
their writers. Some fields never go back: a terminal phase, a container that terminated for good, restart
counts, the start time. A terminal phase is not reported while a container may still run, because other
components then reuse the pod's resources.

Patch: only differences are sent, so that nothing of other writers is overwritten. The API server merges
conditions by type, addresses by value and maps by key; all other lists are replaced. Statuses that differ
only in the order of their conditions and containers, or only in transition times, have an empty patch.

All functions are pure and do not modify their arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from pykubelet.api.meta import to_document
from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import AddressStatus, ContainerState, ContainerStatus, PodCondition, PodStatus
from pykubelet.kuberuntime.decide import may_restart_all, restarts_after_exit
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.status.compute import OWNED, SHARED, TERMINAL

Patch = dict[str, Any]
_CONTAINERS = ("container_statuses", "init_container_statuses", "ephemeral_container_statuses")
_ADDRESSES = ("host_ips", "pod_ips")
_ACKNOWLEDGING = {"observedGeneration", "conditions", "$setElementOrder/conditions", "resources"}
_FOREIGN_FIELDS = (
    "resource_claim_statuses",
    "extended_resource_claim_status",
    "node_allocatable_resource_claim_statuses",
)
"""Fields that only the scheduler and controllers write: a kubelet with an old version must not undo them."""
_FIELDS = {
    field.name: field.encode_name
    for field in msgspec.structs.fields(PodStatus)
    if field.name not in _FOREIGN_FIELDS
}


def status_patch(before: PodStatus, after: PodStatus) -> Patch:
    """Return the patch from `before` to `after`; empty if they are equivalent."""
    if before == after:
        return {}
    patch: Patch = {}
    for name, wire in _FIELDS.items():
        old, new = getattr(before, name), getattr(after, name)
        if old == new:
            continue
        if name == "conditions":
            patch |= _conditions(old, new)
        elif name in _CONTAINERS:
            patch |= _containers(wire, old, new)
        elif name in _ADDRESSES:
            patch |= _addresses(wire, old, new)
        elif name == "start_time" or isinstance(new, str | int):
            patch[wire] = to_document(new) if new else None
        else:
            patch[wire] = _changes(to_document(old), to_document(new))
    return patch


def only_acknowledges(before: PodStatus, patch: Patch) -> bool:
    """Return whether a patch only acknowledges a new generation: no condition changes more than its times."""
    if not patch.keys() <= _ACKNOWLEDGING:
        return False
    old = {condition.type: to_document(condition) for condition in before.conditions}
    return all(
        "$patch" not in new and new["type"] in old and _without_time(old[new["type"]]) == _without_time(new)
        for new in patch.get("conditions", ())
    )


def _conditions(before: Sequence[PodCondition], after: Sequence[PodCondition]) -> Patch:
    """Return the patch of the changed conditions, each complete, and of the owned ones to delete."""
    old = {condition.type: condition for condition in before}
    changed: list[Patch] = [
        _replaced(old.get(condition.type), condition)
        for condition in after
        if _content(old.get(condition.type)) != _content(condition)
    ]
    current_types = {condition.type for condition in after}
    changed += [
        {"$patch": "delete", "type": kind} for kind in old if kind in OWNED and kind not in current_types
    ]
    if not changed:
        return {}
    order = [{"type": condition.type} for condition in after]
    return {"conditions": changed, "$setElementOrder/conditions": order}


def _content(condition: PodCondition | None) -> tuple[object, ...] | None:
    """Return the contents of a condition without its transition time."""
    if condition is None:
        return None
    return condition.status, condition.reason, condition.message, condition.observed_generation


def _without_time(condition: Patch) -> tuple[object, ...]:
    return tuple(condition.get(name) or "" for name in ("status", "reason", "message"))


def _replaced(before: PodCondition | None, after: PodCondition) -> Patch:
    """Return a condition with null for each field that only the old one has."""
    new: Patch = to_document(after)
    old: Patch = to_document(before) if before is not None else {}
    return {**dict.fromkeys(old.keys() - new.keys()), **new}


def _containers(wire: str, before: Sequence[ContainerStatus], after: Sequence[ContainerStatus]) -> Patch:
    if {status.name: status for status in before} == {status.name: status for status in after}:
        return {}
    return {wire: to_document(after) if after else None}


def _addresses(wire: str, before: Sequence[AddressStatus], after: Sequence[AddressStatus]) -> Patch:
    if not after:
        return {wire: None}
    replace = [{"$patch": "replace"}] if before else []
    return {wire: [*replace, *to_document(after)]}


def _changes(before: Any, after: Any) -> Any:
    """Return the difference of two maps; removed keys are null."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    removed: Patch = dict.fromkeys(before.keys() - after.keys())
    return removed | {
        key: _changes(before.get(key), value)
        for key, value in after.items()
        if key not in before or before[key] != value
    }


MESSAGE_BYTES = 12 * 1024
"""Maximum bytes of termination messages of all containers of a pod together."""


def merged_status(pod: Pod, theirs: PodStatus, ours: PodStatus, *, may_run: bool, now: datetime) -> PodStatus:
    """Return the status to report, given the API server's `theirs` and the kubelet's `ours`.

    `may_run` is whether a container of the pod may still run.
    """
    ending = theirs.phase not in TERMINAL and ours.phase in TERMINAL
    # A static pod that a node shutdown has terminated runs again after the boot.
    has_ended = theirs.phase in TERMINAL and not is_static_pod(pod)
    phase = theirs if has_ended or (ending and may_run) else ours
    spec, limit = pod.spec, _message_limit(pod)
    merged = msgspec.structs.replace(
        ours,
        phase=phase.phase,
        reason=phase.reason,
        message=phase.message,
        observed_generation=max(theirs.observed_generation, ours.observed_generation),
        start_time=_truncated(theirs.start_time or ours.start_time),
        nominated_node_name=theirs.nominated_node_name,
        resize=theirs.resize,
        resources=ours.resources if ours.resources is not None else theirs.resources,
        conditions=_merged_conditions(theirs, ours, shared=ending and not may_run),
        container_statuses=_merged_containers(
            pod, spec.containers, theirs.container_statuses, ours.container_statuses, limit
        ),
        init_container_statuses=_merged_containers(
            pod, spec.init_containers, theirs.init_container_statuses, ours.init_container_statuses, limit
        ),
        ephemeral_container_statuses=[
            _bounded(status, limit) for status in ours.ephemeral_container_statuses
        ],
    )
    if merged.phase in TERMINAL:
        merged.conditions = _not_ready(merged, now)
    return merged


def _merged_conditions(theirs: PodStatus, ours: PodStatus, *, shared: bool) -> list[PodCondition]:
    """Return the API server's conditions of other writers, followed by the kubelet's own."""
    foreign = {c.type: c for c in theirs.conditions if c.type not in OWNED}
    if shared:
        foreign |= {c.type: c for c in ours.conditions if c.type in SHARED and c.type not in foreign}
    own = [
        msgspec.structs.replace(c, last_transition_time=_truncated(c.last_transition_time))
        for c in ours.conditions
        if c.type in OWNED
    ]
    return [*foreign.values(), *own]


def _not_ready(status: PodStatus, now: datetime) -> list[PodCondition]:
    """Return the conditions of a terminal pod, with Ready and ContainersReady set to False."""
    reason = "PodFailed" if status.phase == "Failed" else "PodCompleted"

    def not_ready(condition: PodCondition) -> PodCondition:
        if condition.type not in ("Ready", "ContainersReady") or condition.status != "True":
            return condition
        return msgspec.structs.replace(
            condition, status="False", reason=reason, message=msgspec.UNSET, last_transition_time=now
        )

    return [not_ready(condition) for condition in status.conditions]


def _merged_containers(
    pod: Pod,
    specs: Sequence[Container],
    theirs: Iterable[ContainerStatus],
    ours: Iterable[ContainerStatus],
    limit: int,
) -> list[ContainerStatus]:
    before = {status.name: status for status in theirs}
    by_name = {container.name: container for container in specs}

    def merged(status: ContainerStatus) -> ContainerStatus:
        old, container = before.get(status.name), by_name.get(status.name)
        if old is None or container is None:
            return status
        ended = old.state.terminated
        restarted = ended is not None and status.state.terminated is None
        if (
            restarted
            and ended is not None
            and not restarts_after_exit(pod, container, ended.exit_code)
            # RestartAllContainers can run it again in spite of its restart policy.
            and not may_restart_all(pod.spec)
        ):
            return old
        if old.restart_count > status.restart_count:
            return msgspec.structs.replace(status, restart_count=old.restart_count)
        return status

    return [_bounded(merged(status), limit) for status in ours]


def _message_limit(pod: Pod) -> int:
    """Return the maximum bytes of each container's termination message."""
    spec = pod.spec
    count = len(spec.containers) + len(spec.init_containers) + len(spec.ephemeral_containers)
    return MESSAGE_BYTES // max(1, count)


def _bounded(status: ContainerStatus, limit: int) -> ContainerStatus:
    state, last_state = _short(status.state, limit), _short(status.last_state, limit)
    if state is status.state and last_state is status.last_state:
        return status
    return msgspec.structs.replace(status, state=state, last_state=last_state)


def _short(state: ContainerState, limit: int) -> ContainerState:
    ended = state.terminated
    # A character takes at most four bytes, so a short text need not be encoded.
    if ended is None or ended.message is msgspec.UNSET or len(ended.message) * 4 <= limit:
        return state
    encoded = ended.message.encode()
    if len(encoded) <= limit:
        return state
    message = encoded[:limit].decode(errors="ignore")
    return msgspec.structs.replace(state, terminated=msgspec.structs.replace(ended, message=message))


def _truncated(time: datetime | None) -> datetime | None:
    """Return a time in whole seconds, the API's resolution."""
    return time.replace(microsecond=0) if time is not None and time.microsecond else time
