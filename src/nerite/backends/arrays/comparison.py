"""Whether a configuration says of a model what the model says of itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nerite.backends.arrays.agreement import check_datatype, check_dims, check_optional, find, scattered_outputs
from nerite.backends.arrays.graph import Graph, GraphTensor
from nerite.backends.configuration import batching, made_inputs
from nerite.backends.sequence_tensors import control_inputs, state_inputs, state_outputs
from nerite.core.errors import Internal, InvalidArgument
from nerite.core.signature import show

_ENCODINGS: Final = {
    "TYPE_INT32": "int32_false_true: [ 0, 1 ]",
    "TYPE_FP32": "fp32_false_true: [ 0, 1 ]",
    "TYPE_BOOL": "bool_false_true: [ false, true ]",
}


def check(name: str, config: Mapping[str, Any], graph: Graph) -> None:
    """Raise ``InvalidArgument`` for the first thing in which ``config`` and ``graph`` disagree."""
    for entry in control_inputs(config):
        _check_control(name, entry, graph, batching=batching(config))
    declared: Sequence[Mapping[str, Any]] = config.get("input", ())
    _check_input_count(name, config, graph)
    max_batch_size = int(config.get("max_batch_size", 0))
    takes = {**graph.inputs, **graph.defaulted}
    for entry in declared:
        check_optional(name, entry, max_batch_size)
        tensor = find(entry["name"], takes, "input")
        check_datatype(name, entry, tensor, "input")
        if entry.get("allow_ragged_batch"):
            _check_ragged(name, entry, tensor)
        else:
            check_dims(name, entry, tensor, max_batch_size, exact=False)
    for entry in state_inputs(config):
        tensor = find(entry["name"], graph.inputs, "input")
        check_datatype(name, entry, tensor, "input state")
        check_dims(name, entry, tensor, max_batch_size, exact=False)
    for batch_input in config.get("batch_input", ()):
        for target in batch_input["target_name"]:
            check_datatype(name, batch_input, find(target, graph.inputs, "input"), "input")
    scattered = scattered_outputs(config)
    for entry in config.get("output", ()):
        tensor = find(entry["name"], graph.outputs, "output")
        check_datatype(name, entry, tensor, "output")
        if entry["name"] not in scattered:
            check_dims(name, entry, tensor, max_batch_size, exact=True)
    for entry in state_outputs(config):
        tensor = find(entry["name"], graph.outputs, "output")
        check_datatype(name, entry, tensor, "output state")
        check_dims(name, entry, tensor, max_batch_size, exact=False)


def _check_input_count(name: str, config: Mapping[str, Any], graph: Graph) -> None:
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


def _check_control(name: str, entry: Mapping[str, Any], graph: Graph, *, batching: bool) -> None:
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
        raise InvalidArgument(f"{head} dims {show(dims)} but dims [1] is expected")
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
            f"input '{tensor.name}', model provides {show(tensor.dims)}"
        )
