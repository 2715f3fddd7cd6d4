"""Instances of an array backend: they execute batches with a computation of the framework, on arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from nerite.backends.arrays import batches
from nerite.backends.arrays.batches import Ragged
from nerite.backends.arrays.calls import ArrayCall, ArrayCalls, OutputSelection, OutputSelections, Text, strings_as_text
from nerite.backends.configuration import TensorPort, batching
from nerite.backends.interface import ExecutionTimes, ModelContext
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array

Compute: TypeAlias = Callable[[OutputSelection, Mapping[str, Array]], Sequence[Array]]
"""Computes the outputs of a selection, in its order, from inputs by name.

The inputs are valid until it returns: an output may be a view on an input only if that belongs to a single request.
"""

Failure: TypeAlias = Callable[[Exception], Exception]
"""Translates an exception of a computation into the error for clients; returns it unchanged if it is unforeseen."""


@runtime_checkable
class ClosableComputation(Protocol):
    """A computation that holds resources."""

    def close(self) -> None:
        """Release all resources. Called once."""


def _unforeseen(error: Exception) -> Exception:
    return error


class ModelInterface:
    """Model as its clients see it: the tensors of its configuration, and the memos that its instances share."""

    def __init__(
        self,
        context: ModelContext,
        inputs: Iterable[TensorPort],
        outputs: Iterable[TensorPort],
        text: Text = strings_as_text,
        failure: Failure = _unforeseen,
    ) -> None:
        """``text`` converts strings to what the framework takes; ``failure`` translates its exceptions."""
        ports = {port.name: port for port in inputs}
        self.datatypes = {name: port.datatype for name, port in ports.items()}
        self.selections = OutputSelections(context.name, str(context.version), outputs)
        self.calls = ArrayCalls(ports, self.selections, text)
        self.ragged = Ragged(context.config)
        self.failure = failure
        self.batching = batching(context.config)

    def instance(self, compute: Compute) -> ArrayInstance:
        """Return an instance that runs a computation."""
        return ArrayInstance(self, compute)


class ArrayInstance:
    """Executes batches with a computation, which other instances may share if it is thread-safe.

    A batch takes one of three paths: one request; several requests with the same call and only numeric outputs;
    anything else. The third would do for all of them. The first two are what nearly every batch is, and there each
    microsecond counts: after a model that computed for 50, everything that Python touches has to come back into the
    caches first.
    """

    checks_readiness = False

    def __init__(self, face: ModelInterface, compute: Compute) -> None:
        self.compute: Compute | None = compute
        self._calls = face.calls
        self._selections = face.selections
        self._ragged = face.ragged
        self._failure = face.failure
        self._batching = face.batching
        self._joiner = batches.Joiner()

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        """Answer a batch with one computation. Raises ``NeriteError``."""
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

    def is_ready(self) -> bool:
        """Return True: a computation that could be opened can serve."""
        return True

    def close(self) -> None:
        """Release the computation and the buffers."""
        compute, self.compute = self.compute, None
        if isinstance(compute, ClosableComputation):
            compute.close()
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
        assert self.compute is not None, "closed"
        timings.inputs_ready()
        try:
            arrays = self.compute(selection, inputs)
        except NeriteError:
            raise
        except Exception as error:  # the framework may raise anything
            failure = self._failure(error)
            if failure is error:
                raise
            raise failure from error
        timings.computed()
        return arrays
