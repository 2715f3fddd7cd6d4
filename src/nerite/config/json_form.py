"""The JSON form of a configuration, as in responses of ``GET /v2/models/M/config`` and in the override of a load.

Printing follows Triton: field names and order of the schema, default values included, enums as names, and 64-bit
integers as numbers. Reading accepts what protobuf's JSON form accepts: lenient JSON, camelCase names, numbers in
strings, enums in any case, one value for a list, null for an absent value. It refuses unknown fields. The texts of the
mistakes are protobuf's.
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

_INTEGER: Final = re.compile("-?[0-9]+")
_REAL: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LONGEST: Final = 40
"""Digits. A longer number is out of every range, and Python refuses to read thousands of digits."""
_HUGE: Final = 10**300
_NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(config: ModelConfig) -> dict[str, Any]:
    """Return ``config`` as JSON data: new objects, which the caller may change."""
    printed: dict[str, Any] = _print_message(schema_of(), config)
    return printed


def from_json(data: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration in ``data``. Raises ``InvalidArgument`` with the first mistake."""
    parsed = read_json(data)
    if parsed.mistakes:
        raise parsed.mistakes[0].as_error()
    return parsed.config


def parse_json(text: str, name: str = "") -> Parsed:
    """Parse JSON text; ``name`` describes its origin. Never raises."""
    try:
        data = parse_lenient_json(text)
    except ValueError as error:
        mistake = Mistake(message=str(error), file=name, remedy="Write the configuration as one JSON object.")
        return Parsed(ModelConfig(), ConfigSource(name), (mistake,), None)
    except RecursionError:
        mistake = Mistake(
            message="Message too deep. Max recursion depth reached.",
            file=name,
            remedy="Write the configuration with less nesting: no valid configuration is nested so deeply.",
        )
        return Parsed(ModelConfig(), ConfigSource(name), (mistake,), None)
    return read_json(data, name)


def read_json(data: object, name: str = "") -> Parsed:
    """Read a configuration from JSON data; ``name`` describes its origin. Never raises."""
    reader = _Reader()
    if isinstance(data, Mapping):
        config = reader.message(schema_of(), data, (), "")
    else:
        config = ModelConfig()
        reader.report(": Root element must be a message.", (), "Write the configuration as one JSON object.")
    source = ConfigSource(name)
    doubtful = frozenset(str(mistake.path[0]) for mistake in reader.mistakes if mistake.path)
    whole = all(mistake.path for mistake in reader.mistakes)
    return Parsed(config, source, tuple(source.place(reader.mistakes)), doubtful if whole else None)


def _print_message(schema: MessageSchema, message: Any) -> dict[str, Any]:
    printed: dict[str, Any] = {}
    for declared in schema.fields.values():
        value = getattr(message, declared.attribute)
        if value is None:
            continue
        if declared.key is not None:
            printed[declared.name] = {str(key): _print_one(declared, item) for key, item in value.items()}
        elif declared.repeated:
            printed[declared.name] = [_print_one(declared, item) for item in value]
        else:
            printed[declared.name] = _print_one(declared, value)
    return printed


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
    """Reads messages from JSON data and collects the mistakes.

    Each part has two paths: its own, and ``where``, in which protobuf counts the entries of maps.
    """

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def report(self, message: str, path: FieldPath, remedy: str) -> None:
        self.mistakes.append(Mistake(message=message, path=path, remedy=remedy))

    def message(self, schema: MessageSchema, data: Mapping[str, Any], path: FieldPath, where: str) -> Any:
        """Return the message in ``data``, as far as it can be read."""
        outer = f"({where})" if where else ""
        values: dict[str, Any] = {}
        seen: set[str] = set()
        for name, value in data.items():
            declared = schema.by_json_name.get(name)
            if declared is None:
                _, remedy = field_remedy(name, schema)
                found = f"{outer} {name}" if outer else name
                self.report(f"{found}: Cannot find field.", (*path, name), remedy)
                continue
            if value is None:
                continue
            rival = next((rival for rival in declared.rivals if rival in seen), "")
            if rival:
                self.report(
                    f"{outer}: invalid value oneof field '{declared.oneof}' is already set. "
                    f"Cannot set '{declared.name}' for type oneof",
                    (*path, name),
                    f"Keep one of '{rival}' and '{declared.name}'.",
                )
                continue
            seen.add(declared.name)
            inner = f"{where}.{declared.name}" if where else declared.name
            result = self.field(declared, value, (*path, declared.name), inner, outer)
            if result is not None:
                values[declared.name] = result
        return schema.make(values)

    def field(self, declared: FieldSchema, value: Any, path: FieldPath, where: str, outer: str) -> Any:
        """Return the value of a field; ``None`` if it has none. ``outer`` is the place of its message."""
        name = declared.name
        if declared.key is not None:
            if isinstance(value, Mapping):
                return self.entries(declared, value, path, where)
            kind = "a list" if isinstance(value, list) else "a value"
            message = f"{outer}: invalid value Cannot bind {kind} to map for field '{name}'. for type Map"
            self.report(message, path, f'Write an object: "{name}": {{ "key": … }}.')
            return None
        if declared.repeated:
            elements = value if isinstance(value, list) else [value]
            read = [
                self.one(declared, element, (*path, index), f"{where}[{index}]")
                for index, element in enumerate(elements)
                if element is not None
            ]
            return [element for element in read if element is not None]
        if isinstance(value, list):
            message = f"{outer} {name}: Proto field is not repeating, cannot start list.".lstrip()
            self.report(message, path, f"'{name}' takes one value: remove the brackets.")
            return None
        return self.one(declared, value, path, where)

    def entries(self, declared: FieldSchema, data: Mapping[str, Any], path: FieldPath, where: str) -> dict[Any, Any]:
        """Return a map."""
        entries = {}
        key_field = declared.entry.fields["key"]
        for index, (name, item) in enumerate(data.items()):
            key = self.one(key_field, name, (*path, name), f"{where}[{index}].key")
            read = self.one(declared, item, (*path, name), f"{where}[{index}].value")
            if key is not None and read is not None:
                entries[key] = read
        return entries

    def one(self, declared: FieldSchema, value: Any, path: FieldPath, where: str) -> Any:
        """Return one value; ``None``, after reporting it, if ``value`` is not of the type of ``declared``."""
        if declared.kind == "message":
            if isinstance(value, Mapping):
                return self.message(declared.message, value, path, where)
            kind, remedy = f"type.googleapis.com/{declared.message.full_name}", "Write an object: { … }."
        else:
            read = _read_scalar(declared, value)
            if read is not None:
                return read
            kind, remedy = f"TYPE_{declared.kind.upper()}", _remedy(declared, value)
            if declared.kind == "enum":
                kind = f"type.googleapis.com/{PACKAGE}.{declared.type_name}"
        shown = (
            "{}" if isinstance(value, Mapping) else "[]" if isinstance(value, list) else json.dumps(value, default=str)
        )
        self.report(f"({where}): invalid value {shown} for type {kind}", path, remedy)
        return None


def _remedy(declared: FieldSchema, value: Any) -> str:
    if declared.kind == "enum":
        meant = meant_value(value, declared.values) if isinstance(value, str) else ""
        return f"Write {meant}." if meant else f"Write one of {', '.join(declared.values)}."
    if declared.kind in BOUNDS:
        smallest, largest = BOUNDS[declared.kind]
        return f"Write a whole number from {smallest} to {largest}."
    return {"string": "Write a string.", "bool": "Write true or false."}.get(declared.kind, "Write a number.")


def _read_scalar(declared: FieldSchema, value: Any) -> Any:
    """Return ``value`` as the type of ``declared``; ``None`` if it is not of that type."""
    kind = declared.kind
    if kind == "string":
        return value if isinstance(value, str) and value == value.encode(errors="replace").decode() else None
    if kind == "bool":
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value))
    if isinstance(value, bool):
        return None
    if kind == "enum":
        if isinstance(value, int):
            return declared.values[value] if 0 <= value < len(declared.values) else None
        name = str(value).upper()
        return name if name in declared.values else None
    if kind in BOUNDS:
        number = _whole(value)
        smallest, largest = BOUNDS[kind]
        return number if number is not None and smallest <= number <= largest else None
    real = _real(value)
    return single(real) if real is not None and kind == "float" else real


def _whole(value: Any) -> int | None:
    if isinstance(value, int):
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value) if len(value) < _LONGEST else None
    number = _real(value)
    return int(number) if number is not None and number.is_integer() else None


def _real(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value) if abs(value) < _HUGE or isinstance(value, float) else None
    if isinstance(value, str) and _REAL.fullmatch(value):
        return float(value)
    return _NOT_FINITE.get(value) if isinstance(value, str) else None


# JSON as protobuf's parser accepts it, and so Triton for the configuration of a load: names without quotes, strings in
# single quotes, a comma after the last element. Anything else that is not JSON (comments, hexadecimal numbers, words as
# values) is refused, as it is there.

_SPACE: Final = re.compile(r"[ \t\n\v\f\r]*")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_WORDS: Final = {"true": True, "false": False, "null": None}
_PIECES: Final = {
    quote: re.compile(rf"([^{quote}\\]*)({quote}|\\u[0-9A-Fa-f]{{4}}|\\[^u])", re.DOTALL) for quote in "\"'"
}
"""Characters of a string up to its end or to an escape, by the quote of the string."""
_ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
"""Any other escaped character stands for itself."""
_MAX_DIGITS: Final = 4_000
"""Python refuses to read whole numbers that are much longer."""


def parse_lenient_json(text: str) -> Any:
    """Return the value of ``text``. Raises ``ValueError`` with the place of the mistake, and ``RecursionError``."""
    return _LenientParser(text).parse()


class _LenientParser:
    """Recursive descent parser. Between its calls ``_at`` is the index of the next token."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> Any:
        self._move(0)
        value = self._value()
        if self._at < len(self._text):
            raise self._expected("the end")
        return value

    def _move(self, at: int) -> None:
        """Continue behind the white space at ``at``."""
        space = _SPACE.match(self._text, at)
        assert space is not None
        self._at = space.end()

    def _took(self, symbol: str) -> bool:
        """Take the next token if it is ``symbol``; return whether it is."""
        taken = self._text.startswith(symbol, self._at)
        if taken:
            self._move(self._at + 1)
        return taken

    def _value(self) -> Any:
        if self._took("{"):
            return self._object()
        if self._took("["):
            return self._array()
        if (string := self._string()) is not None:
            return string
        number = _NUMBER.match(self._text, self._at)
        if number is not None and len(number[0]) < _MAX_DIGITS:
            self._move(number.end())
            whole = number[1] is None and number[2] is None
            return int(number[0]) if whole else float(number[0])
        word = _NAME.match(self._text, self._at)
        if word is None or word[0] not in _WORDS:
            raise self._expected("a value")
        self._move(word.end())
        return _WORDS[word[0]]

    def _object(self) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._took("}"):
            name = self._name()
            if not self._took(":"):
                raise self._expected("':'")
            members[name] = self._value()
            self._take_comma("}")
        return members

    def _array(self) -> list[Any]:
        elements = []
        while not self._took("]"):
            elements.append(self._value())
            self._take_comma("]")
        return elements

    def _take_comma(self, closer: str) -> None:
        """Take a comma. Before ``closer`` there may be none."""
        if not self._took(",") and not self._text.startswith(closer, self._at):
            raise self._expected(f"',' or '{closer}'")

    def _name(self) -> str:
        if (string := self._string()) is not None:
            return string
        name = _NAME.match(self._text, self._at)
        if name is None or name[0] in _WORDS:
            raise self._expected("the name of a field")
        self._move(name.end())
        return name[0]

    def _string(self) -> str | None:
        """Return a string; ``None`` if none begins here."""
        quote, at = self._text[self._at : self._at + 1], self._at + 1
        if not quote or quote not in _PIECES:
            return None
        pieces: list[str] = []
        while (piece := _PIECES[quote].match(self._text, at)) is not None:
            plain, end = piece.groups()
            pieces.append(plain)
            at = piece.end()
            if end == quote:
                self._move(at)
                # Two successive halves of a surrogate pair are one character.
                return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
            pieces.append(chr(int(end[2:], 16)) if len(end) > 2 else _ESCAPES.get(end[1], end[1]))
        raise self._expected("the end of the string, which begins here,")

    def _expected(self, expected: str) -> ValueError:
        text, at = self._text, self._at
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        found = repr(text[at : at + 20]) if at < len(text) else "nothing"
        return ValueError(f"Expected {expected} at line {line} column {column}, got {found}")
