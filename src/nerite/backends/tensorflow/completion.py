"""What is special in completing the configuration of a TensorFlow model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nerite.backends.arrays import completion
from nerite.backends.arrays.graph import Graph, GraphTensor
from nerite.backends.configuration import batching, model_dims
from nerite.backends.interface import ModelContext

_SIDES = ("input", "output")


def is_needed(context: ModelContext) -> bool:
    """Return whether the model has to be asked: whole sides, or parts of an entry, are missing."""
    entries = [entry for side in _SIDES for entry in context.config.get(side, ())]
    return any(_lacks(entry) for entry in entries) or completion.is_needed(context)


def complete(context: ModelContext, graph: Graph) -> Mapping[str, Any]:
    """Return the configuration with what it lacks. Raises ``InvalidArgument`` as ``arrays.completion`` does.

    An entry may have a name and nothing else. Where the dimensions of an entry are all that the model has, the
    configuration means a model without batches, whether it could have them or not.
    """
    config = context.config
    tensors = {"input": {**graph.defaulted, **graph.inputs}, "output": graph.outputs}
    whole = not batching(config) and any(
        _is_whole(entry, tensors[side].get(entry["name"])) for side in _SIDES for entry in config.get(side, ())
    )
    completed = completion.complete(context, graph, 0 if whole else None)
    batched = batching(completed)
    for side in _SIDES:
        completed[side] = [_filled(entry, tensors[side].get(entry["name"]), batched) for entry in completed[side]]
    return completed


def _lacks(entry: Mapping[str, Any]) -> bool:
    return not entry.get("dims") or entry.get("data_type", "TYPE_INVALID") == "TYPE_INVALID"


def _is_whole(entry: Mapping[str, Any], tensor: GraphTensor | None) -> bool:
    dims = model_dims(entry)
    return tensor is not None and len(dims) > 0 and len(dims) == len(tensor.dims)


def _filled(entry: Mapping[str, Any], tensor: GraphTensor | None, batched: bool) -> Mapping[str, Any]:
    if tensor is None or not _lacks(entry):
        return entry
    from_model = completion.declaration(tensor, batched)
    said = {key: value for key, value in entry.items() if value not in ([], (), "TYPE_INVALID")}
    return {**from_model, **said}
