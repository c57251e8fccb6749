"""The compiled messages are the protocols', name by name and number by number."""

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor

from pykubelet.pluginmanager import registration_pb2
from pykubelet.volumes.csi import csi_pb2
from tests.support.proto_tables import DATA, kind_of, read_table

FILES: list[FileDescriptor] = [csi_pb2.DESCRIPTOR, registration_pb2.DESCRIPTOR]
TABLES = [read_table(DATA / "csi.txt"), read_table(DATA / "pluginregistration.txt")]
FACTS = {name: fields for table in TABLES for name, fields in table.messages.items()}
ENUMS = {name: values for table in TABLES for name, values in table.enums.items()}
SERVICES = {name: rpcs for table in TABLES for name, rpcs in table.services.items()}


def inside(message: Descriptor) -> Iterator[Descriptor]:
    yield message
    for nested in message.nested_types:
        if not nested.GetOptions().map_entry:
            yield from inside(nested)


MESSAGES = {
    m.full_name: m for file in FILES for top in file.message_types_by_name.values() for m in inside(top)
}
OUR_ENUMS: dict[str, EnumDescriptor] = {e.full_name: e for m in MESSAGES.values() for e in m.enum_types}


def test_csi_proto_has_all_messages_and_enums() -> None:
    assert len(MESSAGES) == 30
    assert len(OUR_ENUMS) == 3


@pytest.mark.parametrize("name", MESSAGES)
def test_csi_proto_message_fields_equal_specification(name: str) -> None:
    package = MESSAGES[name].file.package
    spelled = {}
    for field, (number, kind) in FACTS[name].items():
        kind, _, oneof = kind.partition("  oneof ")
        word, _, rest = kind.rpartition(" ")
        full = f"{package}.{rest}" if f"{package}.{rest}" in {*MESSAGES, *OUR_ENUMS} else rest
        spelled[field] = (number, f"{word} {full}".strip(), oneof.strip() or None)
    assert {
        field.name: (
            field.number,
            kind_of(field),
            field.containing_oneof.name if field.containing_oneof is not None else None,
        )
        for field in MESSAGES[name].fields
    } == spelled


@pytest.mark.parametrize("name", OUR_ENUMS)
def test_csi_proto_enum_values_equal_specification(name: str) -> None:
    assert {value.name: value.number for value in OUR_ENUMS[name].values} == ENUMS[name]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.package)
def test_csi_proto_service_methods_equal_specification(file: FileDescriptor) -> None:
    (service,) = file.services_by_name.values()
    facts = SERVICES[service.full_name]
    assert {
        method.name: (method.input_type.name, method.server_streaming, method.output_type.name)
        for method in service.methods
    } == facts
