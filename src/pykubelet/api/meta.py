"""Object metadata, JSON field names, and decoding and encoding of API objects.

Objects are structs of the fields in use; unknown fields are ignored, as every client of an evolving API must.
Quantities are parsed when an object is decoded, so that an invalid one is an error with its path.

Struct fields are in snake_case, JSON names in Kubernetes' camelCase with acronyms in capitals (`clusterDNS`,
`podIPs`). One rule (`wire_name`) replaces a rename per field.
"""

from __future__ import annotations

import functools
import threading
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

import msgspec

from pykubelet.api.quantity import Quantity
from pykubelet.util.text import readable

_WORDS = {
    "api": "API",
    "ca": "CA",
    "cfs": "CFS",
    "cidr": "CIDR",
    "cidrs": "CIDRs",
    "cpus": "CPUs",
    "dns": "DNS",
    "fqdn": "FQDN",
    "gc": "GC",
    "gid": "GID",
    "id": "ID",
    "ip": "IP",
    "ipc": "IPC",
    "ips": "IPs",
    "iptables": "IPTables",
    "oom": "OOM",
    "os": "OS",
    "pid": "PID",
    "qos": "QOS",
    "qps": "QPS",
    "tls": "TLS",
    "ttl": "TTL",
    "uid": "UID",
    "uri": "URI",
    "url": "URL",
    "uuid": "UUID",
}


def wire_name(field: str) -> str:
    """Return the JSON name of a struct field: `clusterDNS` for `cluster_dns`.

    A trailing underscore, which avoids Python's keywords, is dropped.
    """
    first, *rest = field.rstrip("_").split("_")
    return first + "".join(_WORDS.get(word, word[:1].upper() + word[1:]) for word in rest)


T = TypeVar("T")
Resources = dict[str, Quantity]
IntOrString = int | str


class ObjectStruct(msgspec.Struct, kw_only=True, rename=wire_name, omit_defaults=True):
    """Base of the API structs."""


class OwnerReference(ObjectStruct):
    """An owner of an object."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class ObjectMeta(ObjectStruct):
    """Metadata of an object."""

    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []
    finalizers: list[str] = []


class PartialObjectMeta(ObjectStruct, gc=False):
    """Identity and version of an object, the only metadata that caches of many small objects need."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


def now() -> datetime:
    """Return the current time as the API writes it: UTC, whole seconds."""
    return datetime.now(UTC).replace(microsecond=0)


def _read_hook(kind: type, value: Any) -> Any:
    if kind is Quantity and isinstance(value, str | int | float) and not isinstance(value, bool):
        return Quantity.parse(str(value))
    raise ValueError(f"{value!r} is not a {kind.__name__.lower()}")


def _write_hook(value: Any) -> Any:
    if isinstance(value, Quantity):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in the API")


_planning = threading.Lock()


@functools.cache
def plan_reading(kind: Any) -> None:
    """Ensure that msgspec's type information of a struct is complete.

    msgspec builds it at the first use, and a thread that uses it while another is still building it crashes
    the process (seen with msgspec 0.22), so it is built under a lock.
    """
    with _planning:
        msgspec.json.Decoder(kind)


def from_document(kind: type[T], document: Any) -> T:
    """Convert a decoded JSON or YAML document to an object.

    Raises ValueError with the path of the first invalid field.
    """
    plan_reading(cast(Any, kind))
    try:
        return msgspec.convert(document, kind, dec_hook=_read_hook, strict=True)
    except msgspec.ValidationError as err:
        raise ValueError(str(err).replace("`$.", "`").replace("`$`", "the document")) from err


def from_json(kind: type[T], data: bytes) -> T:
    """Decode an object from JSON. Raises ValueError as `from_document` does."""
    plan_reading(cast(Any, kind))
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=_read_hook)
    except (msgspec.MsgspecError, RecursionError) as err:
        raise ValueError(str(err).replace("`$.", "`").replace("`$`", "the document")) from err


def to_document(value: Any) -> Any:
    """Convert an object to plain JSON values, without unset fields."""
    return msgspec.to_builtins(value, enc_hook=_write_hook)


def to_json(value: Any) -> bytes:
    """Encode an object as JSON; characters that are not valid Unicode (as in file names) become U+FFFD."""
    try:
        return msgspec.json.encode(value, enc_hook=_write_hook)
    except UnicodeEncodeError:
        return msgspec.json.encode(_readable(to_document(value)))


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {_readable(name): _readable(inner) for name, inner in value.items()}
    return [_readable(inner) for inner in value] if isinstance(value, list | tuple) else value
