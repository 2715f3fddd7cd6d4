"""Base of an array backend and of its models, and their instances. A framework adds what only it can know.

The smallest backend is one subclass of each class (``docs/custom-backends.md`` shows one): ``ArrayModel`` needs
``key``, ``load``, ``graph`` and ``computation``; ``ArrayBackend`` needs ``name`` and ``model``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from nerite.backends.arrays import batches
from nerite.backends.arrays.batches import Ragged
from nerite.backends.arrays.calls import (
    ArrayCall,
    ArrayCalls,
    OutputSelection,
    OutputSelections,
    Text,
    strings_as_bytes,
    strings_as_text,
)
from nerite.backends.arrays.graph import ModelGraph, check_against_graph, complete_from_graph, needs_completion
from nerite.backends.configuration import (
    Shape,
    TensorPort,
    all_inputs,
    all_outputs,
    batching,
    first_instance,
    of_entry,
)
from nerite.backends.interface import ExecutionTimes, InstanceContext, ModelContext
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array, Buffer

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
        self.selections = OutputSelections(context.name, str(context.version), outputs)
        self.calls = ArrayCalls({port.name: port for port in inputs}, self.selections, text)
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


K = TypeVar("K", bound=Hashable)


class ArrayModel(ABC, Generic[K]):
    """Open model version. Its framework opens *copies* of the model, each for one key, and computes with them.

    A copy is whatever the framework needs to run the model: a session, an engine, an interpreter. Instances with equal
    keys can use the same copy, at the same time if the framework ``shares`` it.
    """

    def __init__(self, context: ModelContext) -> None:
        """Raises ``NeriteError`` for a configuration that cannot be right. Loads nothing yet."""
        self.context = context
        self._lock = threading.Lock()
        self._spare: tuple[Hashable, Any] | None = None
        """The copy that the graph was read from; the first instance takes it if its key is the same."""
        self.shared_copies: dict[K, Any] = {}
        """Copies that several instances may use."""
        self._face: ModelInterface | None = None

    @abstractmethod
    def key(self, instance: InstanceContext) -> K:
        """Return everything that determines the copy for an instance: file, device, threads, options.

        Raises ``NeriteError`` if the file is missing or an option has an invalid value.
        """

    @abstractmethod
    def load(self, key: K) -> Any:
        """Load a copy. May be slow. Raises ``NeriteError`` with what is wrong and, if there is one, the remedy."""

    def shares(self, key: K, copy: Any) -> bool:
        """Return True if several threads may run this copy at the same time. By default each instance gets its own."""
        return False

    @abstractmethod
    def graph(self, copy: Any) -> ModelGraph:
        """Return the inputs and outputs of a copy. Raises ``Unsupported`` for types that the protocol lacks."""

    @abstractmethod
    def computation(self, copy: Any, instance: InstanceContext) -> Compute:
        """Return the function that runs a copy for one instance. If it has a method ``close``, that is called too."""

    def text(self, shape: Shape, data: Buffer) -> Array:
        """Convert strings from wire form to the array that the framework takes: by default, of ``bytes``."""
        return strings_as_bytes(shape, data)

    def failure(self, error: Exception) -> Exception:
        """Return the error that clients get if the computation raises ``error``; itself if it is unforeseen."""
        return error

    def source(self) -> Hashable:
        """Return everything that determines what ``read`` returns: by default, the key of the first instance."""
        return self.key(first_instance(self.context))

    def read(self) -> Any:
        """Return what ``graph`` needs: by default, a copy for the first instance.

        Override it, and ``source``, if the graph can be had without a copy that runs.
        """
        return self.load(self.key(first_instance(self.context)))

    def completed(self, copy: Any) -> dict[str, Any]:
        """Return the configuration, completed from the graph. Raises ``NeriteError`` if the two contradict."""
        return complete_from_graph(self.context, self.graph(copy))

    def ports(self, copy: Any) -> tuple[Sequence[TensorPort], Sequence[TensorPort]]:
        """Return the inputs and outputs as the complete configuration declares them. Raises ``NeriteError``."""
        config, graph = self.context.config, self.graph(copy)
        check_against_graph(self.context.name, config, graph)
        inputs = {**graph.inputs, **graph.defaulted}
        scalars = [{name for name, tensor in side.items() if not tensor.dims} for side in (inputs, graph.outputs)]
        return self.declared(*scalars)

    def declared(
        self, scalar_inputs: set[str], scalar_outputs: set[str]
    ) -> tuple[Sequence[TensorPort], Sequence[TensorPort]]:
        """Return the ports of the configuration, which always declares dimensions, even for a scalar of the model."""
        config = self.context.config
        inputs, outputs = (
            [of_entry(entry, batching=batching(config), scalar=entry["name"] in scalars) for entry in entries]
            for entries, scalars in ((all_inputs(config), scalar_inputs), (all_outputs(config), scalar_outputs))
        )
        return inputs, outputs

    def open(self) -> None:
        """Read the model and compare it with its complete configuration. Raises ``NeriteError`` if they differ."""
        source = self.source()
        copy = self.context.memo.pop(source) if source in self.context.memo else self.read()
        self._spare = (source, copy)
        inputs, outputs = self.ports(copy)
        self._face = ModelInterface(self.context, inputs, outputs, self.text, self.failure)

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Create an instance. Raises ``NeriteError``."""
        assert self._face is not None, "not open"
        return self._face.instance(self.computation(self.copy_for(context), context))

    def close(self) -> None:
        """Drop the copies; each is freed with the last instance, or response, that refers to it."""
        self._spare = None
        self.shared_copies.clear()

    def copy_for(self, instance: InstanceContext) -> Any:
        """Return the copy that an instance computes with, which others may share. Raises ``NeriteError``."""
        key = self.key(instance)
        with self._lock:
            spare, self._spare = self._spare, None
            copy = self.shared_copies.get(key)
            if copy is None:
                copy = spare[1] if spare is not None and spare[0] == key else self.load(key)
                if self.shares(key, copy):
                    self.shared_copies[key] = copy
            return copy


class ArrayBackend:
    """Backend whose models are of one subclass of ``ArrayModel``."""

    name: str
    isolated = False
    model: type[ArrayModel[Any]]

    def needs_completion(self, context: ModelContext) -> bool:
        """Return False, and log it, if the configuration declares inputs and outputs."""
        return needs_completion(context)

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from the model.

        What was read for that is kept in the context for ``open``. Raises ``NeriteError``.
        """
        if not self.needs_completion(context):
            return context.config
        model = self.model(context)
        try:
            source, copy = model.source(), model.read()
            completed = model.completed(copy)
            context.memo[source] = copy
        finally:
            model.close()
        return completed

    def open(self, context: ModelContext) -> ArrayModel[Any]:
        """Open a model with a complete configuration. Raises ``NeriteError`` if model and configuration differ."""
        model = self.model(context)
        try:
            model.open()
        except BaseException:
            model.close()
            raise
        return model
