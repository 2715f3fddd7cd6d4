"""Batches: joins requests into input arrays, and cuts output arrays into responses. Also ragged batches.

The input of a single request is a view on its buffer. The buffers of several are joined with ``bytes.join``, which is
the fastest way for few and for many pieces (0.8 microseconds for 32 of 64 bytes, where ``numpy.concatenate`` takes
20), and which releases the GIL for more than a megabyte. A buffer of our own pays only for sizes that the allocator
does not reuse by itself: from 32 MB on, fresh memory costs more than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np

from nerite.backends.arrays.calls import ArrayCall, Feed, OutputSelection
from nerite.backends.configuration import Shape, TensorPort
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Array, Buffer, TensorData, encode_bytes
from nerite.devices.dlpack import DeviceArray

LARGE: Final = 32 << 20
"""Bytes in one input of a batch from which on the instance's own buffer is used."""


def feed_of_one(request: InferenceRequest, call: ArrayCall) -> dict[str, Array]:
    """Return the inputs of one request: views on its buffers, except for strings."""
    return {
        # One call where ``frombuffer(...).reshape(...)`` would be two, for every input of every request.
        name: text(shape, data) if text else np.ndarray(shape, dtype, data)
        for (name, dtype, shape, text), data in zip(call.feeds, request.buffers, strict=True)
    }


class Joiner:
    """Joins the inputs of batches. Each instance has one, which keeps the buffers for large inputs."""

    def __init__(self) -> None:
        self._large: dict[str, Array] = {}

    def of_equals(self, requests: Sequence[InferenceRequest], call: ArrayCall) -> dict[str, Array]:
        """Return the inputs of requests with the same call. Valid until the next batch."""
        arrays = {}
        for position, feed in enumerate(call.feeds):
            parts = cast(list[Buffer], [request.data[position] for request in requests])
            arrays[feed.name] = self._joined(feed, feed.shape[0] * len(parts), parts)
        return arrays

    def of_all(self, requests: Sequence[InferenceRequest], calls: Sequence[ArrayCall]) -> dict[str, Array]:
        """Return the inputs of requests with different calls. Valid until the next batch."""
        arrays = {}
        for feed in calls[0].feeds:
            positions = [call.positions[feed.name] for call in calls]
            parts = [request.buffers[position] for request, position in zip(requests, positions, strict=True)]
            rows = sum([call.feeds[position].shape[0] for call, position in zip(calls, positions, strict=True)])
            arrays[feed.name] = self._joined(feed, rows, parts)
        return arrays

    def _joined(self, feed: Feed, rows: int, parts: list[Buffer]) -> Array:
        shape = (rows, *feed.shape[1:])
        if feed.text:
            return feed.text(shape, b"".join(parts))
        size = prod(shape) * feed.dtype.itemsize
        if size < LARGE:
            return np.ndarray(shape, feed.dtype, b"".join(parts))
        buffer = self._large.get(feed.name)
        if buffer is None or len(buffer) < size:
            buffer = self._large[feed.name] = np.empty(size, np.uint8)
        np.concatenate([np.frombuffer(part, np.uint8) for part in parts], out=buffer[:size])
        return np.ndarray(shape, feed.dtype, buffer.data)


# Ragged batches, whose rows differ in length. Pure.
#
# The rows of a ragged input reach the model as one flat array. ``batch_input`` of a configuration adds inputs that
# locate the part of each request; ``batch_output`` names outputs that are flat in the same way.


def _element_count(shapes: Sequence[Shape]) -> Array:
    return np.array([prod(shape) for shape in shapes])


def _accumulated(shapes: Sequence[Shape]) -> Array:
    return np.cumsum(_element_count(shapes))


def _accumulated_with_zero(shapes: Sequence[Shape]) -> Array:
    return np.concatenate([[0], _accumulated(shapes)])


def _max_as_shape(shapes: Sequence[Shape]) -> Array:
    # The model uses only the shape.
    return np.zeros(max(prod(shape) for shape in shapes))


def _item_shape(shapes: Sequence[Shape]) -> Array:
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])])


def _item_shape_flat(shapes: Sequence[Shape]) -> Array:
    return _item_shape(shapes).reshape(-1)


_KINDS: Final[dict[str, Callable[[Sequence[Shape]], Array]]] = {
    "BATCH_ELEMENT_COUNT": _element_count,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _accumulated_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _max_as_shape,
    "BATCH_ITEM_SHAPE": _item_shape,
    "BATCH_ITEM_SHAPE_FLATTEN": _item_shape_flat,
}


class RaggedBatchInput(NamedTuple):
    """Inputs that are computed for each batch from the shapes of one input of its requests."""

    kind: str
    targets: tuple[str, ...]
    source: str
    dtype: np.dtype[np.generic]

    def value(self, shapes: Sequence[Shape]) -> Array:
        """Return the tensor for requests whose source inputs have these shapes, batch dimension included."""
        return _KINDS[self.kind](shapes).astype(self.dtype)


class Ragged:
    """Ragged inputs and outputs of a model, from a validated configuration. False if it has none."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._batch_inputs = tuple(
            RaggedBatchInput(
                entry.get("kind", "BATCH_ELEMENT_COUNT"),
                tuple(entry["target_name"]),
                entry["source_input"][0],
                dtypes.BY_CONFIG_NAME[entry["data_type"]].numpy,
            )
            for entry in config.get("batch_input", ())
        )
        self.sources = {
            target: entry["source_input"][0]
            for entry in config.get("batch_output", ())
            for target in entry["target_name"]
        }
        """Maps the name of a flat output to the input whose shape its parts have."""
        self._any = bool(
            self._batch_inputs
            or self.sources
            or any(entry.get("allow_ragged_batch") for entry in config.get("input", ()))
        )

    def __bool__(self) -> bool:
        return self._any

    def made(self, shapes: Sequence[Mapping[str, Shape]]) -> dict[str, Array]:
        """Return the additional inputs of a batch, from the shapes of each request's inputs by name."""
        arrays = {}
        for batch_input in self._batch_inputs:
            value = batch_input.value([each[batch_input.source] for each in shapes])
            arrays.update(dict.fromkeys(batch_input.targets, value))
        return arrays


def scattered(port: TensorPort, size: int, sources: Sequence[Shape]) -> list[Shape]:
    """Return the shape of each request's part of a flat output of ``size`` elements.

    A free dimension of the output has the size of that dimension of the request's source input. Raises ``Internal``
    if the parts do not add up to ``size``.
    """
    declared = (-1, *port.model_dims)
    try:
        shapes = [tuple(source[at] if dim == -1 else dim for at, dim in enumerate(declared)) for source in sources]
    except IndexError:
        raise Internal(f"output '{port.name}' has more dimensions than the input whose shape it is to have") from None
    if (expected := sum(map(prod, shapes))) != size:
        raise Internal(f"output '{port.name}' has {size} elements, the requests of the batch make {expected}")
    return shapes


# Responses: views on the output array of the whole batch.
#
# Small arrays are copied: up to some kilobytes, a copy costs less than half of a view, and nearly nothing to pass on.

SMALL: Final = 8192
"""Bytes in one output of a batch up to which it is copied."""


OutputArray: TypeAlias = Array | DeviceArray
"""An output of a batch, on the host or on a GPU."""


def reply_to_one(selection: OutputSelection, arrays: Sequence[OutputArray]) -> InferenceResponse:
    """Return the response to a request that was executed alone and has no ragged outputs."""
    return InferenceResponse(
        selection.header(tuple([array.shape for array in arrays])),
        [_encoded(array) if array.dtype.kind == "O" else _raw(array) for array in arrays],
    )


def replies_to_equals(call: ArrayCall, arrays: Sequence[OutputArray], count: int) -> list[InferenceResponse]:
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


def replies_to_all(
    selection: OutputSelection, arrays: Sequence[OutputArray], calls: Sequence[ArrayCall], sources: Mapping[str, str]
) -> list[InferenceResponse]:
    """Return one response for each call of a batch, with the outputs that it requested.

    ``arrays`` are the outputs of ``selection``, in its order; ``sources`` maps each ragged output to the input that
    has the shape of its parts. Raises ``Internal`` if an output does not have the rows of the batch.
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
    headers: dict[ArrayCall, ResponseHeader] = {}
    responses = []
    for index, call in enumerate(calls):
        names = call.selection.names
        if call not in headers:
            headers[call] = call.selection.header(tuple([shapes[name][call] for name in names]))
        responses.append(InferenceResponse(headers[call], [pieces[name][index] for name in names]))
    return responses


def _wrong_rows(port: TensorPort, array: OutputArray, rows: int) -> Internal:
    return Internal(
        f"output '{port.name}' has shape {list(array.shape)} for a batch of {rows}; its first dimension has to be that "
        "of the batch"
    )


def _row_shapes(port: TensorPort, array: OutputArray, calls: Sequence[ArrayCall]) -> dict[ArrayCall, Shape]:
    rows = sum([call.rows for call in calls])
    if array.shape[:1] != (rows,):
        raise _wrong_rows(port, array, rows)
    inner = array.shape[1:]
    return {call: (call.rows, *inner) for call in set(calls)}


def _ragged_shapes(
    port: TensorPort, array: OutputArray, calls: Sequence[ArrayCall], source: str
) -> dict[ArrayCall, Shape]:
    shapes = scattered(port, array.size, [call.shapes[source] for call in calls])
    return dict(zip(calls, shapes, strict=True))


def _pieces(array: OutputArray, sizes: Sequence[int]) -> Sequence[TensorData]:
    """Cut ``array`` into pieces with ``sizes`` elements, in wire form."""
    bounds = pairwise(accumulate(sizes, initial=0))
    if not isinstance(array, DeviceArray) and array.dtype.kind == "O":
        flat = array.reshape(-1)
        return [encode_bytes(flat[start:end]) for start, end in bounds]
    raw = _raw(array)
    width = array.dtype.itemsize
    return [raw[start * width : end * width] for start, end in bounds]


def _encoded(array: OutputArray) -> bytes:
    assert isinstance(array, np.ndarray), "strings are on the host"
    return encode_bytes(array)


def _raw(array: OutputArray) -> TensorData:
    if isinstance(array, DeviceArray):
        return array.buffer
    return array.tobytes() if array.nbytes <= SMALL else array.data.cast("B")
