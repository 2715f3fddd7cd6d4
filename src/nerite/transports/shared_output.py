"""Outputs that their caller wants in shared memory."""

from __future__ import annotations

from nerite.core.errors import Internal
from nerite.core.request import InferenceRequest, PlacedRequest
from nerite.core.tensor import Buffer, TensorSpec


def write(request: InferenceRequest, spec: TensorSpec, data: Buffer) -> None:
    """Write an output where the caller wants it. Raises ``Internal`` where it does not fit."""
    assert isinstance(request, PlacedRequest)
    place = request.places[spec.name]
    size = len(data)
    if size > len(place):
        raise Internal(
            f"shared memory size specified with the request for output '{spec.name}' ({len(place)} bytes) should be at "
            f"least {size} bytes to hold the results"
        )
    place[:size] = data
