"""The shape of the configuration classes as data: what the parsers and printers are driven by.

Derived once from the dataclasses and their annotations, so that a field is declared in one place only.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

PACKAGE: Final = "inference"

ScalarKind = Literal["int32", "int64", "uint32", "uint64", "bool", "float", "double", "string"]
Kind = ScalarKind | Literal["enum", "message"]


@dataclass(frozen=True)
class FieldSchema:
    """One field of a message."""

    name: str
    owner: str
    """The name of the message that it is a field of."""
    attribute: str
    """Of the dataclass; the name, but for Python's keywords."""
    kind: Kind
    repeated: bool = False
    optional: bool = False
    """Absence is told apart from the default value."""
    key: ScalarKind | None = None
    """The type of the keys; None unless the field is a map."""
    values: tuple[str, ...] = ()
    """The names of an enum's values, by number."""
    enum: str = ""
    message_type: type[Any] | None = None
    oneof: str = ""
    """The oneof that the field is a member of."""
    rivals: tuple[str, ...] = ()
    """The other members."""

    @property
    def many(self) -> bool:
        """The field may occur more than once."""
        return self.repeated or self.key is not None

    @property
    def default(self) -> Any:
        """The value of the field where nothing is given."""
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
        assert self.message_type is not None
        return schema_of(self.message_type)

    @cached_property
    def entry(self) -> MessageSchema:
        """The message that an entry of a map is in text form: a key and a value."""
        assert self.key is not None
        name = "".join(part.capitalize() for part in self.name.split("_"))
        owner = f"{self.owner}.{name}Entry"
        key = FieldSchema("key", owner, "key", self.key)
        value = dataclasses.replace(self, name="value", owner=owner, attribute="value", key=None)
        return MessageSchema(owner, dict, {"key": key, "value": value})


@dataclass(frozen=True)
class MessageSchema:
    """A message: its name in the protobuf schema and its fields in the order of declaration."""

    name: str
    type: type[Any]
    fields: Mapping[str, FieldSchema]

    @property
    def full_name(self) -> str:
        """The name as protobuf's own messages print it."""
        return f"{PACKAGE}.{self.name}"

    @cached_property
    def by_json_name(self) -> dict[str, FieldSchema]:
        """The fields under the two names that JSON may use: the field's own and its camelCase form."""
        named = {camel_case(name): schema for name, schema in self.fields.items()}
        return named | dict(self.fields)

    def places(self, name: str) -> Iterator[tuple[str, ...]]:
        """Yield where, at or below this message, a field called ``name`` is declared: the names that lead there."""
        for schema in self.fields.values():
            if schema.name == name:
                yield (schema.name,)
            if schema.kind == "message":
                for place in schema.message.places(name):
                    yield (schema.name, *place)


def camel_case(name: str) -> str:
    """Return the name that protobuf's JSON form derives from a field name: ``max_batch_size``, ``maxBatchSize``."""
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)


def schema_of(message_type: type[Any]) -> MessageSchema:
    """Return the schema of a configuration class. The classes do not nest in themselves, so neither do schemas."""
    known = _schemas.get(message_type)
    if known is None:
        known = _schemas[message_type] = _derive(message_type)
    return known


_schemas: dict[type[Any], MessageSchema] = {}


def _derive(message_type: type[Any]) -> MessageSchema:
    message = getattr(message_type, "MESSAGE", message_type.__name__)
    hints = get_type_hints(message_type, include_extras=True)
    oneofs: dict[str, tuple[str, ...]] = getattr(message_type, "ONEOFS", {})
    fields = {}
    for declared in dataclasses.fields(message_type):
        name = declared.name.rstrip("_")
        oneof = next((oneof for oneof, members in oneofs.items() if name in members), "")
        rivals = tuple(member for member in oneofs.get(oneof, ()) if member != name)
        traits = _traits(hints[declared.name])
        fields[name] = FieldSchema(name, message, declared.name, oneof=oneof, rivals=rivals, **traits)
    return MessageSchema(message, message_type, fields)


def _traits(hint: Any) -> dict[str, Any]:
    """Return what an annotation says about a field, as arguments of ``FieldSchema``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return _traits(inner) | {"optional": True}
    if origin is tuple:
        return _traits(arguments[0]) | {"repeated": True}
    if origin is dict:
        return _traits(arguments[1]) | {"key": _traits(arguments[0])["kind"]}
    if origin is Annotated:
        base, note = arguments
        if get_origin(base) is Literal:
            return {"kind": "enum", "values": get_args(base), "enum": note}
        return {"kind": note}
    if dataclasses.is_dataclass(hint):
        return {"kind": "message", "message_type": hint}
    return {"kind": {str: "string", bool: "bool"}[hint]}


# The scalar types of the configuration schema: Python types that also say their width on the wire.

Int32 = Annotated[int, "int32"]
Int64 = Annotated[int, "int64"]
Uint32 = Annotated[int, "uint32"]
Uint64 = Annotated[int, "uint64"]
Single = Annotated[float, "float"]
Double = Annotated[float, "double"]

DataTypeName = Annotated[
    Literal[
        "TYPE_INVALID",
        "TYPE_BOOL",
        "TYPE_UINT8",
        "TYPE_UINT16",
        "TYPE_UINT32",
        "TYPE_UINT64",
        "TYPE_INT8",
        "TYPE_INT16",
        "TYPE_INT32",
        "TYPE_INT64",
        "TYPE_FP16",
        "TYPE_FP32",
        "TYPE_FP64",
        "TYPE_STRING",
        "TYPE_BF16",
    ],
    "DataType",
]
"""An enum is a ``Literal`` whose order is its numbering; the annotation is its name in the protobuf schema."""

BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
"""The smallest and the largest value of each integer type."""


def single(value: float) -> float:
    """Return the 32-bit float nearest to ``value``, infinity where it is too large for one."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def show_float(value: float, kind: str) -> str:
    """Print a number of kind ``float`` or ``double`` with no more digits than it takes to read the same one back."""
    brief, full = (6, 9) if kind == "float" else (15, 17)
    text = f"{value:.{brief}g}"
    same = (single(float(text)) if kind == "float" else float(text)) == value
    return text if same else f"{value:.{full}g}"
