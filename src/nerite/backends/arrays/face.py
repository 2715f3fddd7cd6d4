"""A model as its callers know it: what its configuration declares, found to agree with what the model has."""

from __future__ import annotations

from nerite.backends.arrays import comparison, ports
from nerite.backends.arrays.call import Calls, Text
from nerite.backends.arrays.graph import Graph
from nerite.backends.arrays.instance import ArrayInstance, Compute
from nerite.backends.arrays.ragged import Ragged
from nerite.backends.arrays.selection import Selections
from nerite.backends.interface import ModelContext
from nerite.backends.sequence_tensors import control_inputs, state_inputs, state_outputs


class Face:
    """One for each open model; its instances share it."""

    def __init__(self, context: ModelContext, graph: Graph, text: Text) -> None:
        """``text`` makes of strings what the framework takes.

        Raises ``NeriteError`` for the first thing in which the configuration and ``graph`` disagree.
        """
        config = context.config
        comparison.check(context.name, config, graph)
        batching = self._batching = int(config.get("max_batch_size", 0)) > 0
        takes = {**graph.inputs, **graph.defaulted}
        inputs = {
            entry["name"]: ports.of_entry(entry, batching=batching, scalar=not takes[entry["name"]].dims)
            for entry in (*config["input"], *control_inputs(config), *state_inputs(config))
        }
        outputs = [
            ports.of_entry(entry, batching=batching, scalar=not graph.outputs[entry["name"]].dims)
            for entry in (*config["output"], *state_outputs(config))
        ]
        self.selections = Selections(context.name, str(context.version), outputs)
        self.calls = Calls(inputs, self.selections, text)
        self._ragged = Ragged(config)

    def instance(self, compute: Compute) -> ArrayInstance:
        """Return an instance with this computation behind it."""
        return ArrayInstance(compute, self.calls, self.selections, self._ragged, batching=self._batching)
