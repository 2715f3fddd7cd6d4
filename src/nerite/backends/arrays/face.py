"""A model as its callers know it: the tensors that its configuration declares, and what instances share of that."""

from __future__ import annotations

from collections.abc import Iterable

from nerite.backends import ports
from nerite.backends.arrays import comparison
from nerite.backends.arrays.call import Calls, Text
from nerite.backends.arrays.graph import Graph
from nerite.backends.arrays.instance import ArrayInstance, Compute
from nerite.backends.arrays.ragged import Ragged
from nerite.backends.arrays.selection import Selections
from nerite.backends.arrays.strings import as_text
from nerite.backends.configuration import all_inputs, all_outputs, batching
from nerite.backends.interface import ModelContext
from nerite.backends.ports import Port


class Face:
    """One for each open model; its instances share it."""

    def __init__(
        self, context: ModelContext, inputs: Iterable[Port], outputs: Iterable[Port], text: Text = as_text
    ) -> None:
        """``text`` makes of strings what the framework takes."""
        self.selections = Selections(context.name, str(context.version), outputs)
        self.calls = Calls({port.name: port for port in inputs}, self.selections, text)
        self._ragged = Ragged(context.config)
        self._batching = batching(context.config)

    def instance(self, compute: Compute) -> ArrayInstance:
        """Return an instance with this computation behind it."""
        return ArrayInstance(compute, self.calls, self.selections, self._ragged, batching=self._batching)


def of_graph(context: ModelContext, graph: Graph, text: Text) -> Face:
    """Return the face of a model that says of itself what it takes and gives.

    Raises ``NeriteError`` for the first thing in which the configuration and ``graph`` disagree.
    """
    config = context.config
    comparison.check(context.name, config, graph)
    batched = batching(config)
    takes = {**graph.inputs, **graph.defaulted}
    inputs = [
        ports.of_entry(entry, batching=batched, scalar=not takes[entry["name"]].dims) for entry in all_inputs(config)
    ]
    outputs = [
        ports.of_entry(entry, batching=batched, scalar=not graph.outputs[entry["name"]].dims)
        for entry in all_outputs(config)
    ]
    return Face(context, inputs, outputs, text)
