"""What a model may raise, what it may answer instead of tensors, and the texts of refused arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import ClassVar


class TritonModelException(Exception):
    """An error of this package, or of a model that wants to raise one."""


class ErrorCode(IntEnum):
    """What kind of error a response reports. The numbers are Triton's."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """The error of one response. Not an exception: it is handed to ``InferenceResponse``."""

    __slots__ = ("_code", "_message")

    UNKNOWN: ClassVar[ErrorCode] = ErrorCode.UNKNOWN
    INTERNAL: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    NOT_FOUND: ClassVar[ErrorCode] = ErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar[ErrorCode] = ErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar[ErrorCode] = ErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar[ErrorCode] = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar[ErrorCode] = ErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar[ErrorCode] = ErrorCode.CANCELLED

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        if not isinstance(message, str) or not isinstance(code, ErrorCode):
            raise incompatible(
                "TritonError(message: str, code: c_python_backend_utils.TritonError.__ErrorCode = "
                "<__ErrorCode.INTERNAL: 1>)",
                message,
                *(() if code is ErrorCode.INTERNAL else (code,)),
            )
        self._message = message
        self._code = code

    def code(self) -> ErrorCode:
        """Return what kind of error this is."""
        return self._code

    def message(self) -> str:
        """Return the text for the caller."""
        return self._message


def incompatible(signature: str, *given: object, **named: object) -> TypeError:
    """Return the error for arguments of a wrong type, in the words that Triton's binding has for it."""
    return _incompatible("__init__(): incompatible constructor", f"c_python_backend_utils.{signature}", given, named)


def incompatible_call(method: str, signature: str, *given: object, **named: object) -> TypeError:
    """Return the same for the arguments of a method."""
    return _incompatible(f"{method}(): incompatible function", signature, given, named)


def _incompatible(what: str, signature: str, given: Sequence[object], named: Mapping[str, object]) -> TypeError:
    shown = [repr(value) for value in given]
    keywords = ", ".join(f"{name}={value!r}" for name, value in named.items())
    arguments = "; ".join(part for part in (", ".join(shown), keywords and f"kwargs: {keywords}") if part)
    return TypeError(
        f"{what} arguments. The following argument types are supported:\n    1. {signature}\n\n"
        f"Invoked with: {arguments}"
    )
