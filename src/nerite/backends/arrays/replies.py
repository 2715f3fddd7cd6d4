"""From what a model gives to responses: each gets views on the one array that all of the batch came out in.

But for small arrays: up to some kilobytes, a copy costs less than half of a view, and nearly nothing to pass on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Final

from nerite.backends.arrays.call import Call
from nerite.backends.arrays.ragged import scattered
from nerite.backends.arrays.selection import Selection
from nerite.backends.ports import Port, Shape
from nerite.core.errors import Internal
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Array, Buffer, encode_bytes

SMALL: Final = 8192
"""Bytes in one output of a batch up to which it is copied."""


def of_one(selection: Selection, arrays: Sequence[Array]) -> InferenceResponse:
    """Return the response to a request that was executed alone and has no ragged outputs."""
    return InferenceResponse(
        selection.header(tuple([array.shape for array in arrays])),
        [encode_bytes(array) if array.dtype.kind == "O" else _raw(array) for array in arrays],
    )


def of_equals(call: Call, arrays: Sequence[Array], count: int) -> list[InferenceResponse]:
    """Return the responses to ``count`` requests with one call, without strings and ragged outputs."""
    rows = call.rows
    shapes, pieces = [], []
    for port, array in zip(call.selection.ports, arrays, strict=True):
        shape = array.shape
        if not shape or shape[0] != rows * count:
            raise _wrong_rows(port, array, rows * count)
        shapes.append((rows, *shape[1:]))
        raw = _raw(array)
        width = len(raw) // count
        pieces.append([raw[start * width : (start + 1) * width] for start in range(count)])
    header = call.selection.header(tuple(shapes))
    return [InferenceResponse(header, data) for data in zip(*pieces, strict=True)]


def of_all(
    selection: Selection, arrays: Sequence[Array], calls: Sequence[Call], sources: Mapping[str, str]
) -> list[InferenceResponse]:
    """Return one response for each call of a batch, with the outputs that it asked for.

    ``selection`` is what was computed, in the order of ``arrays``; ``sources`` names the ragged outputs, each with the
    input that has the shape of its parts. Raises ``Internal`` if an output is not made of the rows of the batch.
    """
    shapes = {
        port.name: _ragged_shapes(port, array, calls, sources[port.name])
        if port.name in sources
        else _row_shapes(port, array, calls)
        for port, array in zip(selection.ports, arrays, strict=True)
    }
    pieces = {
        port.name: _pieces(array, [prod(shapes[port.name][call]) for call in calls])
        for port, array in zip(selection.ports, arrays, strict=True)
    }
    headers: dict[Call, ResponseHeader] = {}
    responses = []
    for index, call in enumerate(calls):
        names = call.selection.names
        if call not in headers:
            headers[call] = call.selection.header(tuple([shapes[name][call] for name in names]))
        responses.append(InferenceResponse(headers[call], [pieces[name][index] for name in names]))
    return responses


def _wrong_rows(port: Port, array: Array, rows: int) -> Internal:
    return Internal(
        f"output '{port.name}' has shape {list(array.shape)} for a batch of {rows}; its first dimension has to be that "
        "of the batch"
    )


def _row_shapes(port: Port, array: Array, calls: Sequence[Call]) -> dict[Call, Shape]:
    rows = sum([call.rows for call in calls])
    if array.shape[:1] != (rows,):
        raise _wrong_rows(port, array, rows)
    inner = array.shape[1:]
    return {call: (call.rows, *inner) for call in set(calls)}


def _ragged_shapes(port: Port, array: Array, calls: Sequence[Call], source: str) -> dict[Call, Shape]:
    shapes = scattered(port, array.size, [call.shapes[source] for call in calls])
    return dict(zip(calls, shapes, strict=True))


def _pieces(array: Array, sizes: Sequence[int]) -> list[Buffer]:
    """Cut ``array`` into pieces of so many elements each, in wire form."""
    bounds = pairwise(accumulate(sizes, initial=0))
    if array.dtype.kind == "O":
        flat = array.reshape(-1)
        return [encode_bytes(flat[start:end]) for start, end in bounds]
    raw = _raw(array)
    width = array.itemsize
    return [raw[start * width : end * width] for start, end in bounds]


def _raw(array: Array) -> Buffer:
    return array.tobytes() if array.nbytes <= SMALL else array.data.cast("B")
