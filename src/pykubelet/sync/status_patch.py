"""The difference between two statuses of a pod, as a strategic merge patch.

Only what differs is sent: less to write, and nothing of others is overwritten. How the API server
joins a patch with what it has is a matter of each field: conditions are joined by their type and
addresses by themselves, maps by their keys, all other lists are replaced.

Two statuses that say the same have no difference, whatever the order of their conditions and
containers, and when nothing but a moment of transition differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pykubelet.api.meta import to_document
from pykubelet.api.pod_status import AddressStatus, ContainerStatus, PodCondition, PodStatus
from pykubelet.sync.status import OWNED

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
