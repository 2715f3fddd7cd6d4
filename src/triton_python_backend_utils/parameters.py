"""Custom parameters of requests and responses: checked when they are given, shown as JSON."""

from __future__ import annotations

from typing import TypeAlias

from nerite.core.request import Parameter
from triton_python_backend_utils.errors import TritonModelException

Parameters: TypeAlias = dict[str, bool | int | str]


def checked(parameters: Parameters | None) -> dict[str, Parameter]:
    """Return a copy of ``parameters``; raise ``TritonModelException`` with Triton's text for what cannot be one."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect N8pybind114dictE, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)
