"""From requests to what a model is fed: views where that is possible, else one copy for each input.

A view on the buffer of a single request costs nothing. The buffers of several are joined: by ``bytes.join``, which is
the fastest there is for few and for many pieces (0.8 microseconds for 32 of 64 bytes, where ``numpy.concatenate``
takes 20), and which lets go of the GIL for more than a megabyte. Only beyond what the allocator reuses by itself does
a buffer of our own pay: from 32 MB on, fresh memory costs more than the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from nerite.backends.arrays.call import Call, Feed
from nerite.core.request import InferenceRequest
from nerite.core.tensor import Array, Buffer

LARGE: Final = 32 << 20
"""Bytes in one input of a batch from which on the instance's own buffer is used."""


def of_one(request: InferenceRequest, call: Call) -> dict[str, Array]:
    """Return the inputs of one request: views on its buffers, but for strings."""
    return {
        # One call where ``frombuffer(...).reshape(...)`` would be two; every input of every request comes by here.
        name: text(shape, data) if text else np.ndarray(shape, dtype, data)
        for (name, dtype, shape, text), data in zip(call.feeds, request.data, strict=True)
    }


class Joiner:
    """Makes the inputs of batches. One for each instance: it keeps the buffers for large ones."""

    def __init__(self) -> None:
        self._large: dict[str, Array] = {}

    def of_equals(self, requests: Sequence[InferenceRequest], call: Call) -> dict[str, Array]:
        """Return the inputs of requests that have one call. Good until the next batch."""
        arrays = {}
        for position, feed in enumerate(call.feeds):
            parts = [request.data[position] for request in requests]
            arrays[feed.name] = self._joined(feed, feed.shape[0] * len(parts), parts)
        return arrays

    def of_all(self, requests: Sequence[InferenceRequest], calls: Sequence[Call]) -> dict[str, Array]:
        """Return the inputs of requests that differ in rows, order of inputs or ragged sizes. Good until the next."""
        arrays = {}
        for feed in calls[0].feeds:
            positions = [call.positions[feed.name] for call in calls]
            parts = [request.data[position] for request, position in zip(requests, positions, strict=True)]
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
