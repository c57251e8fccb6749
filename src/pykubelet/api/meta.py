"""What every Kubernetes object has, and how objects are read and written.

Objects are structs of the fields in use; unknown fields are skipped on reading, as every client of
an evolving API must. Quantities are parsed on the way in, so that a bad one is an error with its
path at the door and not a surprise deep inside.

How Python's field names become Kubernetes' JSON names.

Structs in this code base are written in snake_case; on the wire Kubernetes uses
camelCase with its own habit of writing acronyms in capitals (`clusterDNS`, `podIPs`).
One rule here, instead of a rename per field, keeps the structs readable.
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
    """Give the JSON name of a struct field: `cluster_dns` is `clusterDNS`.

    A trailing underscore, which keeps a field off Python's keywords, is dropped.
    """
    first, *rest = field.rstrip("_").split("_")
    return first + "".join(_WORDS.get(word, word[:1].upper() + word[1:]) for word in rest)


T = TypeVar("T")
Resources = dict[str, Quantity]
IntOrString = int | str


class ObjectStruct(msgspec.Struct, kw_only=True, rename=wire_name, omit_defaults=True):
    """Common shape of the structs of the API."""


class OwnerReference(ObjectStruct):
    """Who made an object."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class ObjectMeta(ObjectStruct):
    """Identity, labels and life of an object."""

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
    """Which object, and in which version: all that a copy of many small objects needs of their metadata."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


def now() -> datetime:
    """The time as the API writes it: UTC, whole seconds."""
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
    """Have msgspec's plan of a kind of objects complete.

    It is made at the first use, and a thread that meets a plan which another is still making crashes
    the process (seen with msgspec 0.22), so they are made one at a time.
    """
    with _planning:
        msgspec.json.Decoder(kind)


def from_document(kind: type[T], document: Any) -> T:
    """Make an object of a decoded JSON or YAML document.

    Raises ValueError with the path of the first field that does not fit.
    """
    plan_reading(cast(Any, kind))
    try:
        return msgspec.convert(document, kind, dec_hook=_read_hook, strict=True)
    except msgspec.ValidationError as err:
        raise ValueError(str(err).replace("`$.", "`").replace("`$`", "the document")) from err


def from_json(kind: type[T], data: bytes) -> T:
    """Make an object of JSON text; raises ValueError as `from_document` does."""
    plan_reading(cast(Any, kind))
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=_read_hook)
    except (msgspec.MsgspecError, RecursionError) as err:
        raise ValueError(str(err).replace("`$.", "`").replace("`$`", "the document")) from err


def to_document(value: Any) -> Any:
    """Give an object as plain JSON-ready values, without fields that are unset."""
    return msgspec.to_builtins(value, enc_hook=_write_hook)


def to_json(value: Any) -> bytes:
    """Give an object as JSON text; what is no text in it (a file's name may be anything) becomes U+FFFD."""
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
