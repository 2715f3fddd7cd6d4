"""The tensors of a language model, which are those of Triton's vLLM backend, and the configuration that follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from nerite.core.errors import InvalidArgument


class Port(NamedTuple):
    """An input or an output."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True


INPUTS: Final = (
    Port("text_input", "TYPE_STRING", optional=False),
    Port("image", "TYPE_STRING", (-1,)),
    Port("stream", "TYPE_BOOL"),
    Port("sampling_parameters", "TYPE_STRING"),
    Port("exclude_input_in_output", "TYPE_BOOL"),
    Port("return_finish_reason", "TYPE_BOOL"),
    Port("return_cumulative_logprob", "TYPE_BOOL"),
    Port("return_logprobs", "TYPE_BOOL"),
    Port("return_num_input_tokens", "TYPE_BOOL"),
    Port("return_num_output_tokens", "TYPE_BOOL"),
    Port("embedding_request", "TYPE_STRING"),
)
OUTPUTS: Final = (
    Port("text_output", "TYPE_STRING", (-1,)),
    Port("finish_reason", "TYPE_STRING", (-1,)),
    Port("cumulative_logprob", "TYPE_FP32", (-1,)),
    Port("logprobs", "TYPE_STRING", (-1,)),
    Port("num_input_tokens", "TYPE_UINT32"),
    Port("num_output_tokens", "TYPE_UINT32", (-1,)),
)


def completed(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the model ``name`` with its tensors, and decoupled where it does not say.

    Raises ``InvalidArgument`` where it says what cannot be.
    """
    if config.get("max_batch_size", 0):
        raise InvalidArgument(
            f"model '{name}' has max_batch_size {config['max_batch_size']}, and an engine for language models batches "
            "by itself: set it to 0, or leave it out"
        )
    inputs = _with(name, "input", config.get("input", ()), INPUTS)
    outputs = _with(name, "output", config.get("output", ()), OUTPUTS)
    policy = config.get("model_transaction_policy") or {"decoupled": True}
    return {**config, "input": inputs, "output": outputs, "model_transaction_policy": policy}


def _with(model: str, field: str, given: Iterable[Mapping[str, Any]], known: Iterable[Port]) -> list[Mapping[str, Any]]:
    """Return the tensors that a configuration has, and those of ours that it lacks."""
    tensors = list(given)
    types = {port.name: port.data_type for port in known}
    for tensor in tensors:
        expected = types.get(tensor["name"])
        if expected is None:
            raise InvalidArgument(
                f"model '{model}' has the {field} '{tensor['name']}', which no language model has: there are "
                f"{', '.join(types)}"
            )
        if tensor["data_type"] != expected:
            raise InvalidArgument(
                f"the {field} '{tensor['name']}' of model '{model}' is {expected}, and not {tensor['data_type']}"
            )
    there = {tensor["name"] for tensor in tensors}
    return tensors + [_json(port, field) for port in known if port.name not in there]


def _json(port: Port, field: str) -> Mapping[str, Any]:
    optional = {"optional": True} if field == "input" and port.optional else {}
    return {"name": port.name, "data_type": port.data_type, "dims": list(port.dims), **optional}
