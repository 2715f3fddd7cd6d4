"""Output options of a request: classification, which returns the top classes as strings, and shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument
from nerite.core.request import InferenceRequest, SharedMemoryRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, TensorSpec, join_bytes

_MAX_ELEMENTS = 1_000_000
_UNSUPPORTED = frozenset((dtypes.BYTES, dtypes.BOOL, dtypes.FP16, dtypes.BF16))


def top_classes(
    spec: TensorSpec, data: Buffer, count: int, labels: Sequence[str], batching: bool
) -> tuple[TensorSpec, bytes]:
    """Return the ``count`` largest elements of each row as ``value:index[:label]``, largest first.

    Raises ``InvalidArgument`` for a datatype that cannot be sorted here, or a tensor that is too large.
    """
    if spec.datatype in _UNSUPPORTED:
        raise InvalidArgument(f"class result not available for output due to unsupported type '{spec.datatype.name}'")
    if spec.elements > _MAX_ELEMENTS:
        raise InvalidArgument("classification output tensor too large")
    rows, columns = (spec.shape[0], math.prod(spec.shape[1:])) if batching and spec.shape else (1, spec.elements)
    values = np.frombuffer(data, spec.datatype.numpy).reshape(rows, columns)
    count = min(count, values.shape[1])
    exact = spec.datatype in (dtypes.FP32, dtypes.FP64)
    # For integers, the complement reverses the order without overflow.
    order = np.argsort(-values if exact else ~values, axis=1, kind="stable")[:, :count]
    strings: list[str] = []
    for row, indices in zip(values, order, strict=True):
        for index in indices.tolist():
            text = f"{float(row[index]):.6f}" if exact else str(int(row[index]))
            label = f":{labels[index]}" if index < len(labels) else ""
            strings.append(f"{text}:{index}{label}")
    shape = (rows, count) if batching else (count,)
    return TensorSpec(spec.name, dtypes.BYTES, shape), join_bytes(strings)


# Outputs requested in shared memory.


def write_to_region(request: InferenceRequest, spec: TensorSpec, data: Buffer) -> None:
    """Write an output to its shared memory region. Raises ``NeriteError`` if it does not fit."""
    assert isinstance(request, SharedMemoryRequest)
    place = request.places[spec.name]
    size = len(data)
    if size > place.size:
        raise Internal(
            f"shared memory size specified with the request for output '{spec.name}' ({place.size} bytes) should be at "
            f"least {size} bytes to hold the results"
        )
    place.write(data)


def write_all_to_regions(
    request: InferenceRequest, response: InferenceResponse, placed: Sequence[bool]
) -> list[Buffer]:
    """Write the outputs that are ``placed`` to shared memory, and return the others. Raises ``NeriteError``."""
    assert response.header is not None
    rest: list[Buffer] = []
    for spec, data, elsewhere in zip(response.header.outputs, response.buffers, placed, strict=True):
        if elsewhere:
            write_to_region(request, spec, data)
        else:
            rest.append(data)
    return rest
