"""Objects of resource.k8s.io: claims for devices, and the devices that drivers offer on a node."""

from __future__ import annotations

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct, PartialObjectMeta


class DeviceResult(ObjectStruct):
    """A device that a claim was given; `request` may name a part of a request, as `gpu/small`."""

    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""
    admin_access: bool | None = None
    share_id: str | None = None


class DeviceResults(ObjectStruct):
    """All devices that a claim was given."""

    results: list[DeviceResult] = []


class Allocation(ObjectStruct):
    """What the scheduler gave to a claim."""

    devices: DeviceResults = field(default_factory=DeviceResults)


class Consumer(ObjectStruct):
    """Somebody who may use a claim now."""

    resource: str = ""
    name: str = ""
    uid: str = ""


class ResourceClaimStatus(ObjectStruct):
    """How far a claim is."""

    allocation: Allocation | None = None
    reserved_for: list[Consumer] = []


class ResourceClaim(ObjectStruct):
    """Somebody's wish for devices, and what came of it."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    status: ResourceClaimStatus = field(default_factory=ResourceClaimStatus)


class ResourceSlice(ObjectStruct):
    """Devices that a driver offers; the node only ever deletes these."""

    metadata: PartialObjectMeta = field(default_factory=PartialObjectMeta)
