"""The parameters of a load, as they stand in the body of the request."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from nerite.core.errors import Internal, InvalidArgument
from nerite.transports.http.infer_document import check_count


def read(document: Mapping[str, Any]) -> dict[str, str | bytes]:
    """Return the parameters that a body names, files decoded. Raises Triton's errors for what cannot be one."""
    found: dict[str, str | bytes] = {}
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Internal('attempt to get members for non-object\n    Write "parameters" as an object: names and texts.')
    check_count("'parameters'", parameters)
    for name, value in parameters.items():
        if not isinstance(value, str):
            raise Internal(
                f"attempt to access JSON non-string as string\n    Write the value of load parameter '{name}' as text."
            )
        if name == "config":
            found[name] = value
        elif name.startswith("file:"):
            found[name] = _decoded(name, value)
        else:
            raise Internal(
                "unexpected error on creating Triton parameter\n"
                f"    There is no load parameter '{name}', only 'config' and 'file:<path>'."
            )
    return found


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(
            f"load parameter '{name}' is not base64: {error}\n    Send the content of the file in base64, in one line."
        ) from None
