"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from nerite.backends import configuration
from nerite.backends.interface import ExecutionTimes, Instance, InstanceContext, ModelContext
from nerite.config import model_parameters
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.llm import checkpoint, selection
from nerite.llm.embedding import EmbeddingInstance, RerankingInstance
from nerite.llm.engine import GenerationRequest, LlmEngine
from nerite.llm.request import read_call
from nerite.llm.selection import VLLM, EngineModule, ReaderModule
from nerite.llm.streaming import WRONG, RequestFollower, ResponseHeaders, StepReport, StreamedAnswer

# The tensors of a language model, those of Triton's vLLM backend and others, and the configuration that follows.


class LlmPort(NamedTuple):
    """An input or an output."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True


INPUTS: Final = (
    LlmPort("text_input", "TYPE_STRING", optional=False),
    LlmPort("image", "TYPE_STRING", (-1,)),
    LlmPort("stream", "TYPE_BOOL"),
    LlmPort("sampling_parameters", "TYPE_STRING"),
    LlmPort("exclude_input_in_output", "TYPE_BOOL"),
    LlmPort("add_special_tokens", "TYPE_BOOL"),
    LlmPort("return_finish_reason", "TYPE_BOOL"),
    LlmPort("return_cumulative_logprob", "TYPE_BOOL"),
    LlmPort("return_logprobs", "TYPE_BOOL"),
    LlmPort("return_num_input_tokens", "TYPE_BOOL"),
    LlmPort("return_num_output_tokens", "TYPE_BOOL"),
    LlmPort("embedding_request", "TYPE_STRING"),
)
OUTPUTS: Final = (
    LlmPort("text_output", "TYPE_STRING", (-1,)),
    LlmPort("finish_reason", "TYPE_STRING", (-1,)),
    LlmPort("cumulative_logprob", "TYPE_FP32", (-1,)),
    LlmPort("logprobs", "TYPE_STRING", (-1,)),
    LlmPort("num_input_tokens", "TYPE_UINT32"),
    LlmPort("num_output_tokens", "TYPE_UINT32", (-1,)),
)


EMBED_INPUTS: Final = (
    LlmPort("text_input", "TYPE_STRING"),
    LlmPort("embedding_request", "TYPE_STRING"),
    LlmPort("return_num_input_tokens", "TYPE_BOOL"),
    LlmPort("return_num_output_tokens", "TYPE_BOOL"),
)
EMBED_OUTPUTS: Final = (
    LlmPort("embedding", "TYPE_FP32", (-1,)),
    LlmPort("text_output", "TYPE_STRING"),
    LlmPort("num_input_tokens", "TYPE_UINT32"),
    LlmPort("num_output_tokens", "TYPE_UINT32"),
)
RERANK_INPUTS: Final = (
    LlmPort("query", "TYPE_STRING", optional=False),
    LlmPort("documents", "TYPE_STRING", (-1,), optional=False),
)
RERANK_OUTPUTS: Final = (LlmPort("scores", "TYPE_FP32", (-1,)), LlmPort("num_input_tokens", "TYPE_UINT32"))

_PORTS: Final = {
    checkpoint.GENERATE: (INPUTS, OUTPUTS),
    checkpoint.EMBED: (EMBED_INPUTS, EMBED_OUTPUTS),
    checkpoint.RERANK: (RERANK_INPUTS, RERANK_OUTPUTS),
}
_ROWS: Final = 32
"""Texts that are embedded at once, where the configuration does not say how many."""


def completed_config(context: ModelContext, task: str) -> Mapping[str, Any]:
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
    if task == checkpoint.EMBED:
        rows = made["max_batch_size"] = rows or _ROWS
        if rows > 1 and "dynamic_batching" not in config:
            made["dynamic_batching"] = {}
    elif rows:
        why = (
            "has several texts in each request" if task == checkpoint.RERANK else "has an engine that batches by itself"
        )
        raise InvalidArgument(f"model '{name}' has max_batch_size {rows}, and {why}: set it to 0, or leave it out")
    if task == checkpoint.GENERATE:
        made["model_transaction_policy"] = config.get("model_transaction_policy") or {"decoupled": True}
    return made


def _with(
    model: str, field: str, given: Iterable[Mapping[str, Any]], known: Iterable[LlmPort]
) -> list[Mapping[str, Any]]:
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


def _json(port: LlmPort, field: str) -> Mapping[str, Any]:
    optional = {"optional": True} if field == "input" and port.optional else {}
    return {"name": port.name, "data_type": port.data_type, "dims": list(port.dims), **optional}


_STEP_SECONDS: Final = "120"


class LlmBackend:
    """Language models that generate text, that turn it into vectors, or that say which of several answers a query.

    Each is run by the best engine that can run it.
    """

    name = "llm"
    isolated = True

    def prepare(self, context: ModelContext) -> Path | None:
        """Have a checkpoint converted, or an engine's environment made; return the Python that has the engine.

        Raises ``NeriteError``.
        """
        return selection.prepared(context, self.name)

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with the tensors of a language model, and decoupled where it does not say.

        Raises ``NeriteError``, also where the version directory holds nothing that an engine can run.
        """
        selection.check_model(context, self.name)
        return completed_config(context, checkpoint.task_of(context))

    def open(self, context: ModelContext) -> LlmModel:
        """Open a model whose configuration is complete. Raises ``NeriteError``."""
        if context.parameter("EXECUTION_MODE") == "in_process":
            raise InvalidArgument(
                f"model '{context.name}' has EXECUTION_MODE in_process, and its engine holds the interpreter while it "
                "computes, so that the server would stand still: leave the parameter out"
            )
        return LlmModel(context, selection.engine_of(context, self.name))


class VllmBackend(LlmBackend):
    """Models of Triton's vLLM backend, and others that are to run on vLLM."""

    name = "vllm"


class TensorRtLlmBackend(LlmBackend):
    """Models that are to run on TensorRT-LLM."""

    name = "tensorrt_llm"


class LlmModel:
    """An open model. Each instance has an engine of its own."""

    def __init__(self, context: ModelContext, engines: EngineModule) -> None:
        self._context = context
        self._engines = engines

    def instance(self, context: InstanceContext) -> Instance:
        """Make an instance, and load its engine. Raises ``NeriteError``."""
        task = checkpoint.task_of(self._context)
        if task != checkpoint.GENERATE:
            readers = cast(ReaderModule, self._engines)  # No other one is chosen for such a model.
            if task == checkpoint.EMBED:
                return EmbeddingInstance(self._context, readers.embedder(self._context, context))
            return RerankingInstance(self._context, readers.reranker(self._context, context))
        engine = self._engines.engine(self._context, context)
        step = StepReport(context.reporter, _patience(self._context))
        engine.start(step.over, context.reporter.give_up)
        return LlmInstance(self._context, context.name, engine, step)

    def close(self) -> None:
        """Do nothing: engines end with their instances."""


class LlmInstance:
    """An engine at work. ``execute`` hands it requests and returns at once; answers follow from the engine's thread."""

    def __init__(self, model: ModelContext, name: str, engine: LlmEngine, step: StepReport) -> None:
        self._name = name
        self._engine = engine
        self._step = step
        self._knows_priorities = engine.capabilities().priorities
        config = model.config
        self._headers = ResponseHeaders(model.name, str(model.version), [output["name"] for output in config["output"]])
        self._decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._shared = model.parameter(model_parameters.PARAMETER) == model_parameters.TRUE
        """Tenants use what was computed of the prompts of others."""
        self._numbers = itertools.count()

    def execute(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Sequence[InferenceResponse | None]:
        """Give the engine each request. What is refused is answered here, in the words of Triton's vLLM backend."""
        return [self._begun(request) for request in requests]

    def is_ready(self) -> bool:
        """Return whether the engine can begin with a request at once."""
        return self._engine.is_ready()

    def close(self) -> None:
        """Stop the engine. What still runs is answered."""
        self._engine.stop()

    def _begun(self, request: InferenceRequest) -> InferenceResponse | None:
        if not self._engine.is_healthy():
            kind = "vLLM" if self._engine.capabilities().engine == VLLM else "LLM"
            return InferenceResponse.failed(Unavailable(f"Model is unavailable due to unhealthy {kind} engine"))
        try:
            self._begin(request)
        except NeriteError as error:
            return InferenceResponse.failed(error.prefixed(WRONG))
        return None

    def _begin(self, request: InferenceRequest) -> None:
        asked = read_call(request)
        if asked.stream and not self._decoupled:
            raise InvalidArgument(
                "the model has one response for each request (model_transaction_policy { decoupled: false }): leave "
                "'stream' out"
            )
        # A caller may give two requests the same id.
        number = str(next(self._numbers))
        answer = StreamedAnswer(request, asked, self._headers)
        request.on_pause = answer.paused
        request.on_cancel = lambda _request: self._engine.abort(number)
        sampling, caller = asked.sampling, request.header.caller
        priority = (sampling.priority or request.header.priority) if self._knows_priorities else 0
        wanted = GenerationRequest(
            number,
            asked.prompt,
            sampling,
            asked.special_tokens,
            asked.images,
            grammar=sampling.grammar,
            lora=sampling.lora_name,
            priority=priority,
            # No tenant is called what a number with a zero byte before it says: it is shared with no other request.
            cache_salt="" if caller is None or self._shared else caller.tenant or f"\0{number}",
        )
        self._engine.add(wanted, RequestFollower(request, answer, sampling.n, self._step))
        if request.is_cancelled():  # before the engine had it
            self._engine.abort(number)


def _patience(model: ModelContext) -> int:
    """Return how many seconds a step may take before the engine counts as hanging; 0: any time."""
    seconds = configuration.parameter(
        model, selection.STEP_TIMEOUT, _STEP_SECONDS, configuration.integer_parameter, "seconds, or 0 for any time"
    )
    if seconds < 0:
        raise InvalidArgument(
            f"parameter '{selection.STEP_TIMEOUT}' of model '{model.name}' is {seconds}; it has to be 0 or more"
        )
    return seconds
