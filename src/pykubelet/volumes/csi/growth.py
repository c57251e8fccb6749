"""What to do about a volume that has become larger than its claim says: pure.

Somebody asks for more in the claim, a controller enlarges the volume and writes down what it has
allocated and what is left to do, and the node does that and sets the claim's new capacity. Controllers of
old write nothing down: then the node does what it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct, Resources
from pykubelet.api.quantity import Quantity
from pykubelet.kube.resources import Resource

STORAGE = "storage"
NOT_REQUIRED = "volume.kubernetes.io/node-expansion-not-required"
PENDING = "NodeResizePending"
IN_PROGRESS = "NodeResizeInProgress"
INFEASIBLE = "NodeResizeInfeasible"
ERROR = "NodeResizeError"
_RESIZE_CONDITIONS = ("FileSystemResizePending", "Resizing", "ControllerResizeError", ERROR)
_NOTHING = Quantity(0, "binary")

Patch = dict[str, Any]


class _Condition(ObjectStruct):
    type: str = ""
    status: str = ""


class _Wishes(ObjectStruct):
    requests: Resources = {}


class GrowingSpec(ObjectStruct):
    """What a claim asks for."""

    access_modes: list[str] = []
    resources: _Wishes = field(default_factory=_Wishes)


class GrowingStatus(ObjectStruct):
    """How far a claim's growth is."""

    capacity: Resources = {}
    conditions: list[_Condition] = []
    allocated_resources: Resources = {}
    allocated_resource_statuses: dict[str, str] = {}


class GrowingClaim(ObjectStruct):
    """A claim, as far as its size is concerned."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: GrowingSpec = field(default_factory=GrowingSpec)
    status: GrowingStatus = field(default_factory=GrowingStatus)


GROWING_CLAIMS = Resource(GrowingClaim, "PersistentVolumeClaim", "persistentvolumeclaims")


@dataclass(frozen=True, slots=True)
class Growth:
    """What to do: let the volume have `size`, or nothing (None)."""

    size: Quantity | None
    settled: bool = False
    """Nothing is left to do, now or later, until the volume grows again."""
    mark: bool = False
    """The claim shall say that it is in progress."""
    report: bool = False
    """The claim shall have the new capacity afterwards."""
    legacy: bool = False
    """Nobody wrote down what to do: a driver that cannot do it need not."""


def decide(claim: GrowingClaim, volume_size: Quantity) -> Growth:
    """Say what to do about a volume of this size."""
    status = claim.status
    known = status.capacity.get(STORAGE, _NOTHING)
    stage = status.allocated_resource_statuses.get(STORAGE, "")
    if not stage and not status.allocated_resources:
        return Growth(volume_size, report=known < volume_size, legacy=True)
    size = status.allocated_resources.get(STORAGE, _NOTHING)
    updated = known >= size and not stage
    if (
        updated
        and "ReadWriteMany" in claim.spec.access_modes
        and NOT_REQUIRED not in claim.metadata.annotations
    ):
        # Another node was first, and this one has the volume too.
        return Growth(size)
    if stage in (PENDING, IN_PROGRESS):
        return Growth(size, mark=not updated, report=not updated)
    return Growth(None, settled=updated)


def marked(claim: GrowingClaim) -> Patch:
    """Give the patch by which a claim says that its node is at it."""
    return _patch(claim, {"allocatedResourceStatuses": {STORAGE: IN_PROGRESS}}, exact=True)


def finished(claim: GrowingClaim, size: Quantity) -> Patch:
    """Give the patch by which a claim has its new capacity, and nothing is left to do."""
    change: Patch = {"capacity": {STORAGE: str(size)}}
    if claim.status.allocated_resource_statuses:
        change["allocatedResourceStatuses"] = {STORAGE: None}
    present = {condition.type for condition in claim.status.conditions}
    if gone := [kind for kind in _RESIZE_CONDITIONS if kind in present]:
        change["conditions"] = [{"$patch": "delete", "type": kind} for kind in gone]
    return _patch(claim, change, exact=True)


def failed(claim: GrowingClaim, reason: str, now: datetime, *, infeasible: bool) -> Patch:
    """Give the patch by which a claim says why it does not grow; `infeasible`: and never will like this.

    Empty when it has said so before: the first reason stays, with its time.
    """
    change: Patch = {}
    if not any(known.type == ERROR and known.status == "True" for known in claim.status.conditions):
        condition = {
            "type": ERROR,
            "status": "True",
            "lastTransitionTime": now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "message": f"failed to expand pvc with {reason}",
        }
        change["conditions"] = [condition]
    if infeasible:
        change["allocatedResourceStatuses"] = {STORAGE: INFEASIBLE}
    return _patch(claim, change, exact=False) if change else {}


def _patch(claim: GrowingClaim, status: Patch, *, exact: bool) -> Patch:
    """Put a patch together; an exact one is for the very version that was read."""
    meta = {"resourceVersion": claim.metadata.resource_version, "uid": claim.metadata.uid}
    return {"metadata": meta, "status": status} if exact else {"status": status}
