"""Compiles src/nerite/wire/*.proto into the descriptors used at run time and the types that mypy reads.

The classes of a model's configuration, ``src/nerite/config/model_config.py``, are made from the same files.
"""

from __future__ import annotations

import keyword
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from nerite.wire.schema import printed_last

SOURCE = Path(__file__).parents[1] / "src"
WIRE = SOURCE / "nerite" / "wire"
CONFIG_CLASSES = SOURCE / "nerite" / "config" / "model_config.py"
HEADER = """\
# Made by tools/build_wire.py from {name}.proto. Do not edit.
# ruff: noqa
# fmt: off
# mypy: disable-error-code="type-arg, no-untyped-def"
"""
CONFIG_HEADER: Final = '''\
"""A model's configuration as typed values: a frozen dataclass for each message of ``wire/model_config.proto``.

- The order of the fields is the order in which a configuration is printed.
- A field that is not set has the zero value of its type. A member that can be absent (a message, or a member of a
  oneof) is ``None`` then. At most one member of a oneof is not ``None``.
- Lists are tuples and objects are frozen: a configuration is a value, and is changed by making another one with
  ``dataclasses.replace``. Do not change the dictionaries either.
- An enum is the name of its value.
- A trailing underscore (``global_``) distinguishes a name from Python's keywords and is not part of it.
"""
# Made by tools/build_wire.py from model_config.proto. Do not edit.
# ruff: noqa
# fmt: off

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
'''
PYTHON: Final = {
    FieldDescriptorProto.TYPE_INT32: ("int", "0"),
    FieldDescriptorProto.TYPE_INT64: ("int", "0"),
    FieldDescriptorProto.TYPE_UINT32: ("int", "0"),
    FieldDescriptorProto.TYPE_UINT64: ("int", "0"),
    FieldDescriptorProto.TYPE_FLOAT: ("float", "0.0"),
    FieldDescriptorProto.TYPE_DOUBLE: ("float", "0.0"),
    FieldDescriptorProto.TYPE_BOOL: ("bool", "False"),
    FieldDescriptorProto.TYPE_STRING: ("str", '""'),
}
"""Type and default value in Python of each scalar type."""


class ConfigClasses:
    """The classes of one file, with the comments of the .proto file as docstrings."""

    def __init__(self, file: FileDescriptorProto) -> None:
        """``file`` includes its source info."""
        self._package = file.package
        self._file = file
        self._comments = {
            tuple(location.path): " ".join(location.leading_comments.split()).replace("`", "``")
            for location in file.source_code_info.location
        }
        self._first_values: dict[str, str] = {}
        """The default value of each enum, by its name in Python."""

    def source(self) -> str:
        """Return the source of the module."""
        lines = [*self._enums(self._file.enum_type, "")]
        for index, message in enumerate(self._file.message_type):
            lines += ["", "", *self._class(message, "", (4, index))]
        return CONFIG_HEADER + "\n" + "\n".join(lines) + "\n"

    def _class(self, message: DescriptorProto, outer: str, path: tuple[int, ...]) -> Iterator[str]:
        name = outer + message.name
        yield "@dataclass(frozen=True, slots=True, kw_only=True)"
        yield f"class {message.name}:"
        yield f'    """{self._comments[path]}"""'
        for line in self._body(message, f"{name}.", path):
            yield f"    {line}" if line else ""

    def _body(self, message: DescriptorProto, outer: str, path: tuple[int, ...]) -> Iterator[str]:
        yield from self._enums(message.enum_type, outer)
        entries = {}
        for index, nested in enumerate(message.nested_type):
            if nested.options.map_entry:
                entries[f".{self._package}.{outer}{nested.name}"] = nested
            else:
                yield ""
                yield from self._class(nested, outer, (*path, 3, index))
        if message.nested_type and len(entries) < len(message.nested_type):
            yield ""
        for index, declared in sorted(enumerate(message.field), key=lambda each: printed_last(each[1])):
            attribute = declared.name + "_" * keyword.iskeyword(declared.name)
            yield f"{attribute}: {self._annotation(declared, entries)}"
            if comment := self._comments.get((*path, 2, index)):
                yield f'"""{comment}"""'

    def _enums(self, enums: Iterable[EnumDescriptorProto], outer: str) -> Iterator[str]:
        for enum in enums:
            self._first_values[f"{outer}{enum.name}"] = f'"{enum.value[0].name}"'
            names = ", ".join(f'"{value.name}"' for value in enum.value)
            yield f"{enum.name} = Literal[{names}]"

    def _annotation(self, declared: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> str:
        """Return the type and the default value of a field."""
        if entry := entries.get(declared.type_name):
            key, value = entry.field
            return f"dict[{self._type(key)[0]}, {self._type(value)[0]}] = field(default_factory=dict)"
        name, default = self._type(declared)
        if declared.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"tuple[{name}, ...] = ()"
        if declared.type == FieldDescriptorProto.TYPE_MESSAGE or declared.HasField("oneof_index"):
            return f"{name} | None = None"
        return f"{name} = {default}"

    def _type(self, declared: FieldDescriptorProto) -> tuple[str, str]:
        if declared.type in PYTHON:
            return PYTHON[declared.type]
        name = declared.type_name.removeprefix(f".{self._package}.")
        return name, self._first_values.get(name, "")


def compiled() -> dict[Path, bytes]:
    """Return each file to be written, with its content. Raises ``CalledProcessError`` if a .proto is wrong."""
    protos = sorted(WIRE.glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        options = [f"-I{SOURCE}", f"--pyi_out={out}", f"--descriptor_set_out={out / 'set'}", "--include_source_info"]
        names = [str(path.relative_to(SOURCE)) for path in protos]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *names], check=True)
        descriptors = FileDescriptorSet.FromString((out / "set").read_bytes())
        model_config = next(file for file in descriptors.file if file.name.endswith("/model_config.proto"))
        files = {CONFIG_CLASSES: ConfigClasses(model_config).source().encode()}
        for file in descriptors.file:
            file.ClearField("source_code_info")
        files |= {WIRE / "descriptors.pb": descriptors.SerializeToString(deterministic=True)}
        for path in protos:
            stub = (out / "nerite" / "wire" / f"{path.stem}_pb2.pyi").read_text()
            # protoc names its modules x_pb2; ours are named after the file.
            for other in protos:
                stub = stub.replace(f"{other.stem}_pb2", other.stem)
            files[path.with_suffix(".pyi")] = (HEADER.format(name=path.stem) + stub).encode()
    return files


def main() -> None:
    """Write what is out of date, and name it."""
    for path, content in compiled().items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
            print(f"wrote {path.relative_to(SOURCE.parent)}")


if __name__ == "__main__":
    main()
