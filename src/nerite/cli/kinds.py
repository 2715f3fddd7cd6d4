"""How the text of a flag's value is read: numbers, booleans, choices.

Triton's readers take the front of a text and leave the rest (``12x`` is 12, ``1e3`` is 1) and let unsigned numbers
wrap; here a number is the whole text and in range. The messages are Triton's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nerite.cli.usage_error import BadValue

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
UINT32 = (0, 2**32 - 1)
UINT64 = (0, 2**64 - 1)

_INTEGER = re.compile(r"[+-]?[0-9]+")
_LEADING = re.compile(
    r"[ \t\n\v\f\r]*[+-]?(0[xX]([0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)([pP][+-]?[0-9]+)?"
    r"|([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[iI][nN][fF]([iI][nN][iI][tT][yY])?|[nN][aA][nN])"
)
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class Kind(NamedTuple):
    """A type of value. ``label`` is what help shows between ``<>``; empty for a flag that takes no value."""

    label: str
    read: Callable[[str], Any]
    """Raises ``BadValue``."""


def integer(text: str, bounds: tuple[int, int] = INT32) -> int:
    """Read a whole number within ``bounds``, both included."""
    if not _INTEGER.fullmatch(text):
        raise BadValue(f"Invalid option value. Got {text}")
    number = int(text) if len(text) < 30 else bounds[1] + 1
    if not bounds[0] <= number <= bounds[1]:
        raise BadValue(f"Provided option value is out of bound. Got {text}")
    return number


def decimal(text: str) -> float:
    """Read a finite decimal number."""
    if not _FLOAT.fullmatch(text):
        raise BadValue(f"Invalid option value. Got {text}")
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise BadValue(f"Provided option value is out of bound. Got {text}")
    return number


def leading_number(text: str) -> float:
    """Read the number that a text begins with as C's ``strtod`` does: behind blanks, and whatever follows it."""
    match = _LEADING.match(text)
    if match is None:
        raise BadValue(f"Invalid option value. Got {text}")
    number = match[0].strip()
    return float.fromhex(number) if "x" in number.lower() else float(number)


def not_negative(text: str) -> float:
    """Read a decimal number that is not below zero."""
    number = decimal(text)
    if number < 0:
        raise BadValue(f"Provided option value is out of bound. Got {text}")
    return number


def boolean(text: str) -> bool:
    """Read true/on/1 or false/off/0, in any case."""
    match text.lower():
        case "true" | "on" | "1":
            return True
        case "false" | "off" | "0":
            return False
    raise BadValue(f"invalid value for bool option: {text}")


def verbosity(text: str) -> int:
    """Read a log level: a number, or true and false for 1 and 0. Negative is 0."""
    match text.lower():
        case "true":
            return 1
        case "false":
            return 0
    return max(0, integer(text))


def choice(flag: str, values: Sequence[str], *, any_case: bool = True) -> Kind:
    """Return the kind of a value that is one of ``values``; ``flag`` is how Triton names it in the refusal."""

    def read(text: str) -> str:
        value = text.lower() if any_case else text
        if value not in values:
            raise BadValue(f"invalid argument for --{flag}")
        return value

    return Kind("|".join(values), read)


def at_least(least: int, refusal: str, bounds: tuple[int, int] = INT32) -> Kind:
    """Return the kind of a number that must reach ``least``, or else ``refusal``."""

    def read(text: str) -> int:
        number = integer(text, bounds)
        if number < least:
            raise BadValue(refusal)
        return number

    return Kind("integer", read)


def _clamped(least: int) -> Kind:
    return Kind("integer", lambda text: max(least, integer(text)))


def _handler_threads(text: str) -> int:
    number = integer(text)
    if not 2 <= number <= 128:
        raise BadValue("invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128.")
    return number


def _config_name(text: str) -> str:
    if not text:
        raise BadValue("Error: empty argument for --model-config-name")
    return text


def _pattern(text: str) -> re.Pattern[str] | None:
    """Compile a pattern of header names: in any case, unless it starts with ``(?-i)``."""
    sensitive = text.startswith("(?-i)")
    try:
        return re.compile(text.removeprefix("(?-i)"), 0 if sensitive else re.IGNORECASE) if text else None
    except re.error as error:
        raise BadValue(f"invalid regular expression '{text}': {error}") from None


NOTHING = Kind("", boolean)
"""No value on the command line; a boolean in the environment or a file."""
TEXT = Kind("string", str)
BOOLEAN = Kind("boolean", boolean)
INTEGER = Kind("integer", integer)
COUNT = _clamped(0)
"""A number that counts something: below zero is zero, as Triton has it."""
AT_LEAST_ONE = _clamped(1)
BYTES = Kind("integer", lambda text: integer(text, INT64))
PORT = Kind("integer", lambda text: integer(text, (0, 65535)))
FLOAT = Kind("float", decimal)
VERBOSITY = Kind("integer", verbosity)
HANDLER_THREADS = Kind("integer", _handler_threads)
CONFIG_NAME = Kind("string", _config_name)
PATTERN = Kind("regex", _pattern)
