"""Messages of device plugins, claims, pod-resources API and pods API are the protocols', number by number."""

import pytest

from pykubelet.cm.devices import device_plugin_pb2
from pykubelet.cm.dra import dra_health_pb2, dra_pb2
from pykubelet.cm.podresources import pod_resources_pb2
from pykubelet.server.podsapi import pods_pb2
from tests.support.proto_tables import DATA, kind_of, read_table

TABLES = {
    "deviceplugin.txt": device_plugin_pb2.DESCRIPTOR,
    "podresources.txt": pod_resources_pb2.DESCRIPTOR,
    "dra.txt": dra_pb2.DESCRIPTOR,
    "dra-health.txt": dra_health_pb2.DESCRIPTOR,
    "pods-api.txt": pods_pb2.DESCRIPTOR,
}


@pytest.mark.parametrize("name", TABLES)
def test_proto_messages_field_numbers_equal_upstream(name: str) -> None:
    facts, file = read_table(DATA / name), TABLES[name]
    package = f"{file.package}."
    assert {message.full_name for message in file.message_types_by_name.values()} == set(facts.messages)
    for message in file.message_types_by_name.values():
        assert {
            field.name: (field.number, kind_of(field).replace(package, "")) for field in message.fields
        } == {
            field: (number, kind.removeprefix("optional "))
            for field, (number, kind) in facts.messages[message.full_name].items()
        }, message.full_name


@pytest.mark.parametrize("name", TABLES)
def test_proto_services_methods_equal_upstream(name: str) -> None:
    facts, file = read_table(DATA / name), TABLES[name]
    assert {
        service.full_name: {
            method.name: (method.input_type.name, method.server_streaming, method.output_type.name)
            for method in service.methods
        }
        for service in file.services_by_name.values()
    } == facts.services


def test_proto_health_status_values_equal_upstream() -> None:
    facts = read_table(DATA / "dra-health.txt")
    values = dra_health_pb2.DESCRIPTOR.enum_types_by_name["HealthStatus"].values
    assert {value.name: value.number for value in values} == facts.enums["v1alpha1.HealthStatus"]


def test_proto_pod_event_types_equal_upstream() -> None:
    facts = read_table(DATA / "pods-api.txt")
    assert dict(pods_pb2.EventType.items()) == facts.enums["v1alpha1.EventType"]


def test_proto_share_id_unset_is_absent() -> None:
    assert not dra_pb2.Device().HasField("share_id")
    assert not pod_resources_pb2.ClaimResource().HasField("share_id")
