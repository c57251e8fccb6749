"""Protobuf encoding of pods, as v1.Pod#Marshal of the upstream kubelet writes it.

The conversion follows the message descriptors of `core.proto`: field names are the JSON names, except for the
structs that Go embeds, which are messages of their own. Fields that the pod structs do not have
(`api/pod.py`) are absent. `PodEncoder` caches the encoding of each pod of the node; its caller
drops it with the pod.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from pykubelet.api.meta import to_json
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.server.podsapi import core_pb2

Document = Mapping[str, Any]
_Setter = Callable[[Message, Document], None]

EMBEDDED = frozenset({"ephemeralContainerCommon", "handler", "localObjectReference", "volumeSource"})
"""Messages of structs that Go embeds: their fields are those of the outer object in JSON."""
OMITTED_DEFAULTS: Mapping[str, Mapping[str, str]] = {"ISCSIVolumeSource": {"iscsiInterface": "default"}}
"""Values that the structs omit in JSON and that are not Go's zero values, by message and field."""


class EncodingError(Exception):
    """Raised when a pod has a value that its protobuf field cannot hold."""


class PodEncoder:
    """Encodings of the pods of this node, the last one of each pod."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Pod, PodStatus, bytes]] = {}

    def cached(self, pod: Pod, status: PodStatus) -> bytes | None:
        """Return the encoding if this pod with this status was encoded last; stored objects never change."""
        last = self._last.get(pod.uid)
        return last[2] if last is not None and last[0] is pod and last[1] is status else None

    def encode(self, pod: Pod, status: PodStatus) -> bytes:
        """Return a pod with this status in protobuf. Raises EncodingError."""
        if (data := self.cached(pod, status)) is None:
            data = encode_pod(pod, status)
            self._last[pod.uid] = pod, status, data
        return data

    def forget(self, uid: str) -> None:
        """Drop the encoding of a pod."""
        self._last.pop(uid, None)

    def __len__(self) -> int:
        return len(self._last)


def encode_pod(pod: Pod, status: PodStatus) -> bytes:
    """Return a pod with this status in protobuf. Raises EncodingError."""
    message = core_pb2.Pod()
    try:
        # JSON has no characters that are not valid Unicode, which protobuf rejects.
        _fill(message, msgspec.json.decode(to_json(msgspec.structs.replace(pod, status=status))))
        return message.SerializeToString()
    except (AttributeError, TypeError, ValueError) as err:
        raise EncodingError(str(err)) from err


def encode_identity(pod: Pod) -> bytes:
    """Return a pod in protobuf with its name, namespace and UID only."""
    own = pod.metadata
    identity = core_pb2.ObjectMeta(name=own.name, namespace=own.namespace, uid=own.uid)
    return core_pb2.Pod(metadata=identity).SerializeToString()


def _fill(message: Message, document: Document) -> None:
    for set_field in _setters(message.DESCRIPTOR):
        set_field(message, document)


@functools.cache
def _setters(descriptor: Descriptor) -> tuple[_Setter, ...]:
    return tuple(_setter(field) for field in descriptor.fields)


def _setter(field: FieldDescriptor) -> _Setter:
    name = field.name
    if name in EMBEDDED:
        return lambda message, document: _fill(getattr(message, name), document)
    assert field.containing_type is not None
    omitted = OMITTED_DEFAULTS.get(field.containing_type.name, {}).get(name)
    assign = _assignment(field)

    def set_field(message: Message, document: Document) -> None:
        if (value := document.get(name, omitted)) is not None:
            assign(message, value)

    return set_field


def _assignment(field: FieldDescriptor) -> Callable[[Message, Any], None]:
    name, kind = field.name, field.message_type
    if kind is None:
        if field.is_repeated:
            return lambda message, values: getattr(message, name).extend(values)
        return lambda message, value: setattr(message, name, value)
    if kind.GetOptions().map_entry:
        return _map_assignment(name, kind.fields_by_name["value"])
    write = _WRITERS.get(kind.name, _fill)

    def assign_each(message: Message, values: Iterable[Any]) -> None:
        for value in values:
            write(getattr(message, name).add(), value)

    def assign(message: Message, value: Any) -> None:
        inner = getattr(message, name)
        inner.SetInParent()
        write(inner, value)

    return assign_each if field.is_repeated else assign


def _map_assignment(name: str, value_field: FieldDescriptor) -> Callable[[Message, Any], None]:
    if value_field.message_type is None:
        return lambda message, values: getattr(message, name).update(values)
    write = _WRITERS.get(value_field.message_type.name, _fill)

    def assign(message: Message, values: Document) -> None:
        for key, value in values.items():
            write(getattr(message, name)[key], value)

    return assign


def _write_quantity(message: Any, value: str | int) -> None:
    message.string = str(value)


def _write_int_or_string(message: Any, value: int | str) -> None:
    if isinstance(value, str):
        message.type, message.strVal = 1, value
    else:
        message.type, message.intVal = 0, value


def _write_time(message: Any, value: str) -> None:
    # Go writes whole seconds, too.
    message.seconds = int(datetime.fromisoformat(value).timestamp())


_WRITERS: Mapping[str, Callable[[Any, Any], None]] = {
    "IntOrString": _write_int_or_string,
    "Quantity": _write_quantity,
    "Time": _write_time,
}
"""Conversion of messages whose JSON form is not an object."""
