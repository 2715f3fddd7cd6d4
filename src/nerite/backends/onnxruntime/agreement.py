"""Whether a configuration says of a model what the model says of itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from nerite.backends.onnxruntime.graph import Graph, GraphTensor
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
        _check_control(name, entry, graph, batching=int(config.get("max_batch_size", 0)) > 0)
    declared: Sequence[Mapping[str, Any]] = config.get("input", ())
    _check_input_count(name, config, graph)
    max_batch_size = int(config.get("max_batch_size", 0))
    takes = {**graph.inputs, **graph.defaulted}
    for entry in declared:
        _check_optional(name, entry, max_batch_size)
        tensor = _find(entry["name"], takes, "input")
        _check_datatype(name, entry, tensor, "input")
        if entry.get("allow_ragged_batch"):
            _check_ragged(name, entry, tensor)
        else:
            _check_dims(name, entry, tensor, max_batch_size, exact=False)
    for entry in state_inputs(config):
        tensor = _find(entry["name"], graph.inputs, "input")
        _check_datatype(name, entry, tensor, "input state")
        _check_dims(name, entry, tensor, max_batch_size, exact=False)
    for batch_input in config.get("batch_input", ()):
        for target in batch_input["target_name"]:
            _check_datatype(name, batch_input, _find(target, graph.inputs, "input"), "input")
    scattered = {target for batch_output in config.get("batch_output", ()) for target in batch_output["target_name"]}
    for entry in config.get("output", ()):
        tensor = _find(entry["name"], graph.outputs, "output")
        _check_datatype(name, entry, tensor, "output")
        if entry["name"] not in scattered:
            _check_dims(name, entry, tensor, max_batch_size, exact=True)
    for entry in state_outputs(config):
        tensor = _find(entry["name"], graph.outputs, "output")
        _check_datatype(name, entry, tensor, "output state")
        _check_dims(name, entry, tensor, max_batch_size, exact=False)


def _check_input_count(name: str, config: Mapping[str, Any], graph: Graph) -> None:
    declared = [entry["name"] for entry in config.get("input", ()) if not entry.get("optional")]
    made = [target for batch_input in config.get("batch_input", ()) for target in batch_input["target_name"]]
    made += [entry["name"] for entry in (*control_inputs(config), *state_inputs(config))]
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


def _check_optional(name: str, entry: Mapping[str, Any], max_batch_size: int) -> None:
    if entry.get("optional") and max_batch_size != 0:
        raise InvalidArgument(
            f"unable to load model '{name}', optional input '{entry['name']}' is not supported for models that "
            "support batching"
        )


def _find(entry: str, allowed: Mapping[str, GraphTensor], side: str) -> GraphTensor:
    if entry not in allowed:
        raise InvalidArgument(
            f"unexpected inference {side} '{entry}', allowed {side}s are: {', '.join(sorted(allowed))}"
        )
    return allowed[entry]


def _check_datatype(name: str, entry: Mapping[str, Any], tensor: GraphTensor, side: str) -> None:
    if entry["data_type"] != tensor.datatype.config_name:
        # The model's side is named as on the wire, where a string is BYTES; the remedy as in config.pbtxt.
        text = (
            f"unable to load model '{name}', configuration expects datatype {entry['data_type']} for {side} "
            f"'{tensor.name}', model provides TYPE_{tensor.datatype.name}"
        )
        raise InvalidArgument(f"{text}. Set data_type: {tensor.datatype.config_name}")


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


def _check_dims(name: str, entry: Mapping[str, Any], tensor: GraphTensor, max_batch_size: int, *, exact: bool) -> None:
    """Compare shapes. ``exact``: a free dimension of the model (-1) has to be free in the configuration too."""
    reshape = entry.get("reshape")
    dims = tuple(entry["dims"] if reshape is None else reshape.get("shape", ()))
    if max_batch_size == 0:
        if not tensor.dims:
            _check_scalar(name, tensor, dims)
        elif not _fits(tensor.dims, dims, exact):
            raise InvalidArgument(
                f"model '{name}', tensor '{tensor.name}': the model expects {len(tensor.dims)} dimensions (shape "
                f"{show(tensor.dims)}) but the model configuration specifies {len(dims)} dimensions (shape "
                f"{show(dims)}). {_remedy(reshape, tensor.dims)}"
            )
        return
    if tensor.dims[:1] != (-1,):
        raise InvalidArgument(
            f"model '{name}', tensor '{tensor.name}': for the model to support batching the shape should have at least "
            "1 dimension and the first dimension must be -1; but shape expected by the model is "
            f"{show(tensor.dims)}. Export the model with a dynamic first dimension, or set max_batch_size: 0 and "
            f"dims: {list(tensor.dims) or [1]}"
        )
    full = (-1, *dims)
    if not _fits(tensor.dims, full, exact):
        raise InvalidArgument(
            f"model '{name}', tensor '{tensor.name}': the model expects {len(tensor.dims)} dimensions (shape "
            f"{show(tensor.dims)}) but the model configuration specifies {len(full)} dimensions (an initial batch "
            "dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete shape "
            f"{show(full)}). {_remedy(reshape, tensor.dims[1:])}"
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
            f"configuration when the model doesn't support batching. Model configuration provided: {show(dims)}."
        )
