"""What a model may pass for a parameter of a type: the conversions that Triton's binding (pybind11) makes.

Each function returns the argument as the plain Python type, and raises ``Mismatch`` for one that the binding does not
take either. Who calls it turns that into an error that names the signature (``errors.incompatible``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any, Final, TypeAlias, TypeVar

Text: TypeAlias = str | bytes | bytearray
"""What is taken for text."""
Range: TypeAlias = tuple[int, int]
"""The least and the greatest integer that a parameter takes."""
INT64: Final[Range] = (-(1 << 63), (1 << 63) - 1)
UINT32: Final[Range] = (0, (1 << 32) - 1)
UINT64: Final[Range] = (0, (1 << 64) - 1)

T = TypeVar("T")


class BindingEnum(IntEnum):
    """Numbers with names as the binding has them: equal to integers, and printed with the name."""

    __str__ = Enum.__str__
    __format__ = Enum.__format__


class Mismatch(Exception):
    """An argument that its parameter cannot take. The text is the reason, where the signature does not show it."""


def text(name: str, value: object) -> str:
    """Return a ``str``, or ``bytes`` or ``bytearray`` in UTF-8, as ``str``. Lone surrogates are refused."""
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
    """Return what ``text`` takes, and what is not valid UTF-8 escaped: a message must not be lost for that."""
    if type(value) is str and value.isascii():
        return value
    if isinstance(value, str):
        return str.encode(value, errors="backslashreplace").decode()
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="backslashreplace")
    raise Mismatch


def integer(name: str, value: object, limits: Range) -> int:
    """Return an integer within ``limits``: of any type that converts to one, but for floats and text."""
    plain = value if type(value) is int else _converted(value, int, ("__index__", "__int__"), (float, str))
    if not limits[0] <= plain <= limits[1]:
        raise Mismatch(f"{name} has to be an integer from {limits[0]} to {limits[1]}.")
    return plain


def number(value: object) -> float:
    """Return a number of any type that converts to a float, but for text."""
    return value if type(value) is float else _converted(value, float, ("__float__", "__index__"), (str,))


def flag(value: object) -> bool:
    """Return the truth of a value whose type defines it: numbers do, None, text and lists do not."""
    return value if type(value) is bool else _converted(value, bool, ("__bool__",), (type(None),))


def _converted(value: Any, kind: type[T], by: tuple[str, ...], refused: tuple[type, ...]) -> T:
    """Return ``value`` as a ``kind`` if its type has one of the methods ``by`` and is none of ``refused``."""
    if isinstance(value, refused) or not any(hasattr(type(value), method) for method in by):
        raise Mismatch
    try:
        return kind(value)  # type: ignore[call-arg]  # int, float or bool
    except Exception:  # of the model's own type, or a value that does not convert, such as an array of several
        raise Mismatch from None


def sequence(value: object) -> Sequence[Any]:
    """Return a list, a tuple, or what can be indexed like one; no text, mapping, set or iterator."""
    if type(value) is list or type(value) is tuple:
        return value
    if isinstance(value, str | bytes | dict) or not hasattr(type(value), "__getitem__"):
        raise Mismatch
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]  # it has __getitem__
    except Exception:
        raise Mismatch from None


def texts(name: str, value: object) -> list[str]:
    """Return a sequence of texts."""
    return [text(name, each) for each in sequence(value)]


def instance(value: object, kind: type[T]) -> T:
    """Return an object of the class that is asked for."""
    if not isinstance(value, kind):
        raise Mismatch
    return value
