"""The sticky key of a request: what keeps it on the arm where earlier requests with the same key were answered."""

from __future__ import annotations

from typing import Final, NamedTuple

from nerite.config.sticky_key import KeySource, StickyKey
from nerite.core import tensor as dtypes
from nerite.core.model_calls import first_of
from nerite.core.request import NAME, InferenceRequest, RequestHeader
from nerite.core.tensor import DeviceBuffer
from nerite.scheduling.weighted_route import WeightedRoute

PROMPT: Final = "text_input"
"""Input of text models that is their prompt."""
_LENGTH: Final = 4
"""Bytes in front of each string of a BYTES tensor: its length."""


class RequestKey(NamedTuple):
    """The key of a request."""

    value: bytes
    """Empty if the request has none."""
    lasting: bool
    """All requests with the same header have the same key."""


def key_of(route: WeightedRoute, request: InferenceRequest) -> RequestKey:
    """Return the key of a request: its sequence, the first of the route's keys that it has, its idempotency key."""
    header = request.header
    if header.sequence_id:
        name = header.sequence_key
        text = ":".join(map(str, name)) if isinstance(name, tuple) else str(name)
        return RequestKey(f"sequence:{text}".encode("utf-8", "surrogatepass"), True)
    lasting = True
    for key in (*route.sticky, StickyKey(KeySource.IDEMPOTENCY_KEY)):
        if key.source is KeySource.PROMPT:
            return RequestKey(b"prompt:" + _prefix(request, key.size), False)
        text = _text(key, header)
        if not text and request.caused:  # what the client has sent with the request that causes this one
            lasting = False
            text = _text(key, first_of(request).header)
        if text:
            return RequestKey(f"{key}:{text}".encode("utf-8", "surrogatepass"), lasting)
    return RequestKey(b"", lasting)


def _text(key: StickyKey, header: RequestHeader) -> str:
    """Return the value of a key in a header; empty if it has none."""
    source = key.source
    if source is KeySource.HEADER:
        return header.sticky_fields.get(key.name, "") if header.sticky_fields else ""
    if source is KeySource.PARAMETER:
        return _parameter(header, key.name)
    if source is KeySource.USER:
        return _parameter(header, "user")
    if source is KeySource.TENANT:
        return header.caller.tenant if header.caller is not None else ""
    if header.idempotency_key is not None:
        return header.idempotency_key.text
    return _parameter(header, NAME)


def _parameter(header: RequestHeader, name: str) -> str:
    value = header.parameters.get(name)
    return "" if value is None else str(value)


def _prefix(request: InferenceRequest, size: int) -> bytes:
    """Return the first bytes of the prompt; of the first text, or else of the first tensor, if there is no prompt."""
    inputs = request.header.inputs
    texts = [index for index, spec in enumerate(inputs) if spec.datatype is dtypes.BYTES]
    index = next((each for each in texts if inputs[each].name == PROMPT), texts[0] if texts else 0)
    if index >= len(request.data):
        return b""
    data = request.data[index]
    if isinstance(data, DeviceBuffer):
        return b""
    if inputs[index].datatype is not dtypes.BYTES:
        return bytes(data[:size])
    length = int.from_bytes(data[:_LENGTH], "little")
    return bytes(data[_LENGTH : _LENGTH + min(size, length)])
