"""Loads the compiled schema into a private descriptor pool, and looks up its messages, enums and methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

COMPILED = Path(__file__).with_name("descriptors.pb")
"""Serialized FileDescriptorSet of all ``.proto`` files in this directory; written by ``tools/build_wire.py``."""


@dataclass(frozen=True)
class Method:
    """A remote call: its path, and the types of its messages."""

    path: str
    """The ``:path`` header of HTTP/2, for example ``/inference.GRPCInferenceService/ModelInfer``."""
    request: type[Message]
    response: type[Message]
    client_streaming: bool
    server_streaming: bool


@cache
def pool() -> DescriptorPool:
    """Return the private pool. The first call fills it, which takes a few milliseconds."""
    private = DescriptorPool()
    for file in FileDescriptorSet.FromString(COMPILED.read_bytes()).file:
        private.AddSerializedFile(file.SerializeToString())
    return private


def members_of(file_name: str) -> Callable[[str], Any]:
    """Return ``__getattr__`` for the module of one ``.proto`` file.

    It returns message classes, enums and enum values, and raises ``AttributeError`` for any other name.
    """

    @cache
    def member(name: str) -> Any:
        file = pool().FindFileByName(f"nerite/wire/{file_name}.proto")
        if message := file.message_types_by_name.get(name):
            return GetMessageClass(message)
        if enum := file.enum_types_by_name.get(name):
            return EnumTypeWrapper(enum)
        for enum in file.enum_types_by_name.values():
            if value := enum.values_by_name.get(name):
                return value.number
        raise AttributeError(f"{file_name}.proto has no message or enum named {name!r}")

    return member


def printed_last(declared: FieldDescriptorProto) -> bool:
    """Return True for a scalar member of a oneof. Triton prints those after the other fields of a message."""
    return declared.HasField("oneof_index") and declared.type != FieldDescriptorProto.TYPE_MESSAGE


@cache
def methods() -> dict[str, Method]:
    """Return every remote call of every service by its path."""
    found = {}
    for file_name in ("grpc_service", "health"):
        file = pool().FindFileByName(f"nerite/wire/{file_name}.proto")
        for service in file.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                found[path] = Method(
                    path,
                    GetMessageClass(method.input_type),
                    GetMessageClass(method.output_type),
                    method.client_streaming,
                    method.server_streaming,
                )
    return found
