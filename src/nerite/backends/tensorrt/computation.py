"""Running an engine for one instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nerite.backends.arrays.selection import Selection
from nerite.backends.tensorrt import cuda, profiles
from nerite.backends.tensorrt.context import Context
from nerite.backends.tensorrt.cuda import Stream
from nerite.backends.tensorrt.description import Description
from nerite.core.tensor import Array


class Way(NamedTuple):
    """How an instance runs."""

    device: int
    profiles: tuple[int, ...]
    strategy: str
    """How a context has its memory: ``STATIC`` or ``ON_PROFILE_CHANGE``."""
    priority: str
    graphs: bool


class Computation:
    """An instance's contexts, on a stream of its own."""

    def __init__(self, model: str, engine: Any, description: Description, way: Way) -> None:
        """Raises ``NeriteError``."""
        self._model = model
        self._device = way.device
        cuda.use(way.device)
        self._stream = Stream(way.priority)
        self._profiles = {index: description.profiles[index] for index in way.profiles}
        self._contexts: dict[int, Context] = {}
        try:
            for index in way.profiles:
                self._contexts[index] = Context(
                    engine, description, index, way.strategy, self._stream, graphs=way.graphs
                )
        except BaseException:
            self.close()
            raise

    def __call__(self, selection: Selection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Compute the outputs of ``selection``. Raises ``NeriteError``."""
        # Each time: it is the thread's, and an instance is not always run by the same.
        cuda.use(self._device)
        index = profiles.choose(self._model, self._profiles, {name: array.shape for name, array in inputs.items()})
        return self._contexts[index].run(inputs, list(selection.names))

    def close(self) -> None:
        """Give everything back."""
        cuda.use(self._device)
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()
        self._stream.close()
