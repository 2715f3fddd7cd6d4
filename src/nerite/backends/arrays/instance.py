"""One instance of a model that computes with arrays: a batch in, one computation, responses out.

Three ways, by what a batch is made of: one request; requests with one call, and numbers as answers; all others. The
last would do for all. The first two are what nearly every batch is, and there each microsecond counts: behind a model
that computed for 50, whatever Python touches has to come back into the caches first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from nerite.backends import configuration
from nerite.backends.arrays import batches
from nerite.backends.arrays.batches import Ragged
from nerite.backends.arrays.calls import ArrayCall, ArrayCalls, OutputSelection, OutputSelections, Text, strings_as_text
from nerite.backends.arrays.graph import ModelGraph, check_against_graph
from nerite.backends.configuration import TensorPort, all_inputs, all_outputs, batching
from nerite.backends.interface import ExecutionTimes, ModelContext
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array

Compute: TypeAlias = Callable[[OutputSelection, Mapping[str, Array]], Sequence[Array]]
"""Computes the outputs of a selection, in its order, from inputs by name. Raises ``NeriteError``.

Inputs are good until it returns: what it gives back may be a view on one only where that belongs to a single request.
"""


class ArrayInstance:
    """Executes batches with a computation; shares that with other instances where several threads may call it."""

    def __init__(
        self, compute: Compute, calls: ArrayCalls, selections: OutputSelections, ragged: Ragged, *, batching: bool
    ) -> None:
        self._compute: Compute | None = compute
        self._calls = calls
        self._selections = selections
        self._ragged = ragged
        self._batching = batching
        self._joiner = batches.Joiner()

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        """Answer a batch with one computation. Raises what that raises."""
        if self._ragged:
            return self._execute_all(requests, timings)
        if len(requests) == 1:
            return [self._execute_one(requests[0], timings)]
        if not self._batching:
            return [self._execute_one(request, timings) for request in requests]
        if self._selections.text:
            return self._execute_all(requests, timings)
        header = requests[0].header
        call = self._calls.of(header)
        for request in requests:
            if request.header is not header and self._calls.of(request.header) is not call:
                return self._execute_all(requests, timings)
        return self._execute_equals(requests, call, timings)

    checks_readiness = False

    def is_ready(self) -> bool:
        """Return True: a computation has no bad days."""
        return True

    def close(self) -> None:
        """Let go of the computation and of the buffers."""
        self._compute = None
        self._joiner = batches.Joiner()

    def _execute_one(self, request: InferenceRequest, timings: ExecutionTimes) -> InferenceResponse:
        call = self._calls.of(request.header)
        arrays = self._computed(call.selection, batches.feed_of_one(request, call), timings)
        return batches.reply_to_one(call.selection, arrays)

    def _execute_equals(
        self, requests: Sequence[InferenceRequest], call: ArrayCall, timings: ExecutionTimes
    ) -> list[InferenceResponse]:
        arrays = self._computed(call.selection, self._joiner.of_equals(requests, call), timings)
        return batches.replies_to_equals(call, arrays, len(requests))

    def _execute_all(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> list[InferenceResponse]:
        calls = [self._calls.of(request.header) for request in requests]
        selection = self._selections.union([call.selection for call in calls])
        inputs = self._joiner.of_all(requests, calls)
        inputs.update(self._ragged.made([call.shapes for call in calls]))
        arrays = self._computed(selection, inputs, timings)
        return batches.replies_to_all(selection, arrays, calls, self._ragged.sources)

    def _computed(
        self, selection: OutputSelection, inputs: Mapping[str, Array], timings: ExecutionTimes
    ) -> Sequence[Array]:
        assert self._compute is not None, "closed"
        timings.inputs_ready()
        arrays = self._compute(selection, inputs)
        timings.computed()
        return arrays


# A model as its callers know it: the tensors that its configuration declares, and what instances share of that.


class ModelFace:
    """One for each open model; its instances share it."""

    def __init__(
        self,
        context: ModelContext,
        inputs: Iterable[TensorPort],
        outputs: Iterable[TensorPort],
        text: Text = strings_as_text,
    ) -> None:
        """``text`` makes of strings what the framework takes."""
        self.selections = OutputSelections(context.name, str(context.version), outputs)
        self.calls = ArrayCalls({port.name: port for port in inputs}, self.selections, text)
        self._ragged = Ragged(context.config)
        self._batching = batching(context.config)

    def instance(self, compute: Compute) -> ArrayInstance:
        """Return an instance with this computation behind it."""
        return ArrayInstance(compute, self.calls, self.selections, self._ragged, batching=self._batching)


def of_graph(context: ModelContext, graph: ModelGraph, text: Text) -> ModelFace:
    """Return the face of a model that says of itself what it takes and gives.

    Raises ``NeriteError`` for the first thing in which the configuration and ``graph`` disagree.
    """
    config = context.config
    check_against_graph(context.name, config, graph)
    batched = batching(config)
    takes = {**graph.inputs, **graph.defaulted}
    inputs = [
        configuration.of_entry(entry, batching=batched, scalar=not takes[entry["name"]].dims)
        for entry in all_inputs(config)
    ]
    outputs = [
        configuration.of_entry(entry, batching=batched, scalar=not graph.outputs[entry["name"]].dims)
        for entry in all_outputs(config)
    ]
    return ModelFace(context, inputs, outputs, text)
