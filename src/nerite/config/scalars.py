"""Reads one number, string, boolean or enum value from the text form of a configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeAlias

from nerite.config.mistake import FieldPath, meant_value
from nerite.config.scanner import CLOSERS, Astray, Cursor, unfilled
from nerite.config.schema import BOUNDS, FieldSchema, single

Scalar: TypeAlias = int | float | str | bool

_LONGEST: Final = 40
"""Digits. A longer number is out of every range, and Python refuses to read thousands of digits."""
_HUGE: Final = int("9" * _LONGEST)
_BOOLEANS: Final = {"true": True, "True": True, "t": True, "false": False, "False": False, "f": False}
_MEANT_TRUE: Final = frozenset({"yes", "on", "y", "enable", "enabled", "true"})
_MEANT_FALSE: Final = frozenset({"no", "off", "n", "disable", "disabled", "none", "false"})
_CAPITALS: Final = re.compile("[A-Z][A-Z0-9_]+")
_EXPECTED: Final = {"string": "string", "bool": "identifier", "enum": "integer or identifier"}


def read_scalar(cursor: Cursor, declared: FieldSchema, path: FieldPath) -> Scalar | None:
    """Return one value of the type of ``declared``; report and skip anything else and return ``None``.

    Raises ``Astray``.
    """
    token = cursor.ahead if cursor.at("-") else cursor.here
    if token.flawed:
        cursor.report("", token, path, "")
        cursor.skip_value()
        return None
    position = cursor.here.position
    value = _READERS[declared.kind](cursor, declared, path)
    if value is not None:
        cursor.positions[path] = position
    return value


def expected(declared: FieldSchema, text: str) -> str:
    """Return protobuf's text for a token that cannot begin a value of the type of ``declared``."""
    if declared.kind in BOUNDS:
        return f"Expected integer, got: {text}"
    return f"Expected {_EXPECTED.get(declared.kind, 'double')}, got: {text}"


def _refuse(cursor: Cursor, declared: FieldSchema, path: FieldPath, remedy: str) -> None:
    """Report that the next token is not a value of the type of ``declared``, and skip it."""
    token, name = cursor.here, declared.name
    message = expected(declared, token.text)
    if cursor.before.text == ":" and (cursor.at_field() or cursor.at(*CLOSERS) or token.kind == "end"):
        if token.hidden:
            remedy = unfilled(re.split(r"[\s}\],;]", token.hidden)[0], f"As it stands it is a comment. {remedy}")
        else:
            remedy = f"'{name}:' has no value. {remedy}"
        cursor.report(message, cursor.before, path, remedy)
        if not CLOSERS.isdisjoint(token.hidden):
            raise Astray
        return
    if token.kind == "identifier" and declared.kind != "enum" and _CAPITALS.fullmatch(token.text):
        remedy = unfilled(token.text, remedy)
    elif cursor.at("[") and not declared.repeated:
        remedy = f"'{name}' takes one value: remove the brackets."
    elif cursor.at("{", "(", "<") and declared.repeated:
        remedy = f"Write a list in square brackets: {name}: [ … ]."
    cursor.report(message, token, path, remedy)
    cursor.skip_value()


def _read_integer(cursor: Cursor, declared: FieldSchema, path: FieldPath) -> int | None:
    smallest, largest = BOUNDS[declared.kind]
    negative = smallest < 0 and cursor.took("-")
    token = cursor.here
    if token.kind != "integer":
        remedy = "Write a whole number."
        if token.kind == "string" and (quoted := re.fullmatch(r"\s*(-?[0-9]+)\s*", token.value)):
            remedy = f"Write {quoted[1]} without quotes."
        elif token.kind == "float" and (whole := _whole(token.text)):
            remedy = f"Write a whole number: {whole}."
        elif token.text == "-" and smallest == 0:
            remedy = f"'{declared.name}' cannot be negative: write 0 or more."
        _refuse(cursor, declared, path, remedy)
        return None
    cursor.take()
    number = _number(token.text)
    if number > largest + negative:
        bound = smallest if negative else largest
        remedy = f"'{declared.name}' cannot be {'less' if negative else 'more'} than {bound}."
        cursor.report(f"Integer out of range ({token.text})", token, path, remedy)
        return None
    if cursor.at("-") and cursor.ahead.kind == "integer" and not declared.repeated:
        cursor.report(
            "Expected identifier, got: -",
            cursor.here,
            path,
            f"'{declared.name}' is one number, not a range: write {declared.name}: {token.text}"
            f" or {declared.name}: {cursor.ahead.text}.",
        )
        cursor.skip_value()
    return -number if negative else number


def _whole(text: str) -> str:
    number = float(text.rstrip("fF"))
    return str(int(number)) if number < 1e15 and number == int(number) else ""


def _number(text: str) -> int:
    if text[:2] in ("0x", "0X"):
        return int(text, 16)
    if len(text) > _LONGEST:
        return _HUGE
    return int(text, 8 if text[0] == "0" else 10)


def _read_float(cursor: Cursor, declared: FieldSchema, path: FieldPath) -> float | None:
    sign = -1.0 if cursor.took("-") else 1.0
    token = cursor.here
    if token.kind == "integer" and len(token.text) > 1 and token.text[0] == "0":
        message, remedy = f"Expect a decimal number, got: {token.text}", "Write the number in decimal."
        cursor.report(message, token, path, remedy)
        cursor.take()
        return None
    if token.kind in ("integer", "float"):
        value = float(token.text.rstrip("fF"))
    elif token.kind == "identifier" and token.text.lower() in ("inf", "infinity", "nan"):
        value = float(token.text)
    else:
        _refuse(cursor, declared, path, "Write a number, without quotes.")
        return None
    cursor.take()
    return sign * (single(value) if declared.kind == "float" else value)


def _read_string(cursor: Cursor, declared: FieldSchema, path: FieldPath) -> str | None:
    if cursor.here.kind == "string":
        text = ""
        while cursor.here.kind == "string":
            text += cursor.take().value
        return text
    token = cursor.here
    if token.kind in ("identifier", "integer", "float") and not cursor.at_field():
        glued = cursor.take_glued()
        cursor.report(f"Expected string, got: {token.text}", token, path, f'Put it in quotes: "{glued}".')
    else:
        _refuse(cursor, declared, path, "Write a string in quotes.")
    return None


def _read_bool(cursor: Cursor, declared: FieldSchema, path: FieldPath) -> bool | None:
    token = cursor.here
    if token.kind == "identifier" and not cursor.at_field():
        cursor.take()
        if token.text not in _BOOLEANS:
            word = token.text.lower()
            remedy = f"Write {declared.name}: {'true' if word in _MEANT_TRUE else 'false'}."
            if _CAPITALS.fullmatch(token.text) and word not in _MEANT_TRUE | _MEANT_FALSE:
                remedy = unfilled(token.text, "Write true or false.")
            message = f'Invalid value for boolean field "{declared.name}". Value: "{token.text}".'
            cursor.report(message, token, path, remedy)
        return _BOOLEANS.get(token.text)
    if token.kind == "integer":
        cursor.take()
        number = _number(token.text)
        if number > 1:
            message = f"Integer out of range ({token.text})"
            cursor.report(message, token, path, f"Write {declared.name}: true.")
        return bool(number) if number < 2 else None
    unquoted = token.value.lower()
    _refuse(
        cursor,
        declared,
        path,
        f"Write {unquoted} without quotes." if unquoted in ("true", "false") else "Write true or false.",
    )
    return None


def _read_enum(cursor: Cursor, declared: FieldSchema, path: FieldPath) -> str | None:
    negative = cursor.ahead.kind == "integer" and cursor.took("-")
    token = cursor.here
    choices = ", ".join(value for value in declared.values if value != "TYPE_INVALID")
    if token.kind == "integer":
        cursor.take()
        number = _number(token.text)
        if not negative and number < len(declared.values):
            return declared.values[number]
        text, remedy = f"{'-' if negative else ''}{number}", f"Write one of {choices}."
    elif token.kind == "identifier" and not cursor.at_field():
        cursor.take()
        if token.text in declared.values:
            return token.text
        meant = meant_value(token.text, declared.values)
        text, remedy = token.text, f"Write {meant}." if meant else f"Write one of {choices}."
    else:
        meant = meant_value(token.value, declared.values) if token.value else ""
        _refuse(cursor, declared, path, f"Write {meant} without quotes." if meant else f"Write one of {choices}.")
        return None
    message = f'Unknown enumeration value of "{text}" for field "{declared.name}".'
    cursor.report(message, token, path, remedy)
    return None


_READERS: Final[dict[str, Callable[[Cursor, FieldSchema, FieldPath], Scalar | None]]] = {
    **dict.fromkeys(BOUNDS, _read_integer),
    "float": _read_float,
    "double": _read_float,
    "string": _read_string,
    "bool": _read_bool,
    "enum": _read_enum,
}
