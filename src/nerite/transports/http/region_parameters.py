"""What the body of a registration of shared memory says."""

from __future__ import annotations

from typing import Any

from nerite.core.client_text import checked
from nerite.core.errors import Internal, InvalidArgument
from nerite.transports.http.json_text import parse_settings


def system(region: str, body: memoryview) -> tuple[str, str, int, int]:
    """Return name, key, offset and size of a region. Raises Triton's errors."""
    if not region:
        raise InvalidArgument("'region name' is necessary to register system shared memory region")
    document = _document(body)
    key = _member(document, "key")
    if not isinstance(key, str):
        raise Internal("attempt to access JSON non-string as string")
    offset = _unsigned(document.get("offset", 0))
    return region, checked(key, "'key'"), offset, _unsigned(_member(document, "byte_size"))


def check_cuda(region: str, body: memoryview) -> None:
    """Raise Triton's errors for a registration of CUDA memory that is none."""
    if not region:
        raise InvalidArgument("'region name' is necessary to register cuda shared memory region")
    handle = _member(_document(body), "raw_handle")
    if not isinstance(handle, dict) or "b64" not in handle:
        raise Internal("attempt to access non-existing object member 'b64'")


def _document(body: memoryview) -> dict[str, Any]:
    document = parse_settings(body)
    if not isinstance(document, dict):
        raise Internal("attempt to access non-existing object member 'key'")
    return document


def _member(document: dict[str, Any], name: str) -> Any:
    if name not in document:
        raise InvalidArgument(f"Shared memory register request has no '{name}' field")
    return document[name]


def _unsigned(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise Internal("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value
