"""Printing a configuration in its text form (config.pbtxt), so that reading it again gives the same configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from nerite.config.field_types import show_float
from nerite.config.model_config import ModelConfig
from nerite.config.schema import FieldSchema, MessageSchema, schema_of

_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def to_text(config: ModelConfig) -> str:
    """Return ``config`` as the text of a config.pbtxt. What has its default value is left out."""
    return "".join(f"{line}\n" for line in _message(schema_of(ModelConfig), config))


def _message(schema: MessageSchema, message: Any) -> Iterator[str]:
    for declared in schema.fields.values():
        value = getattr(message, declared.attribute)
        if value != declared.default:
            yield from _field(declared, value)


def _field(declared: FieldSchema, value: Any) -> Iterator[str]:
    name = declared.name
    if declared.key is not None:
        entry = declared.entry
        for key, item in value.items():
            inner = [*_field(entry.fields["key"], key), *_field(entry.fields["value"], item)]
            yield from _braces(f"{name} {{", inner, "}")
    elif declared.kind == "message":
        if not declared.repeated:
            yield from _braces(f"{name} {{", _message(declared.message, value), "}")
        elif value:
            inner = []
            for index, item in enumerate(value):
                closer = "}" if index == len(value) - 1 else "},"
                inner += _braces("{", _message(declared.message, item), closer)
            yield from _braces(f"{name} [", inner, "]")
    elif declared.repeated:
        yield f"{name}: [ {', '.join(_scalar(declared, item) for item in value)} ]"
    else:
        yield f"{name}: {_scalar(declared, value)}"


def _braces(opener: str, inner: Iterable[str], closer: str) -> Iterator[str]:
    lines = list(inner)
    if not lines:
        yield f"{opener} {closer}"
        return
    yield opener
    for line in lines:
        yield f"  {line}"
    yield closer


def _scalar(declared: FieldSchema, value: Any) -> str:
    if declared.kind == "string":
        return '"' + "".join(_character(character) for character in value) + '"'
    if declared.kind == "bool":
        return "true" if value else "false"
    if declared.kind in ("float", "double"):
        return show_float(value, declared.kind)
    return str(value)


def _character(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    return character if character >= " " and character != "\x7f" else f"\\{ord(character):03o}"
