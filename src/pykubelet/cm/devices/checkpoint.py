"""Checkpoint of the device manager: the file `kubelet_internal_checkpoint`, in upstream's format.

It records the devices of each container and the Allocate response of their plugin, so that a container
restarted by another kubelet process gets the same. The checksum is a hash of the data as Go's debugging
printer shows it; a node can be handed over in both directions. A damaged file is an error, because guessing
could allocate a device that is in use to a second container.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from pykubelet.cm.devices.registry import DeviceAllocation, DeviceOwner, DeviceRegistry
from pykubelet.cm.topology.hints import PolicyError
from pykubelet.util.files import write_atomically
from pykubelet.util.text import fnv1a_32

FILE_NAME = "kubelet_internal_checkpoint"
_PRIVATE = 0o600
_NIL = "<nil>"


class _Entry(msgspec.Struct):
    uid: str = msgspec.field(name="PodUID", default="")
    container: str = msgspec.field(name="ContainerName", default="")
    resource: str = msgspec.field(name="ResourceName", default="")
    devices: dict[int, list[str] | None] | None = msgspec.field(name="DeviceIDs", default=None)
    response: bytes | None = msgspec.field(name="AllocResp", default=None)


class _Data(msgspec.Struct):
    entries: list[_Entry] | None = msgspec.field(name="PodDeviceEntries", default=None)
    registered: dict[str, list[str] | None] | None = msgspec.field(name="RegisteredDevices", default=None)


class _File(msgspec.Struct):
    data: _Data = msgspec.field(name="Data")
    checksum: int = msgspec.field(name="Checksum", default=0)


def read_checkpoint(path: Path) -> DeviceRegistry:
    """Read the file; an empty registry if it does not exist. Raises PolicyError if it is invalid."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return DeviceRegistry()
    except OSError as err:
        raise PolicyError(f"cannot read the device manager's checkpoint: {err}") from err
    try:
        return decode(content)
    except ValueError as err:
        raise PolicyError(
            f"the device manager cannot go on from {path}: {err}. Drain this node and delete that file"
        ) from err


def write_checkpoint(path: Path, content: bytes) -> None:
    """Replace the file atomically. Raises OSError."""
    write_atomically(path, content, _PRIVATE)


def decode(content: bytes) -> DeviceRegistry:
    """Parse the file's content. Raises ValueError with the cause."""
    try:
        found = msgspec.json.decode(content, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ValueError(f"it is not what the device manager writes ({err})") from err
    if found.checksum != _checksum(found.data):
        raise ValueError("it is damaged or was edited: its checksum does not match its content")
    allocations = {
        DeviceOwner(entry.uid, entry.container, entry.resource): DeviceAllocation(
            {node: tuple(ids or ()) for node, ids in (entry.devices or {}).items()}, entry.response or b""
        )
        for entry in found.data.entries or ()
    }
    return DeviceRegistry(allocations, known=found.data.registered or ())


def encode(registry: DeviceRegistry) -> bytes:
    """Return the file's content; equal registries yield equal bytes."""
    entries = [
        _Entry(
            owner.uid,
            owner.container,
            owner.resource,
            {node: list(ids) for node, ids in sorted(allocation.devices.items())},
            allocation.response,
        )
        for owner, allocation in sorted(
            registry.allocations.items(), key=lambda item: (item[0].uid, item[0].container, item[0].resource)
        )
    ]
    registered = {name: sorted(resource.usable) for name, resource in sorted(registry.resources.items())}
    data = _Data(entries or None, dict[str, list[str] | None](registered))
    return msgspec.json.encode(_File(data, _checksum(data)))


def _checksum(data: _Data) -> int:
    return fnv1a_32(_dump(data).encode(errors="surrogatepass"))


def _dump(data: _Data) -> str:
    return (
        f"(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry)"
        f"{_list(map(_dump_entry, data.entries)) if data.entries is not None else _NIL} "
        f"RegisteredDevices:(map[string][]string){_lists(data.registered)}}}"
    )


def _dump_entry(entry: _Entry) -> str:
    response = _NIL if entry.response is None else _list(map(str, entry.response))
    return (
        f"{{PodUID:(string){entry.uid} ContainerName:(string){entry.container} "
        f"ResourceName:(string){entry.resource} "
        f"DeviceIDs:(checkpoint.DevicesPerNUMA){_lists(entry.devices)} AllocResp:([]uint8){response}}}"
    )


def _lists(lists: Mapping[int, list[str] | None] | Mapping[str, list[str] | None] | None) -> str:
    if lists is None:
        return _NIL
    shown = (f"{key}:{_NIL if ids is None else _list(ids)}" for key, ids in sorted(lists.items()))
    return f"map{_list(shown)}"


def _list(items: Iterable[str]) -> str:
    return f"[{' '.join(items)}]"
