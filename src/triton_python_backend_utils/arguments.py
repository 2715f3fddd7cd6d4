"""Argument conversions like those of Triton's binding (pybind11).

Each function returns the argument as the plain Python type, or raises ``Mismatch`` if the binding would not accept it
either. The caller converts that into an error with the signature (``errors.incompatible``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any, Final, TypeAlias, TypeVar

Text: TypeAlias = str | bytes | bytearray
"""Types accepted as text."""
Range: TypeAlias = tuple[int, int]
"""Smallest and largest integer that a parameter accepts."""
INT64: Final[Range] = (-(1 << 63), (1 << 63) - 1)
UINT32: Final[Range] = (0, (1 << 32) - 1)
UINT64: Final[Range] = (0, (1 << 64) - 1)

T = TypeVar("T")


class BindingEnum(IntEnum):
    """Enumeration like the binding's: members equal integers and are printed with their name."""

    __str__ = Enum.__str__
    __format__ = Enum.__format__


class Mismatch(Exception):
    """An argument of the wrong type. The text is the reason, if it is not obvious from the signature."""


def text(name: str, value: object) -> str:
    """Convert a ``str``, or ``bytes`` or ``bytearray`` in UTF-8, to ``str``. Lone surrogates are rejected."""
    if type(value) is str:
        plain = value
    elif isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as error:
            raise Mismatch(f"{name} is not valid UTF-8 at byte {error.start}.") from None
    elif isinstance(value, str):
        plain = str.__str__(value)
    else:
        raise Mismatch
    if not plain.isascii():
        try:
            plain.encode()
        except UnicodeEncodeError as error:
            raise Mismatch(f"{name} is not valid UTF-8 at character {error.start}.") from None
    return plain


def message(value: object) -> str:
    """Convert like ``text``, but escape what is not valid UTF-8, so that no message is lost because of it."""
    if type(value) is str and value.isascii():
        return value
    if isinstance(value, str):
        return str.encode(value, errors="backslashreplace").decode()
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="backslashreplace")
    raise Mismatch


def integer(name: str, value: object, limits: Range) -> int:
    """Convert to an integer within ``limits``, from any convertible type except floats and text."""
    plain = value if type(value) is int else _converted(value, int, ("__index__", "__int__"), (float, str))
    if not limits[0] <= plain <= limits[1]:
        raise Mismatch(f"{name} must be an integer from {limits[0]} to {limits[1]}.")
    return plain


def number(value: object) -> float:
    """Convert to a float, from any convertible type except text."""
    return value if type(value) is float else _converted(value, float, ("__float__", "__index__"), (str,))


def flag(value: object) -> bool:
    """Convert to a bool, from types that define ``__bool__``: numbers do; None, text and lists do not."""
    return value if type(value) is bool else _converted(value, bool, ("__bool__",), (type(None),))


def _converted(value: Any, kind: type[T], by: tuple[str, ...], refused: tuple[type, ...]) -> T:
    """Convert ``value`` to ``kind`` if its type has one of the methods ``by`` and is not one of ``refused``."""
    if isinstance(value, refused) or not any(hasattr(type(value), method) for method in by):
        raise Mismatch
    try:
        return kind(value)  # type: ignore[call-arg]  # int, float or bool
    except Exception:  # a type defined by the model may raise anything, and some values do not convert, such as arrays
        raise Mismatch from None


def sequence(value: object) -> Sequence[Any]:
    """Convert a list, a tuple or an indexable object to a sequence; reject text, mappings, sets and iterators."""
    if type(value) is list or type(value) is tuple:
        return value
    if isinstance(value, str | bytes | dict) or not hasattr(type(value), "__getitem__"):
        raise Mismatch
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]  # it has __getitem__
    except Exception:
        raise Mismatch from None


def texts(name: str, value: object) -> list[str]:
    """Convert each element of a sequence as ``text`` does."""
    return [text(name, each) for each in sequence(value)]


def instance(value: object, kind: type[T]) -> T:
    """Return ``value`` if it is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise Mismatch
    return value
