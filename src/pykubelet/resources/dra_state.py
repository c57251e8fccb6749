"""What is known of the claims in use, and the file that outlives the agent: `dra_manager_state`.

The file is in the reference's own format, so that a node can be handed over in both directions. It is
written before a driver is called: whoever comes after a crash knows which claims may have been prepared,
and for which pods, and has them unprepared when those are gone. Whether a driver has answered is not in
it, because what a driver made may not outlive the machine's boot: an agent asks once for itself.

A file that was damaged is never guessed about: devices would stay in use for ever.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pykubelet.pods.handover import write_atomically
from pykubelet.resources.dra_claims import serves
from pykubelet.resources.hints import PolicyError

FILE_NAME = "dra_manager_state"
KIND, API_VERSION = "DRACheckpoint", "checkpoint.dra.kubelet.k8s.io/v1"

_PRIVATE = 0o600


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """A device that a driver has made ready for a claim; for all requests where none is named."""

    pool: str
    device: str
    requests: tuple[str, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    share_id: str | None = None


@dataclass(slots=True)
class ClaimRecord:
    """A claim that pods on this node use; `devices` by driver, also of drivers that gave none."""

    namespace: str
    name: str
    uid: str
    pods: set[str] = field(default_factory=set)
    devices: dict[str, tuple[PreparedDevice, ...]] = field(default_factory=dict)
    prepared: bool = False
    """Whether all drivers have answered to this agent."""

    @property
    def key(self) -> tuple[str, str]:
        """What the claim is found by: there is one of a name at a time."""
        return self.namespace, self.name

    def cdi_devices(self, request: str = "") -> Iterator[str]:
        """Give the CDI names of the devices of a request, or of all."""
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


class _Nothing(msgspec.Struct):
    pass


class _Claim(msgspec.Struct):
    uid: str = msgspec.field(name="ClaimUID", default="")
    name: str = msgspec.field(name="ClaimName", default="")
    namespace: str = msgspec.field(name="Namespace", default="")
    pods: dict[str, _Nothing] | None = msgspec.field(name="PodUIDs", default=None)
    drivers: dict[str, _Driver] | None = msgspec.field(name="DriverState", default=None)


class _Data(msgspec.Struct):
    kind: str = ""
    api_version: str = msgspec.field(name="apiVersion", default="")
    claims: list[_Claim] | None = msgspec.field(name="ClaimInfoStateList", default=None)


class _File(msgspec.Struct):
    data: str = msgspec.field(name="Data")
    checksum: int = msgspec.field(name="Checksum", default=0)


def read_state(path: Path) -> list[ClaimRecord]:
    """Read the file, or make one that says that no claim is in use.

    Raises PolicyError when it is not sound, or nothing can be kept there.
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
    """Replace the file, so that a crash leaves the old one or the new one; raises OSError."""
    write_atomically(path, content, _PRIVATE)


def decode(content: bytes) -> list[ClaimRecord]:
    """Read a file's content; raises ValueError saying what is wrong."""
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


def encode(records: Iterable[ClaimRecord]) -> bytes:
    """Give the file's content; the same claims give the same bytes."""
    claims = [_claim(record) for record in sorted(records, key=lambda one: one.key)]
    data = msgspec.json.encode(_Data(KIND, API_VERSION, claims))
    return msgspec.json.encode(_File(data.decode(), zlib.crc32(data)))


def _record(claim: _Claim) -> ClaimRecord:
    devices = {
        driver: tuple(
            PreparedDevice(
                one.pool, one.device, tuple(one.requests or ()), tuple(one.cdi_devices or ()), one.share_id
            )
            for one in state.devices or ()
        )
        for driver, state in (claim.drivers or {}).items()
    }
    return ClaimRecord(claim.namespace, claim.name, claim.uid, set(claim.pods or ()), devices)


def _claim(record: ClaimRecord) -> _Claim:
    drivers = {
        driver: _Driver(
            [
                _Device(one.pool, one.device, one.share_id, list(one.requests) or None, list(one.cdi_devices))
                for one in devices
            ]
            or None
        )
        for driver, devices in sorted(record.devices.items())
    }
    pods = {uid: _Nothing() for uid in sorted(record.pods)}
    return _Claim(record.uid, record.name, record.namespace, pods, drivers)
