"""The parameters of a load, as they stand in the body of the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nerite.core.errors import Internal


def read(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that a body names. Raises Triton's errors for what cannot be one."""
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Internal('attempt to get members for non-object\n    Write "parameters" as an object: names and texts.')
    for name, value in parameters.items():
        if not isinstance(value, str):
            raise Internal(
                f"attempt to access JSON non-string as string\n    Write the value of load parameter '{name}' as text."
            )
        if name != "config" and not name.startswith("file:"):
            raise Internal(
                "unexpected error on creating Triton parameter\n"
                f"    There is no load parameter '{name}', only 'config' and 'file:<path>'."
            )
    return parameters
