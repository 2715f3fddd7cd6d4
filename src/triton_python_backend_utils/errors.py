"""Errors that models raise or return, errors for invalid arguments, and validation of custom parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeAlias

from nerite.core.response import Parameter
from nerite.core.text import MAX_VALUE, name_error, text_error
from triton_python_backend_utils import arguments
from triton_python_backend_utils.arguments import BindingEnum, Mismatch, Range, Text


class TritonModelException(Exception):
    """Exception raised by this package, and by models."""


class ErrorCode(BindingEnum):
    """Kinds of errors in responses, with Triton's numbers."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """Error of one response. Not an exception: it is passed to ``InferenceResponse``."""

    __slots__ = ("_code", "_message")

    UNKNOWN: ClassVar[ErrorCode] = ErrorCode.UNKNOWN
    INTERNAL: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    NOT_FOUND: ClassVar[ErrorCode] = ErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar[ErrorCode] = ErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar[ErrorCode] = ErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar[ErrorCode] = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar[ErrorCode] = ErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar[ErrorCode] = ErrorCode.CANCELLED

    def __init__(self, message: Text, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        try:
            self._message = arguments.message(message)
            self._code = arguments.instance(code, ErrorCode)
        except Mismatch as mismatch:
            raise incompatible(
                "TritonError(message: str, code: c_python_backend_utils.TritonError.__ErrorCode = "
                "<__ErrorCode.INTERNAL: 1>)",
                mismatch,
                message,
                *(() if code is ErrorCode.INTERNAL else (code,)),
            ) from None

    def code(self) -> ErrorCode:
        """Return the kind of the error."""
        return self._code

    def message(self) -> str:
        """Return the message for the caller."""
        return self._message


# Shown in messages under the name that it has in Triton's binding.
ErrorCode.__name__, ErrorCode.__qualname__ = "__ErrorCode", "TritonError.__ErrorCode"
setattr(TritonError, ErrorCode.__name__, ErrorCode)


def incompatible(signature: str, mismatch: Mismatch, /, *given: object, **named: object) -> TypeError:
    """Return the error for constructor arguments of a wrong type: the text of Triton's binding, then the reason."""
    signature = f"c_python_backend_utils.{signature}"
    return _incompatible("__init__(): incompatible constructor", signature, mismatch, given, named)


def incompatible_call(method: str, signature: str, mismatch: Mismatch, /, *given: object, **named: object) -> TypeError:
    """Return the error for method arguments of a wrong type, like ``incompatible``."""
    return _incompatible(f"{method}(): incompatible function", signature, mismatch, given, named)


def _incompatible(
    what: str, signature: str, mismatch: Mismatch, given: Sequence[object], named: Mapping[str, object]
) -> TypeError:
    shown = [repr(value) for value in given]
    keywords = ", ".join(f"{name}={value!r}" for name, value in named.items())
    invoked = "; ".join(part for part in (", ".join(shown), keywords and f"kwargs: {keywords}") if part)
    return TypeError(
        f"{what} arguments. The following argument types are supported:\n    1. {signature}\n\n"
        f"Invoked with: {invoked}" + (f"\n\n{mismatch}" if mismatch.args else "")
    )


# Custom parameters of requests and responses: types are checked when they are set, values when they are sent.

Parameters: TypeAlias = dict[str, bool | int | str]


def checked_parameters(parameters: Parameters | None) -> dict[str, Parameter]:
    """Return a copy of ``parameters`` with plain keys and values.

    Raises ``TritonModelException`` with Triton's text for a wrong type.
    """
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect N8pybind114dictE, got {type(parameters)}")
    plain: dict[str, Parameter] = {}
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if isinstance(value, str):
            plain[str.__str__(key)] = str.__str__(value)
        elif isinstance(value, int):
            plain[str.__str__(key)] = value if type(value) is bool else int(value)
        else:
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return plain


def mistake_in_parameters(parameters: Mapping[str, Parameter], limits: Range) -> str | None:
    """Return why ``parameters`` cannot be sent, as a sentence, or None. ``limits`` is the valid range of integers."""
    for key, value in parameters.items():
        if (mistake := name_error(key)) is not None:
            return f"The name of a parameter {mistake}."
        if isinstance(value, str):
            if (mistake := text_error(value, MAX_VALUE)) is not None:
                return f"Parameter '{key}' {mistake}."
        elif isinstance(value, int) and not limits[0] <= value <= limits[1]:
            return f"Parameter '{key}' is an integer beyond 64 bits. Pass it as a string."
    return None
