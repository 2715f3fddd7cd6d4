"""Graph of a model: its inputs and outputs as the framework lists them. Checks and completes configurations."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nerite.backends.configuration import (
    batching,
    control_inputs,
    default_batch_size,
    made_inputs,
    model_dims,
    state_inputs,
    state_outputs,
)
from nerite.backends.interface import ModelContext
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument
from nerite.core.signature import shape_text
from nerite.core.tensor import DataType


class GraphTensor(NamedTuple):
    """Input or output of a model. ``dims`` is its full shape: -1 for any size, empty for a scalar."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]


class ModelGraph(NamedTuple):
    """The tensors of a model, by name, in the model's order."""

    inputs: Mapping[str, GraphTensor]
    outputs: Mapping[str, GraphTensor]
    defaulted: Mapping[str, GraphTensor]
    """Inputs with a default, which a configuration declares as optional."""

    @property
    def uses_bfloat16(self) -> bool:
        """True if any tensor is BF16, the one type that numpy lacks."""
        sides = (self.inputs, self.outputs, self.defaulted)
        return any(tensor.datatype is dtypes.BF16 for side in sides for tensor in side.values())


# Comparing one declared tensor with the tensor of the graph. Pure.


def check_optional(name: str, entry: Mapping[str, Any], max_batch_size: int) -> None:
    """Reject an optional input of a model that supports batching."""
    if entry.get("optional") and max_batch_size != 0:
        raise InvalidArgument(
            f"unable to load model '{name}', optional input '{entry['name']}' is not supported for models that "
            "support batching"
        )


def scattered_outputs(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the outputs that the model gives as one flat array for a batch, whose dims cannot be compared."""
    return frozenset(target for each in config.get("batch_output", ()) for target in each["target_name"])


def find_tensor(entry: str, allowed: Mapping[str, GraphTensor], side: str) -> GraphTensor:
    """Return the tensor named ``entry``. ``side`` is ``input`` or ``output``. Raises ``InvalidArgument``."""
    if entry not in allowed:
        raise InvalidArgument(
            f"unexpected inference {side} '{entry}', allowed {side}s are: {', '.join(sorted(allowed))}"
        )
    return allowed[entry]


def check_datatype(name: str, entry: Mapping[str, Any], tensor: GraphTensor, side: str) -> None:
    """Compare data types. ``side`` is the role of the tensor, for the error. Raises ``InvalidArgument``."""
    if entry["data_type"] != tensor.datatype.config_name:
        # The model's type is named as on the wire, where a string is BYTES; the remedy as in config.pbtxt.
        text = (
            f"unable to load model '{name}', configuration expects datatype {entry['data_type']} for {side} "
            f"'{tensor.name}', model provides TYPE_{tensor.datatype.name}"
        )
        raise InvalidArgument(f"{text}. Set data_type: {tensor.datatype.config_name}")


def check_dims(name: str, entry: Mapping[str, Any], tensor: GraphTensor, max_batch_size: int, *, exact: bool) -> None:
    """Compare shapes. ``exact``: a dimension that is free in the model (-1) must be free in the configuration too."""
    reshape = entry.get("reshape")
    dims = model_dims(entry)
    if max_batch_size == 0:
        if not tensor.dims:
            _check_scalar(name, tensor, dims)
        elif not _fits(tensor.dims, dims, exact):
            raise InvalidArgument(
                f"model '{name}', tensor '{tensor.name}': the model expects {len(tensor.dims)} dimensions (shape "
                f"{shape_text(tensor.dims)}) but the model configuration specifies {len(dims)} dimensions (shape "
                f"{shape_text(dims)}). {_remedy(reshape, tensor.dims)}"
            )
        return
    if tensor.dims[:1] != (-1,):
        raise InvalidArgument(
            f"model '{name}', tensor '{tensor.name}': for the model to support batching the shape should have at least "
            "1 dimension and the first dimension must be -1; but shape expected by the model is "
            f"{shape_text(tensor.dims)}. Export the model with a dynamic first dimension, or set max_batch_size: 0 and "
            f"dims: {list(tensor.dims) or [1]}"
        )
    full = (-1, *dims)
    if not _fits(tensor.dims, full, exact):
        raise InvalidArgument(
            f"model '{name}', tensor '{tensor.name}': the model expects {len(tensor.dims)} dimensions (shape "
            f"{shape_text(tensor.dims)}) but the model configuration specifies {len(full)} dimensions (an initial "
            "batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete shape "
            f"{shape_text(full)}). {_remedy(reshape, tensor.dims[1:])}"
        )


def _remedy(reshape: object, dims: Sequence[int]) -> str:
    if not dims:
        return "Set dims: [1] and reshape: { shape: [] }"
    return f"Set {'dims: ' if reshape is None else 'reshape: { shape: '}{list(dims)}{'' if reshape is None else ' }'}"


def _fits(model: Sequence[int], dims: Sequence[int], exact: bool) -> bool:
    return len(model) == len(dims) and all(
        want == have or (want == -1 and not exact) for want, have in zip(model, dims, strict=True)
    )


def _check_scalar(name: str, tensor: GraphTensor, dims: Iterable[int]) -> None:
    if any(dim != 1 for dim in dims):
        raise InvalidArgument(
            f"unable to load model '{name}', scalar tensor '{tensor.name}', should only provide 1 in the model "
            f"configuration when the model doesn't support batching. Model configuration provided: {shape_text(dims)}."
        )


# Comparing a whole configuration with the graph. Pure.

_ENCODINGS: Final = {
    "TYPE_INT32": "int32_false_true: [ 0, 1 ]",
    "TYPE_FP32": "fp32_false_true: [ 0, 1 ]",
    "TYPE_BOOL": "bool_false_true: [ false, true ]",
}


def check_against_graph(name: str, config: Mapping[str, Any], graph: ModelGraph) -> None:
    """Raise ``InvalidArgument`` for the first thing in which ``config`` and ``graph`` disagree."""
    for entry in control_inputs(config):
        _check_control(name, entry, graph, batching=batching(config))
    declared: Sequence[Mapping[str, Any]] = config.get("input", ())
    _check_input_count(name, config, graph)
    max_batch_size = int(config.get("max_batch_size", 0))
    takes = {**graph.inputs, **graph.defaulted}
    for entry in declared:
        check_optional(name, entry, max_batch_size)
        tensor = find_tensor(entry["name"], takes, "input")
        check_datatype(name, entry, tensor, "input")
        if entry.get("allow_ragged_batch"):
            _check_ragged(name, entry, tensor)
        else:
            check_dims(name, entry, tensor, max_batch_size, exact=False)
    for entry in state_inputs(config):
        tensor = find_tensor(entry["name"], graph.inputs, "input")
        check_datatype(name, entry, tensor, "input state")
        check_dims(name, entry, tensor, max_batch_size, exact=False)
    for batch_input in config.get("batch_input", ()):
        for target in batch_input["target_name"]:
            check_datatype(name, batch_input, find_tensor(target, graph.inputs, "input"), "input")
    scattered = scattered_outputs(config)
    for entry in config.get("output", ()):
        tensor = find_tensor(entry["name"], graph.outputs, "output")
        check_datatype(name, entry, tensor, "output")
        if entry["name"] not in scattered:
            check_dims(name, entry, tensor, max_batch_size, exact=True)
    for entry in state_outputs(config):
        tensor = find_tensor(entry["name"], graph.outputs, "output")
        check_datatype(name, entry, tensor, "output state")
        check_dims(name, entry, tensor, max_batch_size, exact=False)


def _check_input_count(name: str, config: Mapping[str, Any], graph: ModelGraph) -> None:
    declared = [entry["name"] for entry in config.get("input", ()) if not entry.get("optional")]
    made = [target for batch_input in config.get("batch_input", ()) for target in batch_input["target_name"]]
    made += [entry["name"] for entry in made_inputs(config)]
    expected = len(declared) + len(made)
    if expected == len(graph.inputs):
        return
    text = f"unable to load model '{name}', configuration expects {expected} inputs, model provides {len(graph.inputs)}"
    if missing := sorted(graph.inputs.keys() - {*declared, *made}):
        text += f". The configuration lacks: {', '.join(missing)}"
    elif optional := sorted(graph.defaulted.keys() & set(declared)):
        text += f". These have a default in the model and need 'optional: true': {', '.join(optional)}"
    else:
        text += f". The model has no input: {', '.join(sorted({*declared, *made} - graph.inputs.keys()))}"
    raise InvalidArgument(text)


def _check_control(name: str, entry: Mapping[str, Any], graph: ModelGraph, *, batching: bool) -> None:
    control = entry["name"]
    tensor = graph.inputs.get(control)
    if tensor is None:
        raise Internal(
            f"configuration specified sequence control '{control}', but model does not provide that input. The model "
            f"has: {', '.join(sorted(graph.inputs))}"
        )
    head = f"unable to load model '{name}', sequence control '{control}' in model has"
    dims = tensor.dims[1:] if batching else tensor.dims
    if dims != (1,):
        raise InvalidArgument(f"{head} dims {shape_text(dims)} but dims [1] is expected")
    has, expected = tensor.datatype.config_name, entry["data_type"]
    if has != expected:
        correlation_id = entry["kind"] == "CONTROL_SEQUENCE_CORRID"
        written = f"data_type: {has}" if correlation_id else _ENCODINGS.get(has)
        remedy = (
            f"Write {written}" if written else f"Export the model with a control of one of: {', '.join(_ENCODINGS)}"
        )
        raise InvalidArgument(f"{head} data-type {tensor.datatype.name} but data-type {expected} is expected. {remedy}")


def _check_ragged(name: str, entry: Mapping[str, Any], tensor: GraphTensor) -> None:
    if entry.get("optional"):
        raise InvalidArgument(
            f"unable to load model '{name}', configuration expects model provides input with shape [-1] for ragged "
            f"input '{tensor.name}', which is not supported for optional input"
        )
    if tensor.dims != (-1,):
        raise InvalidArgument(
            f"unable to load model '{name}', configuration expects model provides input with shape [-1]  for ragged "
            f"input '{tensor.name}', model provides {shape_text(tensor.dims)}"
        )


# Completing a configuration from the graph. Pure, except for the log.

_log = logging.getLogger("nerite.backends")

_DEFAULT: Final = 4


def needs_completion(context: ModelContext) -> bool:
    """Return False, and log it, if the configuration declares inputs and outputs."""
    config = context.config
    if (config.get("input") or config.get("batch_input")) and config.get("output"):
        _log.info(
            "skipping model configuration auto-complete for '%s': inputs and outputs already specified", context.name
        )
        return False
    return True


def complete_from_graph(context: ModelContext, graph: ModelGraph, largest: int | None = None) -> dict[str, Any]:
    """Return the configuration with batch size, scheduler, and inputs or outputs if it has none.

    Controls and states of a sequence model are not declared, because clients neither send nor receive them.

    A model can batch if the first dimension of all its inputs and outputs is free. If the configuration does not set
    ``max_batch_size``, it becomes the backend's default, at most ``largest``. Raises ``InvalidArgument`` if the model
    cannot batch although the configuration says so.
    """
    name, config = context.name, context.config
    default = default_batch_size(context, _DEFAULT)
    completed = dict(config)
    max_batch_size = int(config.get("max_batch_size", 0))
    if _can_batch(graph):
        if max_batch_size == 0:
            rows = default if largest is None else min(default, largest)
            max_batch_size = completed["max_batch_size"] = max(rows, 0)
            # The spelling is Triton's: log filters look for this line.
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


def _all(graph: ModelGraph) -> Iterable[GraphTensor]:
    return (*graph.inputs.values(), *graph.outputs.values())


def _can_batch(graph: ModelGraph) -> bool:
    return all(tensor.dims[:1] == (-1,) for tensor in _all(graph))


def _obstacle(graph: ModelGraph) -> str:
    tensor = next(tensor for tensor in _all(graph) if tensor.dims[:1] != (-1,))
    return (
        f"The shape of '{tensor.name}' is {list(tensor.dims)}: export the model with a dynamic first dimension, or set "
        "max_batch_size: 0"
    )


def declaration(tensor: GraphTensor, batching: bool) -> dict[str, Any]:
    """Return the entry of a configuration that declares a tensor."""
    dims = list(tensor.dims[1:] if batching else tensor.dims)
    declared: dict[str, Any] = {"name": tensor.name, "data_type": tensor.datatype.config_name, "dims": dims or [1]}
    if not dims and batching:
        # dims cannot be empty: it declares [1], and reshapes that for the model.
        declared["reshape"] = {"shape": []}
    return declared
