"""Estimates the demand of a request on an engine from its inputs alone, before its tokens are counted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nerite.core.request import InferenceRequest
from nerite.core.tensor import join_bytes
from nerite.llm.request import TOKENS
from nerite.llm.sampling_parameters import LONGEST, MAX_SEQUENCES, SamplingParameters

_PROMPT: Final = "text_input"
_SAMPLING: Final = "sampling_parameters"
_IMAGE: Final = "image"
_STANDARD: Final = SamplingParameters()
_UNREADABLE: Final = {"max_tokens": _STANDARD.max_tokens}
"""Stands for sampling parameters that the engine will reject."""
IMAGE_TOKENS: Final = 576
"""Assumed tokens per image until a measured number is known: a square of 24 patches."""
_LENGTH: Final = 4
"""Bytes before each element of a tensor of strings."""


class Demand(NamedTuple):
    """Demand of one request on an engine."""

    prompt_bytes: int
    most: int
    """Maximum number of tokens to generate, all sequences together; 0 for as many as fit."""
    sequences: int
    priority: int = 0
    """As engines define it: lower values run first."""
    images: int = 0


def demand(request: InferenceRequest, allowed: int = 0, max_sequences: int = MAX_SEQUENCES) -> Demand:
    """Return the demand of ``request``. Invalid requests are left for the engine to reject.

    A request without ``max_tokens`` counts with the default, or with all that are ``allowed`` if those are fewer; 0
    means no limit. A request for more than ``max_sequences`` counts as one sequence: the engine rejects it, so it need
    not wait for room.
    """
    places = _places(request)
    prompt = sum(len(request.data[places[name]]) - _LENGTH for name in (_PROMPT, TOKENS) if name in places)
    values = _sampling_values(request, places)
    sequences = _count(values.get("n"), _STANDARD.n)
    if sequences > max_sequences:
        sequences = _STANDARD.n
    limit = values.get("max_tokens", _STANDARD.max_tokens)
    most = sequences * (1 if limit == 0 else _count(limit, 0))
    if "max_tokens" not in values and 0 < allowed < most:
        most = 0
    priority = _count(values.get("priority"), 0) or request.header.priority
    images = request.header.inputs[places[_IMAGE]].elements if _IMAGE in places else 0
    return Demand(prompt, most, sequences, priority, images)


def limit(request: InferenceRequest, most: int) -> None:
    """Set ``max_tokens`` of a request that does not set it to ``most`` tokens per sequence."""
    places = _places(request)
    values = _sampling_values(request, places)
    if values.get("max_tokens") is not None:
        return
    limited = {**values, "max_tokens": most}
    if _SAMPLING in places:
        data = list(request.data)
        data[places[_SAMPLING]] = join_bytes([json.dumps(limited).encode()])
        request.data = data
    else:
        request.header = request.header.changed(parameters=limited)


def _places(request: InferenceRequest) -> dict[str, int]:
    return {spec.name: place for place, spec in enumerate(request.header.inputs)}


def _sampling_values(request: InferenceRequest, places: Mapping[str, int]) -> Mapping[str, Any]:
    """Return the sampling parameters as received."""
    if _SAMPLING not in places:
        return request.header.parameters
    text = bytes(request.buffers[places[_SAMPLING]])[_LENGTH:]
    if len(text) > LONGEST:
        return _UNREADABLE
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return _UNREADABLE
    return values if isinstance(values, dict) else _UNREADABLE


def _count(value: Any, default: int) -> int:
    """Return a count as the engine reads it; ``default`` for values that it will reject."""
    try:
        return max(int(value), default)
    except (TypeError, ValueError, OverflowError):
        return default
