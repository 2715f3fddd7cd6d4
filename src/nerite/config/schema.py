"""The schema of a model's configuration, which drives the parsers and printers.

It is read from the descriptors of ``wire/model_config.proto``, the only place where a field is declared. The classes in
``model_config.py`` are made from the same file.
"""

from __future__ import annotations

import functools
import keyword
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, cast

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

from nerite.config import model_config
from nerite.config.mistake import nearest
from nerite.wire.schema import COMPILED, printed_last

PACKAGE: Final = "inference"

ScalarKind = Literal["int32", "int64", "uint32", "uint64", "bool", "float", "double", "string", "enum"]
Kind = ScalarKind | Literal["message"]

BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
"""The smallest and the largest value of each integer type."""


@dataclass(frozen=True, kw_only=True)
class FieldSchema:
    """A field of a message. The kind of a map is that of its values."""

    name: str
    json_name: str
    """Name in camelCase, which JSON may use as well."""
    attribute: str
    """Attribute of the dataclass; differs from the name for Python's keywords."""
    kind: Kind
    type_name: str
    """Name of the enum or message in the protobuf schema, without the package."""
    repeated: bool
    optional: bool
    """Absence is distinguished from the default value."""
    key: ScalarKind | None
    """Type of the keys of a map; ``None`` for other fields."""
    entry_name: str
    """Name of the message that is an entry of the map in text form."""
    values: tuple[str, ...]
    """Names of the values of an enum, by number."""
    oneof: str
    """Name of the oneof that the field is a member of."""
    rivals: tuple[str, ...]
    """The other members of the oneof."""

    @property
    def many(self) -> bool:
        """The field may occur more than once."""
        return self.repeated or self.key is not None

    @property
    def composite(self) -> bool:
        """A value is written in braces."""
        return self.kind == "message" or self.key is not None

    @property
    def default(self) -> Any:
        """The value of the field if it is not set."""
        if self.optional:
            return None
        if self.repeated:
            return ()
        if self.key is not None:
            return {}
        return self.values[0] if self.values else {"string": "", "bool": False}.get(self.kind, 0)

    @property
    def message(self) -> MessageSchema:
        """The schema of a field of kind ``message``."""
        return schema_of(self.type_name)

    @property
    def entry(self) -> MessageSchema:
        """The message that is an entry of a map in text form: a key and a value."""
        return schema_of(self.entry_name)


@dataclass(frozen=True)
class MessageSchema:
    """A message: its name in the protobuf schema and its fields in the order in which they are printed."""

    name: str
    fields: Mapping[str, FieldSchema]
    is_entry: bool = False
    """The message is an entry of a map."""

    @property
    def full_name(self) -> str:
        """The name as protobuf's own messages print it."""
        return f"{PACKAGE}.{self.name}"

    @cached_property
    def by_json_name(self) -> dict[str, FieldSchema]:
        """The fields by the two names that JSON may use: the field's own and its camelCase form."""
        return {schema.json_name: schema for schema in self.fields.values()} | dict(self.fields)

    def make(self, values: Mapping[str, Any]) -> Any:
        """Return an instance of the message's dataclass. ``values`` are by field name; lists become tuples."""
        arguments = {}
        for name, value in values.items():
            declared = self.fields[name]
            arguments[declared.attribute] = tuple(value) if declared.repeated else value
        return functools.reduce(getattr, self.name.split("."), cast(Any, model_config))(**arguments)

    def places(self, name: str) -> Iterator[tuple[str, ...]]:
        """Yield the paths, at or below this message, of the fields called ``name``."""
        for schema in self.fields.values():
            if schema.name == name:
                yield (schema.name,)
            if schema.kind == "message":
                for place in schema.message.places(name):
                    yield (schema.name, *place)


class _Declarations(NamedTuple):
    messages: dict[str, DescriptorProto]
    enums: dict[str, tuple[str, ...]]


@functools.cache
def _declarations() -> _Declarations:
    """Return the messages and the values of the enums of the file, by name without the package."""
    files = FileDescriptorSet.FromString(COMPILED.read_bytes()).file
    file = next(file for file in files if file.name.endswith("/model_config.proto"))
    messages = {message.name: message for message in file.message_type}
    enums = {enum.name: enum for enum in file.enum_type}
    todo = list(messages.items())
    for outer, message in todo:
        nested = {f"{outer}.{each.name}": each for each in message.nested_type}
        messages |= nested
        todo += nested.items()
        enums |= {f"{outer}.{enum.name}": enum for enum in message.enum_type}
    return _Declarations(messages, {name: tuple(value.name for value in enum.value) for name, enum in enums.items()})


@functools.cache
def schema_of(message: str = "ModelConfig") -> MessageSchema:
    """Return the schema of a message, which is called ``message`` in the .proto file. No message contains itself."""
    declared = _declarations().messages[message]
    fields = {field.name: _field_schema(declared, field) for field in sorted(declared.field, key=printed_last)}
    return MessageSchema(message, fields, declared.options.map_entry)


def _field_schema(message: DescriptorProto, declared: FieldDescriptorProto) -> FieldSchema:
    messages, enums = _declarations()
    type_name = _type_name(declared)
    is_map = type_name in messages and messages[type_name].options.map_entry
    key, value = messages[type_name].field if is_map else (None, declared)
    repeated = declared.label == FieldDescriptorProto.LABEL_REPEATED
    in_oneof = declared.HasField("oneof_index")
    members = [each.name for each in message.field if each.HasField("oneof_index")] if in_oneof else []
    return FieldSchema(
        name=declared.name,
        json_name=declared.json_name,
        attribute=declared.name + "_" * keyword.iskeyword(declared.name),
        kind=cast(Kind, _kind(value)),
        type_name=_type_name(value),
        repeated=repeated and not is_map,
        optional=not repeated and (in_oneof or _kind(value) == "message"),
        key=cast(ScalarKind, _kind(key)) if key is not None else None,
        entry_name=type_name if is_map else "",
        values=enums.get(_type_name(value), ()),
        oneof=message.oneof_decl[declared.oneof_index].name if in_oneof else "",
        rivals=tuple(name for name in members if name != declared.name),
    )


def _kind(declared: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(declared.type).removeprefix("TYPE_").lower()


def _type_name(declared: FieldDescriptorProto) -> str:
    return declared.type_name.removeprefix(f".{PACKAGE}.")


def single(value: float) -> float:
    """Return the 32-bit float nearest to ``value``; infinity if it is out of range."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def show_float(value: float, kind: str) -> str:
    """Print a number of kind ``float`` or ``double`` with the fewest digits that read back as the same number."""
    brief, full = (6, 9) if kind == "float" else (15, 17)
    text = f"{value:.{brief}g}"
    same = (single(float(text)) if kind == "float" else float(text)) == value
    return text if same else f"{value:.{full}g}"


def field_remedy(wrong: str, message: MessageSchema) -> tuple[str, str]:
    """Return the field of ``message`` that ``wrong`` was probably meant to be, or nothing, and the remedy."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", wrong).lower().replace("-", "_")
    if snake in message.fields:
        return snake, f"Write {snake}."
    if meant := nearest(snake, message.fields, 0.85):
        return meant, f"Did you mean {meant}?"
    places = [".".join(place[:-1]) or "the top level" for place in schema_of().places(snake)]
    if places:
        return "", f"'{snake}' is not part of this. It belongs to {' or '.join(places[:3])}."
    if meant := nearest(snake, message.fields):
        return meant, f"Did you mean {meant}?"
    return "", fields_of(message)


def fields_of(message: MessageSchema) -> str:
    """Return the remedy that lists the fields of ``message``."""
    return f"The fields here are: {', '.join(message.fields)}."
