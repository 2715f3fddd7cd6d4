"""What a request will take of an engine, as far as can be told without it: read before anybody counts tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nerite.core.request import InferenceRequest
from nerite.core.tensor import join_bytes
from nerite.llm.request import LONGEST, MOST_SEQUENCES, SamplingParameters

_PROMPT: Final = "text_input"
_SAMPLING: Final = "sampling_parameters"
_IMAGE: Final = "image"
_STANDARD: Final = SamplingParameters()
_UNREADABLE: Final = {"max_tokens": _STANDARD.max_tokens}
"""What sampling parameters say that the engine will refuse."""
IMAGE_TOKENS: Final = 576
"""Of an image, as long as nothing is known: a square of 24 patches."""
_LENGTH: Final = 4
"""Bytes before each element of a tensor of strings."""


class Demand(NamedTuple):
    """Of one request."""

    prompt_bytes: int
    most: int
    """Tokens that it asks for at the most, all sequences together. 0: as many as there is room for."""
    sequences: int
    priority: int = 0
    """As the engine has it: the lower ones first."""
    images: int = 0


def demand(request: InferenceRequest, allowed: int = 0, most_sequences: int = MOST_SEQUENCES) -> Demand:
    """Return what ``request`` asks for. What is wrong with it is for the engine to say.

    One that does not say how many tokens it wants gets what is usual, or all that are ``allowed`` if those are fewer;
    0: any number is. One that asks for more than ``most_sequences`` asks for one: it has to wait for nothing that makes
    room for them, as the engine refuses it.
    """
    places = _places(request)
    prompt = len(request.data[places[_PROMPT]]) - _LENGTH if _PROMPT in places else 0
    said = _said(request, places)
    sequences = _count(said.get("n"), _STANDARD.n)
    if sequences > most_sequences:
        sequences = _STANDARD.n
    most = sequences * _count(said.get("max_tokens", _STANDARD.max_tokens), 0)
    if "max_tokens" not in said and 0 < allowed < most:
        most = 0
    priority = _count(said.get("priority"), 0) or request.header.priority
    images = request.header.inputs[places[_IMAGE]].elements if _IMAGE in places else 0
    return Demand(prompt, most, sequences, priority, images)


def limit(request: InferenceRequest, most: int) -> None:
    """Have a request that does not say how many tokens it wants ask for ``most`` of each sequence."""
    places = _places(request)
    said = _said(request, places)
    if said.get("max_tokens") is not None:
        return
    limited = {**said, "max_tokens": most}
    if _SAMPLING in places:
        data = list(request.data)
        data[places[_SAMPLING]] = join_bytes([json.dumps(limited).encode()])
        request.data = data
    else:
        request.header = request.header.changed(parameters=limited)


def _places(request: InferenceRequest) -> dict[str, int]:
    return {spec.name: place for place, spec in enumerate(request.header.inputs)}


def _said(request: InferenceRequest, places: Mapping[str, int]) -> Mapping[str, Any]:
    """Return the sampling parameters as they came."""
    if _SAMPLING not in places:
        return request.header.parameters
    text = bytes(request.data[places[_SAMPLING]])[_LENGTH:]
    if len(text) > LONGEST:
        return _UNREADABLE
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return _UNREADABLE
    return said if isinstance(said, dict) else _UNREADABLE


def _count(value: Any, default: int) -> int:
    """Return a number of things as the engine reads it; ``default`` for what it will refuse."""
    try:
        return max(int(value), default)
    except (TypeError, ValueError, OverflowError):
        return default
