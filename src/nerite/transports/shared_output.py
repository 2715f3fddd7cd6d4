"""Outputs that their caller wants in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from nerite.core.errors import Internal
from nerite.core.request import InferenceRequest, PlacedRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, TensorSpec


def write(request: InferenceRequest, spec: TensorSpec, data: Buffer) -> None:
    """Write an output where the caller wants it. Raises ``NeriteError`` where it does not fit."""
    assert isinstance(request, PlacedRequest)
    place = request.places[spec.name]
    size = len(data)
    if size > place.size:
        raise Internal(
            f"shared memory size specified with the request for output '{spec.name}' ({place.size} bytes) should be at "
            f"least {size} bytes to hold the results"
        )
    place.write(data)


def write_all(request: InferenceRequest, response: InferenceResponse, placed: Sequence[bool]) -> list[Buffer]:
    """Write the outputs that are ``placed`` where the caller wants them, and return the others. Raises as ``write``."""
    assert response.header is not None
    rest: list[Buffer] = []
    for spec, data, elsewhere in zip(response.header.outputs, response.data, placed, strict=True):
        if elsewhere:
            write(request, spec, data)
        else:
            rest.append(data)
    return rest
