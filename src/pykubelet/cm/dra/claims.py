"""Resource claims of a pod and its containers, and the checkpoint file `dra_manager_state`.

A pod names claims of its own namespace, or templates: for those the cluster creates claims and writes their
names into the pod's status. The scheduler may create one more, for extended resources that drivers serve.
Error texts are upstream's, which users search for when they find them in events.

The file has upstream's format, so that a node can be handed over in both directions. It is written before a
driver is called: after a crash the next kubelet process knows which claims may have been prepared, and for
which pods, and unprepares them when those are gone. Whether a driver has responded is not stored, because
prepared devices may not survive a reboot: each kubelet process calls the drivers once. A damaged file is an
error, because devices would otherwise stay in use forever.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pykubelet.api.meta import OwnerReference
from pykubelet.api.names import is_extended_resource
from pykubelet.api.pod import Container, Pod, PodResourceClaim
from pykubelet.api.resource_claim import Consumer, ResourceClaim
from pykubelet.cm.topology.hints import PolicyError
from pykubelet.util.files import write_atomically

DEVICE_CLASS_PREFIX = "deviceclass.resource.kubernetes.io/"
"""Prefix of extended resources that stand for a device class, which follows by name."""


SCHEDULING_GROUP = "scheduling.k8s.io"
"""API group of PodGroups."""


class ClaimError(Exception):
    """Raised when a pod's claims cannot be prepared or unprepared; the text is for the pod's events."""


@dataclass(frozen=True, slots=True)
class PodClaim:
    """A claim that a pod uses; `created_for_pod` if it was created for this pod, and so for no other."""

    name: str
    created_for_pod: bool = False


def pod_claims(pod: Pod, *, extended: bool = True) -> list[PodClaim]:
    """Return the claims of a pod, each once. Raises ClaimError while one of them does not exist yet.

    `extended`: whether claims for extended resources count.
    """
    found = [claim for entry in pod.spec.resource_claims if (claim := _resolve_claim(pod, entry)) is not None]
    if extended and (status := pod.status.extended_resource_claim_status) is not None:
        found.append(PodClaim(status.resource_claim_name))
    return list({claim.name: claim for claim in found}.values())


def drivers_of(pod: Pod, pod_claim: PodClaim, claim: ResourceClaim, *, pod_groups: bool = False) -> list[str]:
    """Return the drivers of a claim. Raises ClaimError if the pod may not use it, or not yet.

    `pod_groups` permits claims that were created or reserved for the pod's PodGroup.
    """
    where, name = claim.metadata, claim.metadata.name
    group = _pod_group(pod) if pod_groups else ""
    if pod_claim.created_for_pod and not any(
        owner.controller and (owner.uid == pod.uid or _is_group(owner, group))
        for owner in claim.metadata.owner_references
    ):
        owners = f"neither Pod nor PodGroup {group} is the owner" if group else "Pod is not owner"
        raise ClaimError(
            f"ResourceClaim {where.namespace}/{name} was not created for Pod {pod.full_name} ({owners})"
        )
    if not any(
        consumer.uid == pod.uid or _is_reserved_for_group(consumer, group)
        for consumer in claim.status.reserved_for
    ):
        raise ClaimError(
            f"pod {pod.metadata.name} ({pod.uid}) is not allowed to use ResourceClaim {name} ({where.uid})"
        )
    if claim.status.allocation is None:
        raise ClaimError(f"ResourceClaim {name}: not allocated")
    return sorted({result.driver for result in claim.status.allocation.devices.results})


def _pod_group(pod: Pod) -> str:
    """Return the name of the pod's PodGroup, "" without one."""
    group = pod.spec.scheduling_group
    return (group.pod_group_name or "") if group is not None else ""


def _is_group(owner: OwnerReference, group: str) -> bool:
    # A pod does not know the UID of its PodGroup, and the version of the API may change.
    return (
        bool(group)
        and (owner.kind, owner.name) == ("PodGroup", group)
        and owner.api_version.startswith(f"{SCHEDULING_GROUP}/")
    )


def _is_reserved_for_group(consumer: Consumer, group: str) -> bool:
    found = consumer.api_group, consumer.resource, consumer.name
    return bool(group) and found == (SCHEDULING_GROUP, "podgroups", group)


def requests_of(pod: Pod, container: Container, *, extended: bool = True) -> dict[str, list[str]]:
    """Return the claims that a container uses, each with its requests; "" is all of them.

    Raises ClaimError while one of them does not exist yet.
    """
    found: dict[str, list[str]] = {}
    for entry in pod.spec.resource_claims:
        requests = [used.request for used in container.resources.claims if used.name == entry.name]
        if requests and (claim := _resolve_claim(pod, entry)) is not None:
            found.setdefault(claim.name, []).extend(requests)
    status = pod.status.extended_resource_claim_status
    if extended and status is not None:
        requested = {
            name
            for name, amount in container.resources.requests.items()
            if amount.nanos and (is_extended_resource(name) or name.startswith(DEVICE_CLASS_PREFIX))
        }
        for mapping in status.request_mappings:
            if mapping.container_name == container.name and mapping.resource_name in requested:
                found.setdefault(status.resource_claim_name, []).append(mapping.request_name)
    return found


def serves(request: str, names: Collection[str]) -> bool:
    """Return whether a device allocated for the requests `names` serves this request.

    A device without names serves all. A name may be a subrequest, `gpu/small`; drivers mostly omit the last
    part.
    """
    return not request or not names or any(_matches(request, name) for name in names)


def claim_names(pod: Pod) -> Iterator[tuple[str, str]]:
    """Yield the pod's own name of each claim, and the claim's name, as far as they are known."""
    for entry in pod.spec.resource_claims:
        try:
            claim = _resolve_claim(pod, entry)
        except ClaimError:
            continue
        if claim is not None:
            yield entry.name, claim.name


def _resolve_claim(pod: Pod, entry: PodResourceClaim) -> PodClaim | None:
    """Return the ResourceClaim for an entry of the pod's spec; None if the entry needs no claim."""
    if entry.resource_claim_name is not None:
        return PodClaim(entry.resource_claim_name)
    if entry.resource_claim_template_name is None:
        raise ClaimError(
            f'pod "{pod.full_name}", spec.resourceClaim "{entry.name}": none of the supported fields are set'
        )
    for status in pod.status.resource_claim_statuses:
        if status.name == entry.name:
            return (
                PodClaim(status.resource_claim_name, created_for_pod=True)
                if status.resource_claim_name
                else None
            )
    raise ClaimError(f'pod "{pod.full_name}": ResourceClaim not created yet')


def _matches(request: str, name: str) -> bool:
    shorter, longer = sorted((request, name), key=len)
    return shorter == longer or longer.startswith(f"{shorter}/")


FILE_NAME = "dra_manager_state"
KIND, API_VERSION = "DRACheckpoint", "checkpoint.dra.kubelet.k8s.io/v1"
_PRIVATE = 0o600


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """A device that a driver has prepared for a claim; for all requests if none is named."""

    pool: str
    device: str
    requests: tuple[str, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    share_id: str | None = None


@dataclass(slots=True)
class ClaimInfo:
    """A claim that pods on this node use; `devices` by driver, including drivers without devices."""

    namespace: str
    name: str
    uid: str
    pods: set[str] = field(default_factory=set)
    devices: dict[str, tuple[PreparedDevice, ...]] = field(default_factory=dict)
    prepared: bool = False
    """Whether all drivers have prepared it for this kubelet process."""

    @property
    def key(self) -> tuple[str, str]:
        """Key of the claim: a name is unique at a time."""
        return self.namespace, self.name

    def cdi_devices(self, request: str = "") -> Iterator[str]:
        """Yield the CDI names of the devices of a request, or of all."""
        for _, devices in sorted(self.devices.items()):
            for device in devices:
                if serves(request, device.requests):
                    yield from device.cdi_devices


class _Device(msgspec.Struct):
    pool: str = msgspec.field(name="PoolName", default="")
    device: str = msgspec.field(name="DeviceName", default="")
    share_id: str | None = msgspec.field(name="ShareID", default=None)
    requests: list[str] | None = msgspec.field(name="RequestNames", default=None)
    cdi_devices: list[str] | None = msgspec.field(name="CDIDeviceIDs", default=None)


class _Driver(msgspec.Struct):
    devices: list[_Device] | None = msgspec.field(name="Devices", default=None)


class _EmptyStruct(msgspec.Struct):
    pass


class _Claim(msgspec.Struct):
    uid: str = msgspec.field(name="ClaimUID", default="")
    name: str = msgspec.field(name="ClaimName", default="")
    namespace: str = msgspec.field(name="Namespace", default="")
    pods: dict[str, _EmptyStruct] | None = msgspec.field(name="PodUIDs", default=None)
    drivers: dict[str, _Driver] | None = msgspec.field(name="DriverState", default=None)


class _Data(msgspec.Struct):
    kind: str = ""
    api_version: str = msgspec.field(name="apiVersion", default="")
    claims: list[_Claim] | None = msgspec.field(name="ClaimInfoStateList", default=None)


class _File(msgspec.Struct):
    data: str = msgspec.field(name="Data")
    checksum: int = msgspec.field(name="Checksum", default=0)


def read_state(path: Path) -> list[ClaimInfo]:
    """Read the file, or create one without claims.

    Raises PolicyError when it is invalid, or cannot be read or created.
    """
    try:
        if not path.exists():
            write_state(path, encode([]))
        content = path.read_bytes()
    except OSError as err:
        raise PolicyError(
            f"{path}: {err.strerror or err}: the state of resource claims must be kept there"
        ) from err
    try:
        return decode(content)
    except ValueError as err:
        raise PolicyError(
            f"resource claims cannot go on from {path}: {err}. Drain this node and delete that file"
        ) from err


def write_state(path: Path, content: bytes) -> None:
    """Replace the file atomically. Raises OSError."""
    write_atomically(path, content, _PRIVATE)


def decode(content: bytes) -> list[ClaimInfo]:
    """Parse the file's content. Raises ValueError with the cause."""
    try:
        found = msgspec.json.decode(content, type=_File)
        if found.checksum != zlib.crc32(found.data.encode(errors="surrogatepass")):
            raise ValueError("it is damaged or was edited: its checksum does not match its content")
        data = msgspec.json.decode(found.data, type=_Data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ValueError(f"it is not what a kubelet writes ({err})") from err
    if (data.kind, data.api_version) != (KIND, API_VERSION):
        raise ValueError(f"it is a {data.kind or '?'} of {data.api_version or '?'}, not of {API_VERSION}")
    return [_record(claim) for claim in data.claims or ()]


def encode(records: Iterable[ClaimInfo]) -> bytes:
    """Return the file's content; equal claims yield equal bytes."""
    claims = [_claim(record) for record in sorted(records, key=lambda record: record.key)]
    data = msgspec.json.encode(_Data(KIND, API_VERSION, claims))
    return msgspec.json.encode(_File(data.decode(), zlib.crc32(data)))


def _record(claim: _Claim) -> ClaimInfo:
    devices = {
        driver: tuple(
            PreparedDevice(
                device.pool,
                device.device,
                tuple(device.requests or ()),
                tuple(device.cdi_devices or ()),
                device.share_id,
            )
            for device in state.devices or ()
        )
        for driver, state in (claim.drivers or {}).items()
    }
    return ClaimInfo(claim.namespace, claim.name, claim.uid, set(claim.pods or ()), devices)


def _claim(record: ClaimInfo) -> _Claim:
    drivers = {
        driver: _Driver(
            [
                _Device(
                    device.pool,
                    device.device,
                    device.share_id,
                    list(device.requests) or None,
                    list(device.cdi_devices),
                )
                for device in devices
            ]
            or None
        )
        for driver, devices in sorted(record.devices.items())
    }
    pods = {uid: _EmptyStruct() for uid in sorted(record.pods)}
    return _Claim(record.uid, record.name, record.namespace, pods, drivers)
