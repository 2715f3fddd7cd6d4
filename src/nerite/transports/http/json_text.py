"""JSON as Triton reads it: more than the standard allows, and refused in Triton's words."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any, Final

import orjson

from nerite.core.client_text import check_document
from nerite.core.errors import Internal, InvalidArgument
from nerite.transports.http import json_error

LARGE: Final = 128 * 1024
"""Bytes of JSON that are read, or written, on the event loop: whatever is in them, that takes at most some 25 ms."""


def whole(document: Any) -> Any:
    """Return a document, all of which is text."""
    return document


def parse(text: bytes, text_of: Callable[[Any], Any] = whole) -> Any:
    """Parse JSON; NaN and Infinity are numbers here, and integers beyond 64 bits are floating-point numbers.

    Strings in what ``text_of`` returns of the document are valid UTF-8; all others may be any bytes, those that are not
    UTF-8 as lone surrogates. Raises ``Internal`` in Triton's words, ``InvalidArgument`` for too much nesting, and for
    text that is not UTF-8.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        document = json_error.loads(text.removeprefix(codecs.BOM_UTF8))
    except json_error.JsonError as error:
        raise Internal(f"failed to parse the request JSON buffer: {error}") from None
    if not _is_utf8(text):
        check_document(text_of(document))
    return document


def parse_settings(body: memoryview) -> Any:
    """Parse the JSON of a request that needs little of it. Raises as ``parse``."""
    if len(body) > LARGE:
        raise InvalidArgument(f"the body has {len(body)} bytes, more than the {LARGE} that such a request may have")
    return parse(bytes(body))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
