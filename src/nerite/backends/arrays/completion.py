"""Filling in a configuration from the model. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from nerite.backends.arrays.graph import Graph, GraphTensor
from nerite.backends.configuration import made_inputs
from nerite.backends.interface import ModelContext
from nerite.backends.sequence_tensors import state_outputs
from nerite.backends.values import default_batch_size
from nerite.core.errors import InvalidArgument

_log = logging.getLogger("nerite.backends")

_DEFAULT: Final = 4


def is_needed(context: ModelContext) -> bool:
    """Return False, and say so in the log, if the configuration gives inputs and outputs."""
    config = context.config
    if (config.get("input") or config.get("batch_input")) and config.get("output"):
        _log.info(
            "skipping model configuration auto-complete for '%s': inputs and outputs already specified", context.name
        )
        return False
    return True


def complete(context: ModelContext, graph: Graph, largest: int | None = None) -> dict[str, Any]:
    """Return the configuration with batch size, scheduler and the side (inputs, outputs) that it lacks.

    Controls and states of a sequence model are no inputs and outputs of a caller's, and are left out.

    A model can batch if the first dimension of everything it takes and gives is free. Where nobody says how many rows
    a batch may have, they are those of the backend's setting, and not more than ``largest``. Raises
    ``InvalidArgument`` if the model cannot batch and the configuration says that it does.
    """
    name, config = context.name, context.config
    default = default_batch_size(context, _DEFAULT)
    completed = dict(config)
    max_batch_size = int(config.get("max_batch_size", 0))
    if _can_batch(graph):
        if max_batch_size == 0:
            rows = default if largest is None else min(default, largest)
            max_batch_size = completed["max_batch_size"] = max(rows, 0)
            # The spelling is Triton's: people filter their logs for this line.
            _log.warning(
                "autofilled max_batch_size to %d for model '%s' since batching is supporrted but no max_batch_size "
                "is specified in model configuration. Must specify max_batch_size to utilize autofill with a larger "
                "max batch size",
                max_batch_size,
                name,
            )
        if max_batch_size > 1 and not {"dynamic_batching", "sequence_batching"} & config.keys():
            completed["dynamic_batching"] = {}
    elif max_batch_size != 0:
        raise InvalidArgument(
            f"autofill failed for model '{name}': model does not support batching while non-zero max_batch_size is "
            f"specified. {_obstacle(graph)}"
        )
    batching = max_batch_size > 0
    if not config.get("input") and not config.get("batch_input"):
        made = {entry["name"] for entry in made_inputs(config)}
        completed["input"] = [declaration(each, batching) for key, each in graph.inputs.items() if key not in made]
    if not config.get("output"):
        kept = {entry["name"] for entry in state_outputs(config)}
        completed["output"] = [declaration(each, batching) for key, each in graph.outputs.items() if key not in kept]
    return completed


def _all(graph: Graph) -> Iterable[GraphTensor]:
    return (*graph.inputs.values(), *graph.outputs.values())


def _can_batch(graph: Graph) -> bool:
    return all(tensor.dims[:1] == (-1,) for tensor in _all(graph))


def _obstacle(graph: Graph) -> str:
    tensor = next(tensor for tensor in _all(graph) if tensor.dims[:1] != (-1,))
    return (
        f"The shape of '{tensor.name}' is {list(tensor.dims)}: export the model with a dynamic first dimension, or set "
        "max_batch_size: 0"
    )


def declaration(tensor: GraphTensor, batching: bool) -> dict[str, Any]:
    """Return the entry of a configuration for a tensor."""
    dims = list(tensor.dims[1:] if batching else tensor.dims)
    declared: dict[str, Any] = {"name": tensor.name, "data_type": tensor.datatype.config_name, "dims": dims or [1]}
    if not dims and batching:
        # A configuration cannot say "nothing but the batch"; it says [1], and that the model wants less.
        declared["reshape"] = {"shape": []}
    return declared
