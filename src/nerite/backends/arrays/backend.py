"""Base of an array backend and of its models. A framework adds what only it can know.

The smallest backend is one subclass of each class (``docs/custom-backends.md`` shows one): ``ArrayModel`` needs
``key``, ``load``, ``graph`` and ``computation``; ``ArrayBackend`` needs ``name`` and ``model``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from nerite.backends.arrays.calls import (
    strings_as_bytes,
)
from nerite.backends.arrays.device import DeviceArrayInstance, DeviceComputation
from nerite.backends.arrays.graph import ModelGraph, check_against_graph, complete_from_graph, needs_completion
from nerite.backends.arrays.instance import ArrayInstance, Compute, ModelInterface
from nerite.backends.configuration import (
    Shape,
    TensorPort,
    all_inputs,
    all_outputs,
    batching,
    first_instance,
    of_entry,
    pins,
)
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.tensor import Array, Buffer

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
    def computation(self, copy: Any, instance: InstanceContext) -> Compute | DeviceComputation:
        """Return the function that runs a copy for one instance. If it has a method ``close``, that is called too.

        A ``DeviceComputation`` is for an instance on a GPU.
        """

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
        compute = self.computation(self.copy_for(context), context)
        if isinstance(compute, DeviceComputation):
            pinned = [context.pinned if pins(self.context.config, side) else None for side in ("input", "output")]
            return DeviceArrayInstance(self._face, compute, *pinned)
        return self._face.instance(compute)

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
