"""The schema of the configuration against the one that NVIDIA's client ships, and the classes made from it."""

from __future__ import annotations

import dataclasses

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2

from nerite.config.schema import FieldSchema, MessageSchema, schema_of

KINDS = {
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_MESSAGE: "message",
}


def compare(ours: MessageSchema, theirs: Descriptor, seen: set[str]) -> None:
    if ours.name in seen:
        return
    seen.add(ours.name)
    assert ours.full_name == theirs.full_name
    printed_last = {"zero_data", "data_file"}
    assert [name for name in ours.fields if name not in printed_last] == [
        field.name for field in theirs.fields if field.name not in printed_last
    ]
    assert set(ours.fields) == set(theirs.fields_by_name)
    for field in theirs.fields:
        compare_field(ours.fields[field.name], field, seen)


def compare_field(ours: FieldSchema, theirs: FieldDescriptor, seen: set[str]) -> None:
    entry = theirs.message_type if theirs.message_type and theirs.message_type.GetOptions().map_entry else None
    assert (ours.key is not None) == (entry is not None)
    if entry is not None:
        assert ours.entry.full_name == entry.full_name
        assert ours.key == KINDS[entry.fields_by_name["key"].type]
        theirs = entry.fields_by_name["value"]
    else:
        assert ours.repeated == theirs.is_repeated
        oneof = theirs.containing_oneof
        assert ours.oneof == (oneof.name if oneof else "")
        assert set(ours.rivals) == {field.name for field in oneof.fields if field is not theirs} if oneof else True
        assert ours.optional == (theirs.has_presence and not theirs.is_repeated)
        assert ours.json_name == theirs.json_name
    assert ours.kind == KINDS[theirs.type]
    if theirs.enum_type is not None:
        assert ours.values == tuple(value.name for value in theirs.enum_type.values)
        assert [value.number for value in theirs.enum_type.values] == list(range(len(ours.values)))
        assert f"inference.{ours.type_name}" == theirs.enum_type.full_name
    if theirs.message_type is not None:
        compare(ours.message, theirs.message_type, seen)


def test_the_schema_is_that_of_triton() -> None:
    seen: set[str] = set()
    compare(schema_of(), model_config_pb2.ModelConfig.DESCRIPTOR, seen)
    assert len(seen) > 40


def check_class(schema: MessageSchema) -> None:
    """Check names, order and default values of the fields of a class."""
    made = schema.make({})
    declared = [(field.attribute, field.default) for field in schema.fields.values()]
    assert [(field.name, getattr(made, field.name)) for field in dataclasses.fields(made)] == declared
    for field in schema.fields.values():
        if field.kind == "message":
            check_class(field.message)


def test_the_classes_have_the_fields_of_the_schema() -> None:
    check_class(schema_of())


def test_a_name_is_found_wherever_it_is_declared() -> None:
    places = list(schema_of().places("preferred_batch_size"))
    assert places == [
        ("dynamic_batching", "preferred_batch_size"),
        ("sequence_batching", "oldest", "preferred_batch_size"),
    ]
