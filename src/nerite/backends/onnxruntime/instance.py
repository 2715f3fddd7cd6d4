"""One instance of an ONNX model: a batch in, a run of the session, responses out.

Three ways, by what a batch is made of: one request; requests with one call, and numbers as answers; all others. The
last would do for all. The first two are what nearly every batch is, and there each microsecond counts: behind a model
that computed for 50, whatever Python touches has to come back into the caches first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nerite.backends.interface import Marks
from nerite.backends.onnxruntime import feeds, replies, session
from nerite.backends.onnxruntime.call import Call, Calls
from nerite.backends.onnxruntime.ragged import Ragged
from nerite.backends.onnxruntime.runs import Run
from nerite.backends.onnxruntime.selection import Selection, Selections
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array


class OnnxInstance:
    """Executes batches with a session that it may share with other instances: ONNX Runtime's are thread-safe."""

    def __init__(
        self,
        run: Run,
        run_options: Any,
        calls: Calls,
        selections: Selections,
        ragged: Ragged,
        batching: bool,
    ) -> None:
        self._run: Run | None = run
        self._run_options = run_options
        self._calls = calls
        self._selections = selections
        self._ragged = ragged
        self._batching = batching
        self._joiner = feeds.Joiner()

    def execute(self, requests: Sequence[InferenceRequest], marks: Marks) -> Sequence[InferenceResponse]:
        """Answer a batch with one run of the session. Raises ``Internal`` with what ONNX Runtime says went wrong."""
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

    def is_ready(self) -> bool:
        """Return True: a session has no bad days."""
        return True

    def close(self) -> None:
        """Let go of the session and of the buffers."""
        self._run = None
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
        assert self._run is not None, "closed"
        marks.inputs_ready()
        try:
            arrays = self._run(selection.names, inputs, self._run_options)
        except Exception as error:  # Whatever the framework raises says why it cannot compute this batch.
            raise session.translated(error) from error
        marks.computed()
        return arrays
