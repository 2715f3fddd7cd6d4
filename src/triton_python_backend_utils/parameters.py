"""Custom parameters of requests and responses: types are checked when they are given, values when they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from nerite.core.response import Parameter
from nerite.core.text import MAX_VALUE, mistake_in
from triton_python_backend_utils.arguments import Range
from triton_python_backend_utils.errors import TritonModelException

Parameters: TypeAlias = dict[str, bool | int | str]


def checked(parameters: Parameters | None) -> dict[str, Parameter]:
    """Return a copy of ``parameters`` with plain keys and values.

    Raises ``TritonModelException`` with Triton's text for those of a wrong type.
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
    """Return why ``parameters`` cannot be sent, as a sentence; None if they can. ``limits`` are those of integers."""
    for key, value in parameters.items():
        if (mistake := mistake_in(key)) is not None:
            return f"The name of a parameter {mistake}."
        if isinstance(value, str):
            if (mistake := mistake_in(value, MAX_VALUE)) is not None:
                return f"Parameter '{key}' {mistake}."
        elif isinstance(value, int) and not limits[0] <= value <= limits[1]:
            return f"Parameter '{key}' is an integer beyond 64 bits. Pass it as a string."
    return None
