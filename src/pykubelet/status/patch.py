"""The difference between two statuses of a pod, as a strategic merge patch.

Only what differs is sent: less to write, and nothing of others is overwritten. How the API server
joins a patch with what it has is a matter of each field: conditions are joined by their type and
addresses by themselves, maps by their keys, all other lists are replaced.

Two statuses that say the same have no difference, whatever the order of their conditions and
containers, and when nothing but a moment of transition differs.

What a pod's status in the API server shall become: the node's word, joined with that of others.

The node owns most of a pod's status, but not all of it: conditions of controllers and readiness
gates stay theirs. And whatever the node says, some things never go back: a pod that has ended, a
container that has ended for good, a count of restarts, the time of the start. A pod is not said to
have ended while something of it may still run, because others then use what it held.

Pure: from two statuses and a few facts to a third, and neither of the two is written to.
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
from pykubelet.status.compute import OWNED, SHARED, TERMINAL

Patch = dict[str, Any]
_CONTAINERS = ("container_statuses", "init_container_statuses", "ephemeral_container_statuses")
_ADDRESSES = ("host_ips", "pod_ips")
_ACKNOWLEDGING = {"observedGeneration", "conditions", "$setElementOrder/conditions", "resources"}
_OF_OTHERS = ("resource_claim_statuses", "extended_resource_claim_status")
"""What only the scheduler and controllers write: a node that knows an old version must not undo theirs."""
_FIELDS = {
    field.name: field.encode_name
    for field in msgspec.structs.fields(PodStatus)
    if field.name not in _OF_OTHERS
}


def status_patch(before: PodStatus, after: PodStatus) -> Patch:
    """Give what makes `after` of `before`; empty when they say the same."""
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
    """Whether a patch tells nothing but that the pod's newest version was seen."""
    if not patch.keys() <= _ACKNOWLEDGING:
        return False
    old = {condition.type: to_document(condition) for condition in before.conditions}
    return all(
        "$patch" not in new and new["type"] in old and _without_time(old[new["type"]]) == _without_time(new)
        for new in patch.get("conditions", ())
    )


def _conditions(before: Sequence[PodCondition], after: Sequence[PodCondition]) -> Patch:
    """Give the conditions that differ, each whole, and those that are to go."""
    old = {condition.type: condition for condition in before}
    changed: list[Patch] = [
        _replaced(old.get(condition.type), condition)
        for condition in after
        if _said(old.get(condition.type)) != _said(condition)
    ]
    kept = {condition.type for condition in after}
    changed += [{"$patch": "delete", "type": kind} for kind in old if kind in OWNED and kind not in kept]
    if not changed:
        return {}
    order = [{"type": condition.type} for condition in after]
    return {"conditions": changed, "$setElementOrder/conditions": order}


def _said(condition: PodCondition | None) -> tuple[object, ...] | None:
    """What a condition says, apart from when it came to be."""
    if condition is None:
        return None
    return condition.status, condition.reason, condition.message, condition.observed_generation


def _without_time(condition: Patch) -> tuple[object, ...]:
    return tuple(condition.get(name) or "" for name in ("status", "reason", "message"))


def _replaced(before: PodCondition | None, after: PodCondition) -> Patch:
    """Give a condition so that nothing of the old one shines through."""
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
    """Give the difference of two maps; what is gone is null."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    gone: Patch = dict.fromkeys(before.keys() - after.keys())
    return gone | {
        key: _changes(before.get(key), value)
        for key, value in after.items()
        if key not in before or before[key] != value
    }


MESSAGE_BYTES = 12 * 1024
"""How much all of a pod's containers together may say about their ends."""


def merged_status(pod: Pod, theirs: PodStatus, ours: PodStatus, *, may_run: bool, now: datetime) -> PodStatus:
    """Give the status that the API server, which has `theirs`, shall have after `ours`.

    `may_run` says that something of the pod could still run.
    """
    ending = theirs.phase not in TERMINAL and ours.phase in TERMINAL
    phase = theirs if theirs.phase in TERMINAL or (ending and may_run) else ours
    spec, room = pod.spec, _room(pod)
    merged = msgspec.structs.replace(
        ours,
        phase=phase.phase,
        reason=phase.reason,
        message=phase.message,
        observed_generation=max(theirs.observed_generation, ours.observed_generation),
        start_time=_whole(theirs.start_time or ours.start_time),
        nominated_node_name=theirs.nominated_node_name,
        resize=theirs.resize,
        resources=ours.resources if ours.resources is not None else theirs.resources,
        conditions=_merged_conditions(theirs, ours, shared=ending and not may_run),
        container_statuses=_merged_containers(
            pod, spec.containers, theirs.container_statuses, ours.container_statuses, room
        ),
        init_container_statuses=_merged_containers(
            pod, spec.init_containers, theirs.init_container_statuses, ours.init_container_statuses, room
        ),
        ephemeral_container_statuses=[_bounded(status, room) for status in ours.ephemeral_container_statuses],
    )
    if merged.phase in TERMINAL:
        merged.conditions = _not_ready(merged, now)
    return merged


def _merged_conditions(theirs: PodStatus, ours: PodStatus, *, shared: bool) -> list[PodCondition]:
    """Put the foreign ones as they are in the API server before the node's own."""
    foreign = {c.type: c for c in theirs.conditions if c.type not in OWNED}
    if shared:
        foreign |= {c.type: c for c in ours.conditions if c.type in SHARED and c.type not in foreign}
    own = [
        msgspec.structs.replace(c, last_transition_time=_whole(c.last_transition_time))
        for c in ours.conditions
        if c.type in OWNED
    ]
    return [*foreign.values(), *own]


def _not_ready(status: PodStatus, now: datetime) -> list[PodCondition]:
    """Give the conditions of a pod that has ended: whoever ended it, it is not ready."""
    reason = "PodFailed" if status.phase == "Failed" else "PodCompleted"

    def settled(condition: PodCondition) -> PodCondition:
        if condition.type not in ("Ready", "ContainersReady") or condition.status != "True":
            return condition
        return msgspec.structs.replace(
            condition, status="False", reason=reason, message=msgspec.UNSET, last_transition_time=now
        )

    return [settled(condition) for condition in status.conditions]


def _merged_containers(
    pod: Pod,
    specs: Sequence[Container],
    theirs: Iterable[ContainerStatus],
    ours: Iterable[ContainerStatus],
    room: int,
) -> list[ContainerStatus]:
    before = {status.name: status for status in theirs}
    by_name = {container.name: container for container in specs}

    def forward(status: ContainerStatus) -> ContainerStatus:
        old, container = before.get(status.name), by_name.get(status.name)
        if old is None or container is None:
            return status
        ended = old.state.terminated
        back = ended is not None and status.state.terminated is None
        if (
            back
            and ended is not None
            and not restarts_after_exit(pod, container, ended.exit_code)
            # What has ended for good may run again with all the others.
            and not may_restart_all(pod.spec)
        ):
            return old
        if old.restart_count > status.restart_count:
            return msgspec.structs.replace(status, restart_count=old.restart_count)
        return status

    return [_bounded(forward(status), room) for status in ours]


def _room(pod: Pod) -> int:
    """Bytes that each container's last words may take."""
    spec = pod.spec
    count = len(spec.containers) + len(spec.init_containers) + len(spec.ephemeral_containers)
    return MESSAGE_BYTES // max(1, count)


def _bounded(status: ContainerStatus, room: int) -> ContainerStatus:
    state, last_state = _short(status.state, room), _short(status.last_state, room)
    if state is status.state and last_state is status.last_state:
        return status
    return msgspec.structs.replace(status, state=state, last_state=last_state)


def _short(state: ContainerState, room: int) -> ContainerState:
    ended = state.terminated
    # No character takes more than four bytes, so a short text need not be measured.
    if ended is None or ended.message is msgspec.UNSET or len(ended.message) * 4 <= room:
        return state
    written = ended.message.encode()
    if len(written) <= room:
        return state
    message = written[:room].decode(errors="ignore")
    return msgspec.structs.replace(state, terminated=msgspec.structs.replace(ended, message=message))


def _whole(moment: datetime | None) -> datetime | None:
    """Give a time as the API keeps it, in whole seconds."""
    return moment.replace(microsecond=0) if moment is not None and moment.microsecond else moment
