"""Our schema is, name for name and number for number, the one that the official clients were built with."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from nerite.wire import schema


def enum_facts(enum: EnumDescriptor) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}


def field_facts(field: FieldDescriptor) -> dict[str, Any]:
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof
    return {
        "number": field.number,
        "type": field.type,
        "of": kind.full_name if kind else None,
        "repeated": field.is_repeated,
        "packed": field.is_packed,
        "presence": field.has_presence,
        "oneof": oneof.name if oneof else None,
        "default": field.default_value,
        "json": field.json_name,
    }


def message_facts(message: Descriptor) -> dict[str, Any]:
    return {
        "map": message.GetOptions().map_entry,
        "oneofs": [oneof.name for oneof in message.oneofs],
        "fields": {field.name: field_facts(field) for field in message.fields},
        "enums": {enum.name: enum_facts(enum) for enum in message.enum_types},
        "messages": {nested.name: message_facts(nested) for nested in message.nested_types},
    }


def service_facts(file: FileDescriptor) -> dict[str, Any]:
    return {
        f"{service.full_name}/{method.name}": (
            method.input_type.full_name,
            method.client_streaming,
            method.output_type.full_name,
            method.server_streaming,
        )
        for service in file.services_by_name.values()
        for method in service.methods
    }


def ours(name: str) -> FileDescriptor:
    return schema.pool().FindFileByName(f"nerite/wire/{name}.proto")


FILES = {"grpc_service": service_pb2.DESCRIPTOR, "model_config": model_config_pb2.DESCRIPTOR}


@pytest.mark.parametrize("name", FILES)
def test_package_and_syntax(name: str) -> None:
    assert ours(name).package == FILES[name].package == "inference"


@pytest.mark.parametrize("name", FILES)
def test_same_messages(name: str) -> None:
    official = FILES[name].message_types_by_name
    assert set(ours(name).message_types_by_name) == set(official)


@pytest.mark.parametrize(
    ("name", "message"), [(name, message) for name in FILES for message in FILES[name].message_types_by_name]
)
def test_message(name: str, message: str) -> None:
    official = message_facts(FILES[name].message_types_by_name[message])
    assert message_facts(ours(name).message_types_by_name[message]) == official


def test_order_of_the_configuration() -> None:
    """A configuration printed as JSON has its keys in the order of the schema."""

    def order(message: Descriptor) -> dict[str, list[str]]:
        found = {message.full_name: [field.name for field in message.fields]}
        for nested in message.nested_types:
            found |= order(nested)
        return found

    for name, official in model_config_pb2.DESCRIPTOR.message_types_by_name.items():
        assert order(ours("model_config").message_types_by_name[name]) == order(official)


@pytest.mark.parametrize("name", FILES)
def test_enums(name: str) -> None:
    official = {enum.name: enum_facts(enum) for enum in FILES[name].enum_types_by_name.values()}
    assert {enum.name: enum_facts(enum) for enum in ours(name).enum_types_by_name.values()} == official


@pytest.mark.parametrize("name", FILES)
def test_services(name: str) -> None:
    assert service_facts(ours(name)) == service_facts(FILES[name])


def test_health() -> None:
    """No stubs of it are published with the client; the interface is four numbers and one call."""
    health = ours("health")
    status = health.message_types_by_name["HealthCheckResponse"].enum_types_by_name["ServingStatus"]
    assert health.package == "grpc.health.v1"
    assert {
        message.name: {field.name: field.number for field in message.fields}
        for message in health.message_types_by_name.values()
    } == {"HealthCheckRequest": {"service": 1}, "HealthCheckResponse": {"status": 1}}
    assert enum_facts(status) == {"UNKNOWN": 0, "SERVING": 1, "NOT_SERVING": 2, "SERVICE_UNKNOWN": 3}
    assert service_facts(health) == {
        "grpc.health.v1.Health/Check": (
            "grpc.health.v1.HealthCheckRequest",
            False,
            "grpc.health.v1.HealthCheckResponse",
            False,
        )
    }
