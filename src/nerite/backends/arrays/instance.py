"""One instance of a model that computes with arrays: a batch in, one computation, responses out.

Three ways, by what a batch is made of: one request; requests with one call, and numbers as answers; all others. The
last would do for all. The first two are what nearly every batch is, and there each microsecond counts: behind a model
that computed for 50, whatever Python touches has to come back into the caches first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from nerite.backends.arrays import feeds, replies
from nerite.backends.arrays.call import Call, Calls
from nerite.backends.arrays.ragged import Ragged
from nerite.backends.arrays.selection import Selection, Selections
from nerite.backends.interface import Marks
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array

Compute: TypeAlias = Callable[[Selection, Mapping[str, Array]], Sequence[Array]]
"""Computes the outputs of a selection, in its order, from inputs by name. Raises ``NeriteError``.

Inputs are good until it returns: what it gives back may be a view on one only where that belongs to a single request.
"""


class ArrayInstance:
    """Executes batches with a computation; shares that with other instances where several threads may call it."""

    def __init__(
        self, compute: Compute, calls: Calls, selections: Selections, ragged: Ragged, *, batching: bool
    ) -> None:
        self._compute: Compute | None = compute
        self._calls = calls
        self._selections = selections
        self._ragged = ragged
        self._batching = batching
        self._joiner = feeds.Joiner()

    def execute(self, requests: Sequence[InferenceRequest], marks: Marks) -> Sequence[InferenceResponse]:
        """Answer a batch with one computation. Raises what that raises."""
        if self._ragged:
            return self._execute_all(requests, marks)
        if len(requests) == 1:
            return [self._execute_one(requests[0], marks)]
        if not self._batching:
            return [self._execute_one(request, marks) for request in requests]
        if self._selections.text:
            return self._execute_all(requests, marks)
        header = requests[0].header
        call = self._calls.of(header)
        for request in requests:
            if request.header is not header and self._calls.of(request.header) is not call:
                return self._execute_all(requests, marks)
        return self._execute_equals(requests, call, marks)

    checks_readiness = False

    def is_ready(self) -> bool:
        """Return True: a computation has no bad days."""
        return True

    def close(self) -> None:
        """Let go of the computation and of the buffers."""
        self._compute = None
        self._joiner = feeds.Joiner()

    def _execute_one(self, request: InferenceRequest, marks: Marks) -> InferenceResponse:
        call = self._calls.of(request.header)
        arrays = self._computed(call.selection, feeds.of_one(request, call), marks)
        return replies.of_one(call.selection, arrays)

    def _execute_equals(
        self, requests: Sequence[InferenceRequest], call: Call, marks: Marks
    ) -> list[InferenceResponse]:
        arrays = self._computed(call.selection, self._joiner.of_equals(requests, call), marks)
        return replies.of_equals(call, arrays, len(requests))

    def _execute_all(self, requests: Sequence[InferenceRequest], marks: Marks) -> list[InferenceResponse]:
        calls = [self._calls.of(request.header) for request in requests]
        selection = self._selections.union([call.selection for call in calls])
        inputs = self._joiner.of_all(requests, calls)
        inputs.update(self._ragged.made([call.shapes for call in calls]))
        arrays = self._computed(selection, inputs, marks)
        return replies.of_all(selection, arrays, calls, self._ragged.sources)

    def _computed(self, selection: Selection, inputs: Mapping[str, Array], marks: Marks) -> Sequence[Array]:
        assert self._compute is not None, "closed"
        marks.inputs_ready()
        arrays = self._compute(selection, inputs)
        marks.computed()
        return arrays
