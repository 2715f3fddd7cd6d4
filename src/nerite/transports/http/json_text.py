"""JSON as Triton reads it: more than the standard allows, and refused in Triton's words."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import orjson

from nerite.core.errors import Internal, InvalidArgument
from nerite.transports.http import json_error

_INFINITY = re.compile(rb'"(?:[^"\\]|\\.)*"|Inf(?:inity)?')
"""Strings, and the two names of infinity outside of them, of which Python knows one."""


def parse(text: bytes) -> Any:
    """Parse JSON; NaN and Infinity are numbers here, and strings may be any bytes.

    Raises ``Internal`` in Triton's words, ``InvalidArgument`` for too much nesting.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        json_error.check(text.removeprefix(codecs.BOM_UTF8))
    except json_error.JsonError as error:
        raise Internal(f"failed to parse the request JSON buffer: {error}") from None
    except json_error.TooDeep:
        raise InvalidArgument(f"JSON nesting depth exceeds maximum allowed limit ({json_error.MAX_DEPTH})") from None
    plain = _INFINITY.sub(lambda found: found[0] if found[0][:1] == b'"' else b"Infinity", text)
    return json.loads(plain.decode("utf-8-sig", "surrogateescape"))
