"""The compiled messages are the protocol's, name by name and number by number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf import any_pb2, empty_pb2, timestamp_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor

from pykubelet.cri import events_pb2, events_tasks_pb2, events_types_pb2, runtime_pb2
from tests.support.proto_tables import DATA, kind_of, read_table

FILES: list[FileDescriptor] = [
    module.DESCRIPTOR for module in (runtime_pb2, events_pb2, events_tasks_pb2, events_types_pb2)
]


def full(package: str, name: str, known: set[str]) -> str:
    if f"{package}.{name}" in known:
        return f"{package}.{name}"
    return name.replace("google.protobuf.", "containerd.types.")


def all_messages(file: FileDescriptor) -> Iterator[Descriptor]:
    yield from file.message_types_by_name.values()


def all_enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in all_messages(file):
        yield from message.enum_types


def qualified(kind: str, package: str, known: set[str]) -> str:
    prefix, _, name = kind.rpartition(" ")
    return f"{prefix} {full(package, name, known)}".strip()


CRI = read_table(DATA / "cri.txt")
EVENTS = read_table(DATA / "containerd-events.txt")
MESSAGES = {message.full_name: message for file in FILES for message in all_messages(file)}
ENUMS = {enum.full_name: enum for file in FILES for enum in all_enums(file)}
SERVICES = {service.full_name: service for file in FILES for service in file.services_by_name.values()}
KNOWN = {*MESSAGES, *ENUMS}
# The only field that is left out on purpose.
LEFT_OUT = {"containerd.events.TaskCreate": {"rootfs"}}
# Spelled out in our own file, the same on the wire.
WELL_KNOWN = {
    "containerd.types.Any": any_pb2.Any.DESCRIPTOR,
    "containerd.types.Empty": empty_pb2.Empty.DESCRIPTOR,
    "containerd.types.Timestamp": timestamp_pb2.Timestamp.DESCRIPTOR,
}


def test_proto_tables_have_all_messages_and_rpcs() -> None:
    assert len(CRI.messages) == 170
    assert len(CRI.services["runtime.v1.RuntimeService"]) == 35
    assert len(CRI.services["runtime.v1.ImageService"]) == 6
    assert len(EVENTS.messages) == 15


def test_proto_message_enum_and_service_names_match() -> None:
    assert {*CRI.messages, *EVENTS.messages, *WELL_KNOWN} == {*MESSAGES}
    assert {*CRI.enums, *EVENTS.enums} == {*ENUMS}
    assert {*CRI.services, *EVENTS.services} == {*SERVICES}


@pytest.mark.parametrize("name", [*CRI.messages, *EVENTS.messages])
def test_proto_message_fields_match_tables(name: str) -> None:
    facts, message = {**CRI.messages, **EVENTS.messages}[name], MESSAGES[name]
    package = message.file.package
    assert {field.name: (field.number, kind_of(field)) for field in message.fields} == {
        field: (number, qualified(kind, package, KNOWN))
        for field, (number, kind) in facts.items()
        if field not in LEFT_OUT.get(name, ())
    }
    assert not any(field.containing_oneof for field in message.fields), "the protocol has no oneof"


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_proto_well_known_type_fields_match_google(name: str) -> None:
    ours, theirs = MESSAGES[name], WELL_KNOWN[name]
    assert [(f.name, f.number, f.type) for f in ours.fields] == [
        (f.name, f.number, f.type) for f in theirs.fields
    ]


@pytest.mark.parametrize("name", [*CRI.enums, *EVENTS.enums])
def test_proto_enum_values_match_tables(name: str) -> None:
    facts = {**CRI.enums, **EVENTS.enums}[name]
    assert {value.name: value.number for value in ENUMS[name].values} == facts


@pytest.mark.parametrize("name", [*CRI.services, *EVENTS.services])
def test_proto_service_rpcs_match_tables(name: str) -> None:
    facts = {**CRI.services, **EVENTS.services}[name]
    package = SERVICES[name].file.package
    rpcs = {
        method.name: (method.input_type.full_name, method.server_streaming, method.output_type.full_name)
        for method in SERVICES[name].methods
    }
    assert rpcs == {
        rpc: (full(package, request, KNOWN), stream, full(package, response, KNOWN))
        for rpc, (request, stream, response) in facts.items()
    }
    assert not any(method.client_streaming for method in SERVICES[name].methods)
