"""Objects of resource.k8s.io: ResourceClaims, and ResourceSlices of the drivers on a node."""

from __future__ import annotations

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct, PartialObjectMeta


class DeviceResult(ObjectStruct):
    """A device allocated to a claim; `request` may name a subrequest, such as `gpu/small`."""

    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""
    admin_access: bool | None = None
    share_id: str | None = None


class DeviceResults(ObjectStruct):
    """All devices allocated to a claim."""

    results: list[DeviceResult] = []


class Allocation(ObjectStruct):
    """The scheduler's allocation for a claim."""

    devices: DeviceResults = field(default_factory=DeviceResults)


class Consumer(ObjectStruct):
    """A consumer that a claim is reserved for."""

    api_group: str = ""
    resource: str = ""
    name: str = ""
    uid: str = ""


class ResourceClaimStatus(ObjectStruct):
    """Allocation and reservations of a claim."""

    allocation: Allocation | None = None
    reserved_for: list[Consumer] = []


class ResourceClaim(ObjectStruct):
    """A request for devices, and its allocation."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    status: ResourceClaimStatus = field(default_factory=ResourceClaimStatus)


class ResourceSlice(ObjectStruct):
    """Devices that a driver publishes; the kubelet only deletes them."""

    metadata: PartialObjectMeta = field(default_factory=PartialObjectMeta)
