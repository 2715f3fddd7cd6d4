"""A configuration in its JSON form: what ``GET /v2/models/M/config`` answers and what a load may override.

Printing follows Triton: the schema's field names and order, default values printed, enums as names, 64-bit integers as
numbers. Reading accepts what protobuf's JSON form does: lenient JSON, camelCase names, numbers in strings, enums in any
case, one value for a list, null for nothing; and refuses unknown fields. The texts of the mistakes are protobuf's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from nerite.config.mistake import ConfigSource, FieldPath, Mistake, meant_value
from nerite.config.model_config import ModelConfig
from nerite.config.schema import (
    BOUNDS,
    PACKAGE,
    FieldSchema,
    MessageSchema,
    field_remedy,
    schema_of,
    show_float,
    single,
)
from nerite.config.text import Parsed

# JSON as protobuf's parser takes it: names without quotes, strings in single ones, a comma behind the last element.
#
# Triton reads the configuration of a load so. What else JSON does not have (comments, numbers in hexadecimal, words
# for values) is refused, as it is there.

_SPACE: Final = re.compile(r"[ \t\n\v\f\r]*")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_WORDS: Final = {"true": True, "false": False, "null": None}
_PIECES: Final = {
    quote: re.compile(rf"([^{quote}\\]*)({quote}|\\u[0-9A-Fa-f]{{4}}|\\[^u])", re.DOTALL) for quote in "\"'"
}
_ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
"""Any other character stands for itself."""
_LONGEST: Final = 4_000
"""Digits of a whole number: Python refuses to read many more."""


def parse_lenient_json(text: str) -> Any:
    """Return the value that ``text`` is.

    Raises ``ValueError`` with the place of what is wrong, and ``RecursionError``.
    """
    value, at = _value(text, _space(text, 0))
    if at < len(text):
        raise _wrong("the end", text, at)
    return value


def _value(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins at a place, and where the next thing begins."""
    first = text[at : at + 1]
    if first == "{":
        return _object(text, _space(text, at + 1))
    if first == "[":
        return _array(text, _space(text, at + 1))
    if first and first in _PIECES:
        return _string(text, at)
    if (number := _NUMBER.match(text, at)) is not None and len(number[0]) < _LONGEST:
        whole = number[1] is None and number[2] is None
        return int(number[0]) if whole else float(number[0]), _space(text, number.end())
    word = _NAME.match(text, at)
    if word is None or word[0] not in _WORDS:
        raise _wrong("a value", text, at)
    return _WORDS[word[0]], _space(text, word.end())


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    while not text.startswith("}", at):
        name, at = _name(text, at)
        if not text.startswith(":", at):
            raise _wrong("':'", text, at)
        members[name], at = _value(text, _space(text, at + 1))
        at = _next(text, at, "}")
    return members, _space(text, at + 1)


def _array(text: str, at: int) -> tuple[list[Any], int]:
    elements = []
    while not text.startswith("]", at):
        element, at = _value(text, at)
        elements.append(element)
        at = _next(text, at, "]")
    return elements, _space(text, at + 1)


def _next(text: str, at: int, end: str) -> int:
    """Return where the next element begins, or where the ``end`` is."""
    if text.startswith(",", at):
        return _space(text, at + 1)
    if not text.startswith(end, at):
        raise _wrong(f"',' or '{end}'", text, at)
    return at


def _name(text: str, at: int) -> tuple[str, int]:
    if text[at : at + 1] in ('"', "'"):
        return _string(text, at)
    name = _NAME.match(text, at)
    if name is None or name[0] in _WORDS:
        raise _wrong("the name of a field", text, at)
    return name[0], _space(text, name.end())


def _string(text: str, at: int) -> tuple[str, int]:
    quote, began = _PIECES[text[at]], at
    pieces: list[str] = []
    at += 1
    while (piece := quote.match(text, at)) is not None:
        plain, end = piece.groups()
        pieces.append(plain)
        at = piece.end()
        if end[0] != "\\":
            # Halves of a character that come one after the other are one.
            whole = "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
            return whole, _space(text, at)
        pieces.append(chr(int(end[2:], 16)) if len(end) > 2 else _ESCAPES.get(end[1], end[1]))
    raise _wrong("the end of the string, which begins here,", text, began)


def _space(text: str, at: int) -> int:
    """Return where what is no white space begins."""
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _wrong(expected: str, text: str, at: int) -> ValueError:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    found = repr(text[at : at + 20]) if at < len(text) else "nothing"
    return ValueError(f"Expected {expected} at line {line} column {column}, got {found}")


_ROOT: Final = schema_of()
_INTEGER: Final = re.compile("-?[0-9]+")
_JSON_FORM_NUMBER: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_JSON_FORM_LONGEST: Final = 40
"""Digits: a number with more is out of every range, and Python refuses to read thousands of them."""
_HUGE: Final = 10**300
_NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(config: ModelConfig) -> dict[str, Any]:
    """Return ``config`` as JSON data: new objects, which the caller may change."""
    printed: dict[str, Any] = _print_message(_ROOT, config)
    return printed


def from_json(data: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration that ``data`` says. Raises ``InvalidArgument`` with the first thing that is wrong."""
    parsed = read_json(data)
    if parsed.mistakes:
        raise parsed.mistakes[0].as_error()
    return parsed.config


def parse_json(text: str, name: str = "") -> Parsed:
    """Read the JSON ``text``, which ``name`` says the origin of. Never raises."""
    try:
        data = parse_lenient_json(text)
    except ValueError as error:
        mistake = Mistake(message=str(error), file=name, remedy="Write the configuration as one JSON object.")
        return Parsed(ModelConfig(), ConfigSource(name), (mistake,), None)
    except RecursionError:
        mistake = Mistake(
            message="Message too deep. Max recursion depth reached.",
            file=name,
            remedy="Write the configuration with less nesting: none that is right is so deep.",
        )
        return Parsed(ModelConfig(), ConfigSource(name), (mistake,), None)
    return read_json(data, name)


def read_json(data: object, name: str = "") -> Parsed:
    """Read a configuration from JSON data, which ``name`` says the origin of. Never raises."""
    reader = _Reader()
    if isinstance(data, Mapping):
        config = reader.message(_ROOT, data, (), "")
    else:
        config = ModelConfig()
        reader.report(": Root element must be a message.", (), "Write the configuration as one JSON object.")
    source = ConfigSource(name)
    doubtful = frozenset(str(mistake.path[0]) for mistake in reader.mistakes if mistake.path)
    whole = all(mistake.path for mistake in reader.mistakes)
    return Parsed(config, source, tuple(source.place(reader.mistakes)), doubtful if whole else None)


def _print_message(schema: MessageSchema, message: Any) -> dict[str, Any]:
    printed = {}
    for declared in schema.fields.values():
        value = getattr(message, declared.attribute)
        if value is not None:
            printed[declared.name] = _print_field(declared, value)
    return printed


def _print_field(declared: FieldSchema, value: Any) -> Any:
    if declared.key is not None:
        return {str(key): _print_one(declared, item) for key, item in value.items()}
    if declared.repeated:
        return [_print_one(declared, item) for item in value]
    return _print_one(declared, value)


def _print_one(declared: FieldSchema, value: Any) -> Any:
    if declared.kind == "message":
        return _print_message(declared.message, value)
    if declared.kind in ("float", "double"):
        if not math.isfinite(value):
            return next(name for name, other in _NOT_FINITE.items() if str(other) == str(value))
        text = show_float(value, declared.kind)
        return int(text) if _INTEGER.fullmatch(text) else float(text)
    return value


class _Reader:
    """Reads messages from JSON data and gathers what is wrong with it.

    Each part has two paths: its own, and ``where``, in which protobuf counts the entries of maps.
    """

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def report(self, message: str, path: FieldPath, remedy: str) -> None:
        self.mistakes.append(Mistake(message=message, path=path, remedy=remedy))

    def message(self, schema: MessageSchema, data: Mapping[str, Any], path: FieldPath, where: str) -> Any:
        """Return the message that ``data`` says, as far as it can be read."""
        values: dict[str, Any] = {}
        seen: set[str] = set()
        for name, value in data.items():
            declared = schema.by_json_name.get(name)
            if declared is None:
                _, remedy = field_remedy(name, schema)
                self.report(f"{_in(where)}{name}: Cannot find field.", (*path, name), remedy)
                continue
            if value is None:
                continue
            rival = next((rival for rival in declared.rivals if rival in seen), "")
            if rival:
                self.report(
                    f"{_at(where)}: invalid value oneof field '{declared.oneof}' is already set. "
                    f"Cannot set '{declared.name}' for type oneof",
                    (*path, name),
                    f"Keep one of '{rival}' and '{declared.name}'.",
                )
                continue
            seen.add(declared.name)
            inner = f"{where}.{declared.name}" if where else declared.name
            result = self.field(declared, value, (*path, declared.name), inner, where)
            if result is not None:
                values[declared.name] = result
        return schema.make(values)

    def field(self, declared: FieldSchema, value: Any, path: FieldPath, where: str, outer: str) -> Any:
        """Return the value of a field, None where there is none."""
        if declared.key is not None:
            return self.entries(declared, value, path, where, outer)
        if declared.repeated:
            elements = value if isinstance(value, list) else [value]
            read = [
                self.one(declared, element, (*path, index), f"{where}[{index}]")
                for index, element in enumerate(elements)
                if element is not None
            ]
            return tuple(element for element in read if element is not None)
        if isinstance(value, list):
            message = f"{_in(outer)}{declared.name}: Proto field is not repeating, cannot start list."
            self.report(message, path, f"'{declared.name}' takes one value: remove the brackets.")
            return None
        return self.one(declared, value, path, where)

    def entries(self, declared: FieldSchema, value: Any, path: FieldPath, where: str, outer: str) -> Any:
        """Return a map."""
        if not isinstance(value, Mapping):
            kind = "a list" if isinstance(value, list) else "a value"
            message = f"{_at(outer)}: invalid value Cannot bind {kind} to map for field '{declared.name}'. for type Map"
            self.report(message, path, f'Write an object: "{declared.name}": {{ "key": … }}.')
            return None
        entries = {}
        key_field = declared.entry.fields["key"]
        for index, (name, item) in enumerate(value.items()):
            key = self.one(key_field, name, (*path, name), f"{where}[{index}].key")
            read = self.one(declared, item, (*path, name), f"{where}[{index}].value")
            if key is not None and read is not None:
                entries[key] = read
        return entries

    def one(self, declared: FieldSchema, value: Any, path: FieldPath, where: str) -> Any:
        """Return one value; None, after reporting it, where ``value`` is not of the type of ``declared``."""
        if declared.kind == "message":
            if isinstance(value, Mapping):
                return self.message(declared.message, value, path, where)
            kind, remedy = f"type.googleapis.com/{declared.message.full_name}", "Write an object: { … }."
        else:
            read = _read_scalar(declared, value)
            if read is not None:
                return read
            kind, remedy = f"TYPE_{declared.kind.upper()}", _remedy(declared)
            if declared.kind == "enum":
                kind = f"type.googleapis.com/{PACKAGE}.{declared.type_name}"
                meant = meant_value(value, declared.values) if isinstance(value, str) else ""
                remedy = f"Write {meant}." if meant else f"Write one of {', '.join(declared.values)}."
        shown = (
            "{}" if isinstance(value, Mapping) else "[]" if isinstance(value, list) else json.dumps(value, default=str)
        )
        self.report(f"({where}): invalid value {shown} for type {kind}", path, remedy)
        return None


def _at(where: str) -> str:
    return f"({where})" if where else ""


def _in(where: str) -> str:
    return f"({where}) " if where else ""


def _remedy(declared: FieldSchema) -> str:
    if declared.kind in BOUNDS:
        smallest, largest = BOUNDS[declared.kind]
        return f"Write a whole number from {smallest} to {largest}."
    return {"string": "Write a string.", "bool": "Write true or false."}.get(declared.kind, "Write a number.")


def _read_scalar(declared: FieldSchema, value: Any) -> Any:
    """Return ``value`` as the type of ``declared``, or None where it is not of that type."""
    kind = declared.kind
    if kind == "string":
        return value if isinstance(value, str) and value == value.encode(errors="replace").decode() else None
    if kind == "bool":
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value))
    if isinstance(value, bool):
        return None
    if kind == "enum":
        return _read_enum(declared, value)
    if kind in BOUNDS:
        number = _whole(value)
        smallest, largest = BOUNDS[kind]
        return number if number is not None and smallest <= number <= largest else None
    real = _real(value)
    return single(real) if real is not None and kind == "float" else real


def _read_enum(declared: FieldSchema, value: Any) -> str | None:
    if isinstance(value, int):
        return declared.values[value] if 0 <= value < len(declared.values) else None
    name = str(value).upper()
    return name if name in declared.values else None


def _whole(value: Any) -> int | None:
    if isinstance(value, int):
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value) if len(value) < _JSON_FORM_LONGEST else None
    number = _real(value)
    return int(number) if number is not None and number.is_integer() else None


def _real(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value) if abs(value) < _HUGE or isinstance(value, float) else None
    if isinstance(value, str) and _JSON_FORM_NUMBER.fullmatch(value):
        return float(value)
    return _NOT_FINITE.get(value) if isinstance(value, str) else None
