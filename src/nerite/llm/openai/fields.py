"""Reads the fields of a JSON body one by one, and reports errors in OpenAI's format, naming the field at fault."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import orjson

from nerite.config.mistake import nearest
from nerite.core.client_text import MAX_DEPTH, nested_deeper
from nerite.core.tensor import Buffer
from nerite.core.text import name_error, quoted_text, text_error
from nerite.llm.openai.errors import ApiError

_SMALL: Final = 64 * 1024
"""Bytes of a body without prompts and files."""

_KINDS: Final = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def wrong_type(param: str, expected: str, value: Any) -> ApiError:
    """Return the error for a value of the wrong type."""
    got = _KINDS.get(type(value), type(value).__name__)
    return ApiError(f"Invalid type for '{param}': expected {expected}, but got {got} instead.", param, "invalid_type")


def wrong_value(param: str, expected: str, value: Any) -> ApiError:
    """Return the error for an invalid value."""
    return ApiError(f"Invalid value for '{param}': {reprlib.repr(value)}. Expected {expected}.", param, "invalid_value")


def check_count(param: str, values: Collection[Any], most: int) -> None:
    """Reject an array or object with too many members, in OpenAI's words."""
    count = len(values)
    if count <= most:
        return
    if isinstance(values, dict):
        says = f"too many properties. Expected an object with at most {most} properties, but got an object with {count}"
        raise ApiError(f"Invalid '{param}': {says} properties instead.", param, "object_above_max_properties")
    says = f"array too long. Expected an array with maximum length {most}, but got an array with length {count}"
    raise ApiError(f"Invalid '{param}': {says} instead.", param, "array_above_max_length")


def encoded(param: str, value: Any) -> bytes:
    """Return a part of a body as JSON. Raises ``ApiError`` if it is nested too deeply."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise wrong_value(param, "JSON that is nested less deeply", value) from None


def missing(param: str) -> ApiError:
    """Return the error for a missing field."""
    return ApiError(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def check_length(param: str, text: str) -> None:
    """Reject a text that is longer than names may be. The JSON parser has already checked that it is UTF-8."""
    if mistake := text_error(text):
        raise ApiError(f"Invalid value for '{param}': it {mistake}.", param, "string_above_max_length")


def check_name(param: str, text: str) -> None:
    """Reject a name or an id that is too long or has control characters."""
    check_length(param, text)
    if mistake := name_error(text):
        raise ApiError(f"Invalid value for '{param}': it {mistake}.", param, "invalid_value")


def check_text_length(param: str, text: str, most: int) -> None:
    """Reject a text with too many characters, in OpenAI's words."""
    if len(text) > most:
        says = f"Expected a string with maximum length {most}, but got a string with length {len(text)} instead."
        raise ApiError(f"Invalid '{param}': string too long. {says}", param, "string_above_max_length")


class UnknownField(NamedTuple):
    """A field that has no meaning here."""

    path: str
    """Its path, without the numbers of elements of arrays."""
    meant: str
    """A known field with a similar name; empty if there is none."""

    def error(self) -> ApiError:
        """Return the error by which the field is refused."""
        hint = f" Did you mean '{self.meant}'?" if self.meant else ""
        return ApiError(f"Unknown parameter: '{self.path}'.{hint}", self.path, "unknown_parameter")


_MAX_UNKNOWN: Final = 16
"""Unknown fields of a body that are reported."""
_LONGEST_MISSPELLED: Final = 64
"""Longer names are compared with no others: that takes time."""
_ELEMENT: Final = re.compile(r"\[\d+\]")


class Fields:
    """A JSON object, the body itself or one within it. Fields that are null count as missing."""

    def __init__(self, value: Any, where: str = "", unknown: list[UnknownField] | None = None) -> None:
        """``where`` is the path of the object, empty for the body; ``unknown`` collects fields without a meaning."""
        if not isinstance(value, dict):
            raise wrong_type(where, "an object", value) if where else ApiError("The body is not a JSON object.")
        self._where = f"{where}." if where else ""
        self._values = {name: item for name, item in value.items() if item is not None}
        self._unknown = [] if unknown is None else unknown

    @classmethod
    def of_body(cls, body: Buffer) -> Fields:
        """Return the fields of a body. Raises ``ApiError`` if it is not a JSON object, or nested too deeply."""
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ApiError(f"The body could not be parsed as JSON: {error}", None, "invalid_json") from None
        if nested_deeper(bytes(body)):
            raise ApiError(f"The body is nested deeper than {MAX_DEPTH} levels.", None, "invalid_json")
        return cls(value)

    @classmethod
    def of_small_body(cls, body: Buffer) -> Fields:
        """Return the fields of a body that is parsed on the event loop. Raises ``ApiError``, also if it is large."""
        if len(body) > _SMALL:
            what = f"The body has {len(body)} bytes, more than the {_SMALL} that such a request may have."
            raise ApiError(what, None, "content_too_large", 413)
        return cls.of_body(body)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def path(self, name: str) -> str:
        """Return the full path of a field, for messages."""
        return self._where + name

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Reject the first field that is not ``known``: an ignored one would go unnoticed until it costs something."""
        for name in self._values:
            if name not in known:
                meant = nearest(name, known)
                hint = f" Did you mean '{meant}'?" if meant else ""
                param = self.path(name)
                raise ApiError(f"Unknown parameter: '{param}'.{hint}", param, "unknown_parameter")

    def pass_over_unknown(self, known: Collection[str]) -> None:
        """Note the fields that are not ``known``, which clients send for other servers; ``unknown`` has them."""
        for name in self._values:
            if name in known:
                continue
            if len(self._unknown) == _MAX_UNKNOWN:
                return
            meant = nearest(name, known) if len(name) <= _LONGEST_MISSPELLED else None
            field = UnknownField(quoted_text(_ELEMENT.sub("[]", self.path(name))), meant or "")
            if field not in self._unknown:
                self._unknown.append(field)

    @property
    def unknown(self) -> Sequence[UnknownField]:
        """The fields that were passed over, in the whole body."""
        return self._unknown

    def within(self, value: Any, where: str) -> Fields:
        """Return an object within this one, such as an element of an array. ``where`` is its path."""
        return Fields(value, where, self._unknown)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; raise if it is missing and there is no default."""
        value = self._values.get(name, default)
        if value is None:
            raise missing(self.path(name))
        if not isinstance(value, str):
            raise wrong_type(self.path(name), "a string", value)
        return value

    def name(self, name: str, default: str | None = None) -> str:
        """Return a string that is a name or an id, as ``check_name`` allows."""
        value = self.text(name, default)
        check_name(self.path(name), value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise wrong_type(self.path(name), "a boolean", value)
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``."""
        value = self._values.get(name, default)
        if type(value) is not int:
            raise wrong_type(self.path(name), "an integer", value)
        if not low <= value <= high:
            raise wrong_value(self.path(name), f"an integer from {low} to {high}", value)
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """Return a number from ``low`` to ``high``. The field must be present."""
        value = self._values[name]
        if type(value) not in (int, float):
            raise wrong_type(self.path(name), "a number", value)
        if not low <= value <= high:
            raise wrong_value(self.path(name), f"a number from {low:g} to {high:g}", value)
        return float(value)

    def choice(self, name: str, default: str, among: Collection[str]) -> str:
        """Return a string that is one of ``among``."""
        value = self.text(name, default)
        if value not in among:
            raise wrong_value(self.path(name), "one of " + ", ".join(f"'{each}'" for each in among), value)
        return value

    def array(self, name: str, most: int) -> list[Any]:
        """Return an array of at most ``most`` elements; an empty one if it is missing."""
        value = self._values.get(name, [])
        if not isinstance(value, list):
            raise wrong_type(self.path(name), "an array", value)
        check_count(self.path(name), value, most)
        return value

    def object(self, name: str) -> Fields:
        """Return an object; an empty one if it is missing."""
        return self.within(self._values.get(name, {}), self.path(name))

    @property
    def values(self) -> dict[str, Any]:
        """All fields that are not null, as received."""
        return self._values
