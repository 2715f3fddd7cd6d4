"""Prints a configuration in its text form (config.pbtxt), and edits single fields of an existing text.

Parsing the printed text returns the same configuration. protobuf's own printer is not used: this one writes lists and
numbers as people do in config.pbtxt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Final

from nerite.config.model_config import ModelConfig
from nerite.config.scanner import CLOSERS, OPENERS, TextToken, Tokenizer
from nerite.config.schema import FieldSchema, MessageSchema, schema_of, show_float

_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def to_text(config: ModelConfig) -> str:
    """Return ``config`` as the text of a config.pbtxt. Default values are left out."""
    return "".join(f"{line}\n" for line in _message(schema_of(), config))


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


def edited(text: str, old: ModelConfig, new: ModelConfig) -> str:
    """Return ``text``, the text of ``old`` without mistakes, changed to that of ``new``.

    A changed field keeps its place, a new one is appended. The rest, including comments, is kept as it is.
    """
    spans = list(_spans(text))
    cuts: list[tuple[int, int, str]] = []
    added = ""
    for field in dataclasses.fields(ModelConfig):
        value = getattr(new, field.name)
        if value == getattr(old, field.name):
            continue
        printed = to_text(dataclasses.replace(ModelConfig(), **{field.name: value}))
        places = [(start, end) for name, start, end in spans if name == field.name]
        if not places:
            added += f"\n{printed}" if printed else ""
        for number, (start, end) in enumerate(places):
            written = "" if number else printed.rstrip("\n")
            # A line that becomes empty is removed.
            whole = not written and text[end : end + 1] == "\n" and text[:start][-1:] in ("", "\n")
            cuts.append((start, end + whole, written))
    for start, end, written in sorted(cuts, reverse=True):
        text = text[:start] + written + text[end:]
    if added and text and not text.endswith("\n"):
        text += "\n"
    return text + (added if text else added.removeprefix("\n"))


def _spans(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of each top-level field."""
    starts = [0]
    starts += [place + 1 for place, character in enumerate(text) if character == "\n"]

    def offset(token: TextToken) -> int:
        return starts[token.position.line - 1] + token.position.column - 1

    depth, name, start, end = 0, "", 0, 0
    previous = ""
    for token in Tokenizer(text).tokens:
        if depth == 0 and token.kind in ("identifier", "end") and previous != ":":
            if name:
                yield name, start, end
            name, start = token.text, offset(token)
        if token.kind == "symbol":
            depth += (token.text in OPENERS) - (token.text in CLOSERS)
        previous = token.text
        end = offset(token) + len(token.text)
