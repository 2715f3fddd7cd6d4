"""The tensors of a language model, those of Triton's vLLM backend and others, and the configuration that follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from nerite.backends.interface import ModelContext
from nerite.backends.llm import tasks
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
    Port("add_special_tokens", "TYPE_BOOL"),
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


EMBED_INPUTS: Final = (
    Port("text_input", "TYPE_STRING"),
    Port("embedding_request", "TYPE_STRING"),
    Port("return_num_input_tokens", "TYPE_BOOL"),
    Port("return_num_output_tokens", "TYPE_BOOL"),
)
EMBED_OUTPUTS: Final = (
    Port("embedding", "TYPE_FP32", (-1,)),
    Port("text_output", "TYPE_STRING"),
    Port("num_input_tokens", "TYPE_UINT32"),
    Port("num_output_tokens", "TYPE_UINT32"),
)
RERANK_INPUTS: Final = (
    Port("query", "TYPE_STRING", optional=False),
    Port("documents", "TYPE_STRING", (-1,), optional=False),
)
RERANK_OUTPUTS: Final = (Port("scores", "TYPE_FP32", (-1,)), Port("num_input_tokens", "TYPE_UINT32"))

_PORTS: Final = {
    tasks.GENERATE: (INPUTS, OUTPUTS),
    tasks.EMBED: (EMBED_INPUTS, EMBED_OUTPUTS),
    tasks.RERANK: (RERANK_INPUTS, RERANK_OUTPUTS),
}
_ROWS: Final = 32
"""Texts that are embedded at once, where the configuration does not say how many."""


def completed(context: ModelContext, task: str) -> Mapping[str, Any]:
    """Return the configuration of a model with its tensors; decoupled or batched as its task asks for.

    Raises ``InvalidArgument`` where it says what cannot be.
    """
    name, config = context.name, context.config
    inputs, outputs = _PORTS[task]
    made = {
        **config,
        "input": _with(name, "input", config.get("input", ()), inputs),
        "output": _with(name, "output", config.get("output", ()), outputs),
    }
    rows = config.get("max_batch_size", 0)
    if task == tasks.EMBED:
        rows = made["max_batch_size"] = rows or _ROWS
        if rows > 1 and "dynamic_batching" not in config:
            made["dynamic_batching"] = {}
    elif rows:
        why = "has several texts in each request" if task == tasks.RERANK else "has an engine that batches by itself"
        raise InvalidArgument(f"model '{name}' has max_batch_size {rows}, and {why}: set it to 0, or leave it out")
    if task == tasks.GENERATE:
        made["model_transaction_policy"] = config.get("model_transaction_policy") or {"decoupled": True}
    return made


def _with(model: str, field: str, given: Iterable[Mapping[str, Any]], known: Iterable[Port]) -> list[Mapping[str, Any]]:
    """Return the tensors that a configuration has, and those of ours that it lacks."""
    tensors = list(given)
    types = {port.name: port.data_type for port in known}
    for tensor in tensors:
        expected = types.get(tensor["name"])
        if expected is None:
            raise InvalidArgument(
                f"model '{model}' has the {field} '{tensor['name']}', which no model of its kind has: there are "
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
