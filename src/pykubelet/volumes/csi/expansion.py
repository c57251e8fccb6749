"""Node-side expansion of CSI volumes (NodeExpandVolume) while pods use them.

A user raises the storage request of a PVC, a controller enlarges the volume and records in the PVC's status
what it has allocated and what is left to the node; the node calls NodeExpandVolume and sets the PVC's new
capacity. Old controllers record nothing: then the node expands the volume if the driver can.

`CsiPlugin` calls `NodeExpander.expand` at each sync of a pod. The PVC is fetched only if the PersistentVolume
is larger than the last known size, which is kept in memory and starts with the PVC's capacity. A driver that
fails with FailedPrecondition, because the volume is in use, is not called again for this volume while a pod
on this node uses it. `decide` and the functions that build patches are pure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import field

from pykubelet.api.core import ObjectReference
from pykubelet.api.meta import ObjectMeta, ObjectStruct, Resources
from pykubelet.api.quantity import Quantity
from pykubelet.apiserver.client import ApiClient, Resource
from pykubelet.apiserver.errors import KubeError
from pykubelet.logs import get_logger
from pykubelet.objects.fetch import err_text
from pykubelet.pluginmanager.client import PluginError
from pykubelet.volumes.csi.dependencies import CsiDependencies
from pykubelet.volumes.csi.names import EXPAND, STAGE_UNSTAGE
from pykubelet.volumes.csi.volume import CsiVolume
from pykubelet.volumes.errors import VolumePluginError
from pykubelet.volumes.ownership import EventType, RecordObjectEvent

log = get_logger(__name__)
STORAGE = "storage"
NOT_REQUIRED = "volume.kubernetes.io/node-expansion-not-required"
PENDING = "NodeResizePending"
IN_PROGRESS = "NodeResizeInProgress"
INFEASIBLE = "NodeResizeInfeasible"
ERROR = "NodeResizeError"
_RESIZE_CONDITIONS = ("FileSystemResizePending", "Resizing", "ControllerResizeError", ERROR)
_ZERO = Quantity(0, "binary")
Patch = dict[str, Any]


class _Condition(ObjectStruct):
    type: str = ""
    status: str = ""


class _VolumeResourceRequirements(ObjectStruct):
    requests: Resources = {}


class ExpandingClaimSpec(ObjectStruct):
    """PersistentVolumeClaimSpec, reduced to access modes and requested size."""

    access_modes: list[str] = []
    resources: _VolumeResourceRequirements = field(default_factory=_VolumeResourceRequirements)


class ExpandingClaimStatus(ObjectStruct):
    """PersistentVolumeClaimStatus, reduced to the state of the expansion."""

    capacity: Resources = {}
    conditions: list[_Condition] = []
    allocated_resources: Resources = {}
    allocated_resource_statuses: dict[str, str] = {}


class ExpandingClaim(ObjectStruct):
    """PersistentVolumeClaim, reduced to the fields that concern its size."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: ExpandingClaimSpec = field(default_factory=ExpandingClaimSpec)
    status: ExpandingClaimStatus = field(default_factory=ExpandingClaimStatus)


EXPANDING_CLAIMS = Resource(ExpandingClaim, "PersistentVolumeClaim", "persistentvolumeclaims")


@dataclass(frozen=True, slots=True)
class ExpansionPlan:
    """Decision about a volume: expand it to `size`, or do nothing (None)."""

    size: Quantity | None
    complete: bool = False
    """Nothing is left to do until the PersistentVolume grows again."""
    mark: bool = False
    """Set the PVC to NodeResizeInProgress before the call."""
    report: bool = False
    """Set the PVC's new capacity after the call."""
    legacy: bool = False
    """The controller recorded nothing: no failure is recorded, and the driver need not support expansion."""


def decide(claim: ExpandingClaim, volume_size: Quantity) -> ExpansionPlan:
    """Return what to do for a PVC whose PersistentVolume has this size."""
    status = claim.status
    known = status.capacity.get(STORAGE, _ZERO)
    stage = status.allocated_resource_statuses.get(STORAGE, "")
    if not stage and not status.allocated_resources:
        return ExpansionPlan(volume_size, report=known < volume_size, legacy=True)
    size = status.allocated_resources.get(STORAGE, _ZERO)
    updated = known >= size and not stage
    if (
        updated
        and "ReadWriteMany" in claim.spec.access_modes
        and NOT_REQUIRED not in claim.metadata.annotations
    ):
        # Another node has already updated the PVC, but this node uses the volume as well.
        return ExpansionPlan(size)
    if stage in (PENDING, IN_PROGRESS):
        return ExpansionPlan(size, mark=not updated, report=not updated)
    return ExpansionPlan(None, complete=updated)


def in_progress_patch(claim: ExpandingClaim) -> Patch:
    """Return the status patch that marks the expansion as NodeResizeInProgress."""
    return _patch(claim, {"allocatedResourceStatuses": {STORAGE: IN_PROGRESS}}, exact=True)


def finished_patch(claim: ExpandingClaim, size: Quantity) -> Patch:
    """Return the status patch that sets the new capacity and ends the expansion."""
    change: Patch = {"capacity": {STORAGE: str(size)}}
    if claim.status.allocated_resource_statuses:
        change["allocatedResourceStatuses"] = {STORAGE: None}
    present = {condition.type for condition in claim.status.conditions}
    if outdated := [kind for kind in _RESIZE_CONDITIONS if kind in present]:
        change["conditions"] = [{"$patch": "delete", "type": kind} for kind in outdated]
    return _patch(claim, change, exact=True)


def failed_patch(claim: ExpandingClaim, reason: str, now: datetime, *, infeasible: bool) -> Patch:
    """Return the status patch that records a failed expansion, as NodeResizeInfeasible if `infeasible`.

    A condition that is already set stays, with its first reason and time; the patch is empty if nothing
    changes.
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


def _patch(claim: ExpandingClaim, status: Patch, *, exact: bool) -> Patch:
    """Return the patch; an `exact` one applies only to the resource version that was read."""
    meta = {"resourceVersion": claim.metadata.resource_version, "uid": claim.metadata.uid}
    return {"metadata": meta, "status": status} if exact else {"status": status}


SUCCESS = "FileSystemResizeSuccessful"
FAILURE = "FileSystemResizeFailed"
RESIZE_FAILED = "VolumeResizeFailed"
_INFEASIBLE = frozenset(("InvalidArgument", "OutOfRange", "NotFound"))


class ExpansionError(VolumePluginError):
    """Raised when a volume cannot be expanded to its desired size."""

    action = "MountVolume.Setup failed while expanding volume"


class NodeExpander:
    """Node-side volume expander; `clock` returns Unix time in seconds."""

    def __init__(
        self,
        deps: CsiDependencies,
        api: ApiClient | None,
        record_event: RecordObjectEvent,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._deps = deps
        self._api = api
        self._record_event = record_event
        self._clock = clock
        self._sizes: dict[str, Quantity] = {}
        self._in_use: set[str] = set()
        self._failed: set[str] = set()

    async def expand(self, volume: CsiVolume, path: Path, *, mounting: bool) -> None:
        """Expand a volume, published at `path`, to the capacity of its PersistentVolume.

        With `mounting`, the pod has not started and must not start after a failure: raises
        VolumePluginError. Otherwise a failure becomes an event.
        """
        size = self._desired_size(volume)
        if self._api is None or size is None or volume.unique_name in self._in_use:
            return
        try:
            async with self._deps.locks(volume.unique_name):
                await self._expand_claim(self._api, volume, path, size)
        except VolumePluginError as err:
            if mounting:
                raise
            message = (
                f'NodeExpandVolume.NodeExpandVolume failed for volume "{volume.volume_to_mount.name}" : {err}'
            )
            self._deps.record_event(volume.volume_to_mount.pod, "Warning", RESIZE_FAILED, message)

    def retain(self, names: Collection[str]) -> None:
        """Forget all volumes but these, by their unique names."""
        self._sizes = {name: size for name, size in self._sizes.items() if name in names}
        self._in_use.intersection_update(names)
        self._failed.intersection_update(names)

    def _desired_size(self, volume: CsiVolume) -> Quantity | None:
        """Return the size that a volume should have, or None if it is not known to be smaller."""
        volume_to_mount = volume.volume_to_mount
        if volume_to_mount.persistent is None or volume_to_mount.claim is None:
            return None
        size = volume_to_mount.persistent.spec.capacity.get(STORAGE)
        claimed = volume_to_mount.claim.status.capacity.get(STORAGE)
        if size is None or claimed is None:
            return None
        known = self._sizes.setdefault(volume.unique_name, claimed)
        return size if size > known else None

    async def _expand_claim(self, api: ApiClient, volume: CsiVolume, path: Path, size: Quantity) -> None:
        meta = volume.volume_to_mount.claim.metadata if volume.volume_to_mount.claim is not None else None
        assert meta is not None
        try:
            claim = await api.get(EXPANDING_CLAIMS, meta.name, meta.namespace)
        except KubeError as err:
            raise ExpansionError(f"mountVolume.NodeExpandVolume get PVC failed : {err_text(err)}") from err
        if volume.read_only:
            self._record_pod_and_claim_event(
                volume, claim, "Warning", FAILURE, "failed", "requested read-only file system"
            )
            self._sizes[volume.unique_name] = size
            return
        plan = decide(claim, size)
        if plan.size is None:
            if plan.complete:
                self._sizes[volume.unique_name] = size
            return
        if plan.mark:
            claim = await self._patch_status(api, claim, in_progress_patch(claim))
        if await self._call_driver(api, volume, path, claim, plan, plan.size):
            self._record_pod_and_claim_event(
                volume, claim, "Normal", SUCCESS, "succeeded", self._deps.node_name
            )
            if plan.report:
                await self._patch_status(api, claim, finished_patch(claim, plan.size))
            self._sizes[volume.unique_name] = size
            self._failed.discard(volume.unique_name)

    async def _call_driver(
        self,
        api: ApiClient,
        volume: CsiVolume,
        path: Path,
        claim: ExpandingClaim,
        plan: ExpansionPlan,
        size: Quantity,
    ) -> bool:
        """Call NodeExpandVolume and return whether the volume was expanded.

        Raises VolumePluginError if the call should be retried.
        """
        client = self._deps.drivers.client_for_pod(volume.driver, volume.volume_to_mount.uid)
        try:
            capabilities = await client.capabilities()
            if EXPAND not in capabilities:
                if plan.legacy or not plan.mark:
                    self._sizes[volume.unique_name] = size
                    return False
                raise ExpansionError(f"NodeExpand is not supported by the CSI driver {volume.driver}")
            secrets = await self._deps.request_context.for_expanding(volume)
            staged = (
                self._staged(volume) if STAGE_UNSTAGE in capabilities or volume.volume_to_mount.block else ""
            )
            await client.expand(volume.handle, str(path), staged, volume.capability(), secrets, int(size))
        except PluginError as err:
            reason = f"Expander.NodeExpand failed to expand the volume : {err}"
            if err.is_final and not plan.legacy:
                await self._record_failure(api, volume, claim, err, reason)
            if err.code == "FailedPrecondition":
                log.error(err, "Failed to expand volume in use, not retrying", volumeName=volume.unique_name)
                self._in_use.add(volume.unique_name)
                return False
            raise ExpansionError(reason) from err
        return True

    def _staged(self, volume: CsiVolume) -> str:
        if volume.volume_to_mount.block:
            return str(self._deps.paths.device(volume.volume_to_mount.name).staging)
        return str(self._deps.paths.staged(volume.driver, volume.handle))

    async def _record_failure(
        self, api: ApiClient, volume: CsiVolume, claim: ExpandingClaim, err: PluginError, reason: str
    ) -> None:
        """Record a failure in the PVC's status, and log if that fails.

        If the requested size has changed since, a repeated failure is infeasible: the controller takes over.
        """
        changed = claim.spec.resources.requests.get(STORAGE) != claim.status.allocated_resources.get(STORAGE)
        infeasible = err.code in _INFEASIBLE or (changed and volume.unique_name in self._failed)
        self._failed.add(volume.unique_name)
        now = datetime.fromtimestamp(self._clock(), UTC)
        if not (patch := failed_patch(claim, reason, now, infeasible=infeasible)):
            return
        try:
            await self._patch_status(api, claim, patch)
        except VolumePluginError as problem:
            log.error(problem, "Failed to mark node expansion as failed", volumeName=volume.unique_name)

    async def _patch_status(self, api: ApiClient, claim: ExpandingClaim, patch: Patch) -> ExpandingClaim:
        meta = claim.metadata
        try:
            return await api.patch(EXPANDING_CLAIMS, meta.name, patch, meta.namespace, subresource="status")
        except KubeError as err:
            raise ExpansionError(
                f'patchPVCStatus failed to patch PVC "{meta.name}": {err_text(err)}'
            ) from err

    def _record_pod_and_claim_event(
        self,
        volume: CsiVolume,
        claim: ExpandingClaim,
        kind: EventType,
        reason: str,
        outcome: str,
        detail: str,
    ) -> None:
        """Record the same event about the pod and the PVC."""
        message = (
            f'MountVolume.NodeExpandVolume {outcome} for volume "{volume.volume_to_mount.name}" {detail}'
        )
        self._deps.record_event(volume.volume_to_mount.pod, kind, reason, message)
        reference = ObjectReference(
            kind="PersistentVolumeClaim",
            api_version="v1",
            namespace=claim.metadata.namespace,
            name=claim.metadata.name,
            uid=claim.metadata.uid,
            resource_version=claim.metadata.resource_version,
        )
        self._record_event(reference, kind, reason, message)
