"""The backend for language models: completes configurations, opens models and creates their instances."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from nerite.backends import configuration
from nerite.backends.interface import ExecutionTimes, Instance, InstanceContext, ModelContext
from nerite.config import model_parameters
from nerite.core.errors import Cancelled, Internal, InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.core.failures import message_of
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array
from nerite.llm import checkpoint, selection
from nerite.llm.classification import ClassificationInstance
from nerite.llm.embedding import EmbeddingInstance, RerankingInstance
from nerite.llm.engine import AdaptableEngine, GenerationRequest, LlmEngine, RequestListener, SleepingEngine
from nerite.llm.image_generation import ImageGenerationInstance
from nerite.llm.images import IMAGE, pixels
from nerite.llm.request import LlmCall, read_call
from nerite.llm.selection import VLLM, EngineModule, PipelineModule
from nerite.llm.speech import SpeechInstance, TranscriptionInstance
from nerite.llm.streaming import CANCELLED, WRONG, RequestFollower, ResponseHeaders, StepReport, StreamedAnswer
from nerite.llm.thinking import BudgetedListener

# Tensors of language models (those of Triton's vLLM backend and more) and the configuration derived from them.


class LlmPort(NamedTuple):
    """Declaration of an input or output tensor."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True


INPUTS: Final = (
    LlmPort("text_input", "TYPE_STRING", optional=False),
    LlmPort("image", "TYPE_STRING", (-1,)),
    LlmPort("stream", "TYPE_BOOL"),
    LlmPort("sampling_parameters", "TYPE_STRING"),
    LlmPort("stop_words", "TYPE_STRING", (-1,)),
    LlmPort("bad_words", "TYPE_STRING", (-1,)),
    LlmPort("exclude_input_in_output", "TYPE_BOOL"),
    LlmPort("add_special_tokens", "TYPE_BOOL"),
    LlmPort("prompt_token_ids", "TYPE_STRING"),
    LlmPort("return_finish_reason", "TYPE_BOOL"),
    LlmPort("return_cumulative_logprob", "TYPE_BOOL"),
    LlmPort("return_logprobs", "TYPE_BOOL"),
    LlmPort("return_num_input_tokens", "TYPE_BOOL"),
    LlmPort("return_num_output_tokens", "TYPE_BOOL"),
    LlmPort("return_num_cached_tokens", "TYPE_BOOL"),
    LlmPort("return_token_ids", "TYPE_BOOL"),
    LlmPort("return_prompt_token_ids", "TYPE_BOOL"),
    LlmPort("return_prompt_logprobs", "TYPE_BOOL"),
    LlmPort("embedding_request", "TYPE_STRING"),
)
OUTPUTS: Final = (
    LlmPort("text_output", "TYPE_STRING", (-1,)),
    LlmPort("finish_reason", "TYPE_STRING", (-1,)),
    LlmPort("cumulative_logprob", "TYPE_FP32", (-1,)),
    LlmPort("logprobs", "TYPE_STRING", (-1,)),
    LlmPort("num_input_tokens", "TYPE_UINT32"),
    LlmPort("num_output_tokens", "TYPE_UINT32", (-1,)),
    LlmPort("num_cached_tokens", "TYPE_INT32"),
    LlmPort("token_ids", "TYPE_STRING", (-1,)),
    LlmPort("prompt_token_ids", "TYPE_STRING"),
    LlmPort("prompt_logprobs", "TYPE_STRING"),
    LlmPort("cum_log_probs", "TYPE_FP32"),
    LlmPort("output_log_probs", "TYPE_FP32", (-1,)),
)


EMBED_INPUTS: Final = (
    LlmPort("text_input", "TYPE_STRING"),
    LlmPort("prompt_token_ids", "TYPE_STRING"),
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
CLASSIFY_INPUTS: Final = (LlmPort("text_input", "TYPE_STRING", optional=False),)
CLASSIFY_OUTPUTS: Final = (
    LlmPort("scores", "TYPE_FP32", (-1,)),
    LlmPort("label", "TYPE_STRING"),
    LlmPort("num_input_tokens", "TYPE_UINT32"),
)
TRANSCRIBE_INPUTS: Final = (
    LlmPort("audio", "TYPE_FP32", (-1,), optional=False),
    LlmPort("language", "TYPE_STRING"),
    LlmPort("task", "TYPE_STRING"),
    LlmPort("prompt", "TYPE_STRING"),
    LlmPort("temperature", "TYPE_FP32"),
    LlmPort("timestamps", "TYPE_STRING"),
    LlmPort("stream", "TYPE_BOOL"),
)
TRANSCRIBE_OUTPUTS: Final = (
    LlmPort("text_output", "TYPE_STRING"),
    LlmPort("language", "TYPE_STRING"),
    LlmPort("segments", "TYPE_STRING"),
    LlmPort("words", "TYPE_STRING"),
)
SPEECH_INPUTS: Final = (LlmPort("text_input", "TYPE_STRING", optional=False), LlmPort("voice", "TYPE_STRING"))
SPEECH_OUTPUTS: Final = (LlmPort("audio", "TYPE_FP32", (-1,)), LlmPort("sample_rate", "TYPE_UINT32"))
IMAGE_INPUTS: Final = (
    LlmPort("text_input", "TYPE_STRING", optional=False),
    LlmPort("negative_prompt", "TYPE_STRING"),
    LlmPort("width", "TYPE_INT32"),
    LlmPort("height", "TYPE_INT32"),
    LlmPort("num_inference_steps", "TYPE_INT32"),
    LlmPort("guidance_scale", "TYPE_FP32"),
    LlmPort("seed", "TYPE_INT64"),
)
IMAGE_OUTPUTS: Final = (LlmPort("image", "TYPE_STRING"),)

_PORTS: Final = {
    checkpoint.GENERATE: (INPUTS, OUTPUTS),
    checkpoint.EMBED: (EMBED_INPUTS, EMBED_OUTPUTS),
    checkpoint.RERANK: (RERANK_INPUTS, RERANK_OUTPUTS),
    checkpoint.CLASSIFY: (CLASSIFY_INPUTS, CLASSIFY_OUTPUTS),
    checkpoint.TRANSCRIBE: (TRANSCRIBE_INPUTS, TRANSCRIBE_OUTPUTS),
    checkpoint.TEXT_TO_SPEECH: (SPEECH_INPUTS, SPEECH_OUTPUTS),
    checkpoint.TEXT_TO_IMAGE: (IMAGE_INPUTS, IMAGE_OUTPUTS),
}
_UNBATCHED: Final = {
    checkpoint.RERANK: "takes several texts in each request",
    checkpoint.TRANSCRIBE: "takes one recording in each request",
    checkpoint.TEXT_TO_SPEECH: "takes one text in each request",
    checkpoint.TEXT_TO_IMAGE: "takes one text in each request",
}
"""Why models have no batches, by their task."""
_ROWS: Final = 32
"""Default maximum batch size of models that embed or classify."""


def completed_config(context: ModelContext, task: str) -> Mapping[str, Any]:
    """Return the configuration of a model with its tensors added, decoupled or batched as its task requires.

    Raises ``InvalidArgument`` if the configuration contradicts the task.
    """
    name, config = context.name, context.config
    inputs, outputs = _PORTS[task]
    made = {
        **config,
        "input": _with(name, "input", config.get("input", ()), inputs),
        "output": _with(name, "output", config.get("output", ()), outputs),
    }
    rows = config.get("max_batch_size", 0)
    if task in (checkpoint.EMBED, checkpoint.CLASSIFY):
        rows = made["max_batch_size"] = rows or _ROWS
        if rows > 1 and "dynamic_batching" not in config:
            made["dynamic_batching"] = {}
    elif rows:
        why = _UNBATCHED.get(task, "has an engine that batches itself")
        raise InvalidArgument(f"model '{name}' has max_batch_size {rows}, but {why}: set it to 0 or omit it")
    if task in (checkpoint.GENERATE, checkpoint.TRANSCRIBE):
        made["model_transaction_policy"] = config.get("model_transaction_policy") or {"decoupled": True}
    return made


def _with(
    model: str, field: str, given: Iterable[Mapping[str, Any]], known: Iterable[LlmPort]
) -> list[Mapping[str, Any]]:
    """Return the configured tensors, followed by those of ``known`` that the configuration lacks."""
    tensors = list(given)
    types = {port.name: port.data_type for port in known}
    for tensor in tensors:
        expected = types.get(tensor["name"])
        if expected is None:
            raise InvalidArgument(
                f"model '{model}' has the {field} '{tensor['name']}', which no model of its kind has: available "
                f"are {', '.join(types)}"
            )
        if tensor["data_type"] != expected:
            raise InvalidArgument(
                f"the {field} '{tensor['name']}' of model '{model}' must be {expected}, not {tensor['data_type']}"
            )
    names = {tensor["name"] for tensor in tensors}
    return tensors + [_json(port, field) for port in known if port.name not in names]


def _json(port: LlmPort, field: str) -> Mapping[str, Any]:
    optional = {"optional": True} if field == "input" and port.optional else {}
    return {"name": port.name, "data_type": port.data_type, "dims": list(port.dims), **optional}


_STEP_SECONDS: Final = "120"


class LlmBackend:
    """Backend for language models that generate text, and for others of the same files: see ``checkpoint.task_of``.

    Each model is run by the best engine that can run it.
    """

    name = "llm"
    isolated = True

    def prepare(self, context: ModelContext) -> Path | None:
        """Convert the checkpoint or build the engine's environment if needed; return the Python with the engine.

        Raises ``NeriteError``.
        """
        return selection.prepared(context, self.name)

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with the tensors of a language model; generating models default to decoupled.

        Raises ``NeriteError``, also if the version directory holds nothing that an engine can run.
        """
        selection.check_model(context, self.name)
        return completed_config(context, checkpoint.task_of(context))

    def open(self, context: ModelContext) -> LlmModel:
        """Open a model whose configuration is complete. Raises ``NeriteError``."""
        if context.parameter("EXECUTION_MODE") == "in_process":
            raise InvalidArgument(
                f"model '{context.name}' has EXECUTION_MODE in_process, but its engine holds the GIL while it "
                "computes, which would block the server: remove the parameter"
            )
        return LlmModel(context, selection.engine_of(context, self.name))


class VllmBackend(LlmBackend):
    """Backend for models of Triton's vLLM backend and others that are configured to run on vLLM."""

    name = "vllm"


class TensorRtLlmBackend(LlmBackend):
    """Backend for models that are configured to run on TensorRT-LLM."""

    name = "tensorrt_llm"


class LlmModel:
    """An opened language model. Each instance has its own engine."""

    def __init__(self, context: ModelContext, engines: EngineModule) -> None:
        self._context = context
        self._engines = engines

    def instance(self, context: InstanceContext) -> Instance:
        """Create an instance and load its engine. Raises ``NeriteError``."""
        task = checkpoint.task_of(self._context)
        if task != checkpoint.GENERATE:
            pipelines = cast(PipelineModule, self._engines)  # only such an engine is chosen for these tasks
            return _pipeline_instance(task, pipelines, self._context, context)
        engine = self._engines.engine(self._context, context)
        step = StepReport(context.reporter, _step_timeout(self._context))
        engine.start(step.over, context.reporter.give_up)
        step.adapters = len(engine.capabilities().adapters)
        if step.adapters:
            step.over(engine.stats())
        return LlmInstance(self._context, context.name, engine, step)

    def close(self) -> None:
        """Do nothing: each engine is stopped by its instance."""


def _pipeline_instance(
    task: str, pipelines: PipelineModule, model: ModelContext, instance: InstanceContext
) -> Instance:
    """Return an instance of a model that is run by a pipeline. Loads it. Raises ``NeriteError``."""
    match task:
        case checkpoint.EMBED:
            return EmbeddingInstance(model, pipelines.embedder(model, instance))
        case checkpoint.CLASSIFY:
            return ClassificationInstance(model, pipelines.classifier(model, instance))
        case checkpoint.TRANSCRIBE:
            return TranscriptionInstance(model, pipelines.transcriber(model, instance))
        case checkpoint.TEXT_TO_IMAGE:
            return ImageGenerationInstance(model, pipelines.image_generator(model, instance))
        case checkpoint.TEXT_TO_SPEECH:
            return SpeechInstance(model, pipelines.synthesizer(model, instance))
        case _:
            return RerankingInstance(model, pipelines.reranker(model, instance))


_log = logging.getLogger("nerite.llm")

_DECODERS: Final = 2
"""Number of requests whose images are decoded at the same time. A file of some KB may take a second, and 1 GiB."""


class LlmInstance:
    """Instance with an engine. ``execute`` queues requests and returns; the engine's thread sends the responses.

    Images are decoded in threads, so that requests without images do not wait for them.
    """

    def __init__(self, model: ModelContext, name: str, engine: LlmEngine, step: StepReport) -> None:
        self._name = name
        self._engine = engine
        self._step = step
        self._knows_priorities = engine.capabilities().priorities
        config = model.config
        self._headers = ResponseHeaders(model.name, str(model.version), [output["name"] for output in config["output"]])
        self._decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._shared = model.parameter(model_parameters.PARAMETER) == model_parameters.TRUE
        """Whether tenants share cached prompt prefixes."""
        self._numbers = itertools.count()
        self._decoders = ThreadPoolExecutor(_DECODERS, "images")
        self._adding = threading.Lock()
        """Held while a request is added: tokenizers are for one thread at a time."""

    def execute(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Sequence[InferenceResponse | None]:
        """Add each request to the engine. Rejected ones get a response here, worded as by Triton's vLLM backend."""
        return [self._begin(request) for request in requests]

    def is_ready(self) -> bool:
        """Return whether the engine can start a request immediately."""
        return self._engine.is_ready()

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter while requests run. Raises ``NeriteError``."""
        self._adaptable().load_adapter(name, path)
        self._step.adapters = len(self._engine.capabilities().adapters)

    def unload_adapter(self, name: str) -> None:
        """Refuse requests for a LoRA adapter from now on. Raises ``NeriteError``."""
        self._adaptable().unload_adapter(name)
        self._step.adapters = len(self._engine.capabilities().adapters)

    def _adaptable(self) -> AdaptableEngine:
        if not isinstance(self._engine, AdaptableEngine):
            raise Unsupported(
                f"the engine {self._engine.capabilities().engine} has the LoRA adapter that its model was loaded with, "
                "and no other: name it in multi_lora.json, and load the model again"
            )
        return self._engine

    @property
    def can_sleep(self) -> bool:
        """Whether the engine gives the memory of its GPUs back while it has no requests."""
        return self._engine.capabilities().sleeps

    def sleep(self) -> None:
        """Have the engine sleep. Raises ``NeriteError``."""
        self._sleeper().sleep()

    def wake(self) -> None:
        """Have the engine take requests again. Raises ``NeriteError``."""
        self._sleeper().wake()

    def _sleeper(self) -> SleepingEngine:
        if not isinstance(self._engine, SleepingEngine):
            raise Unsupported(f"the engine {self._engine.capabilities().engine} cannot sleep")
        return self._engine

    def close(self) -> None:
        """Stop the engine. Requests that still run are answered."""
        self._engine.stop()
        self._decoders.shutdown()

    def _begin(self, request: InferenceRequest) -> InferenceResponse | None:
        if any(spec.name == IMAGE for spec in request.header.inputs):
            self._decoders.submit(self._submit_later, request)
            return None
        return self._submit(request)

    def _submit_later(self, request: InferenceRequest) -> None:
        """Add a request with images to the engine, in a thread for that."""
        try:
            gone = request.is_cancelled()
            refusal = InferenceResponse.failed(Cancelled(CANCELLED)) if gone else self._submit(request)
        except Exception as error:
            _log.exception("'%s': a request with images could not be added", self._name)
            refusal = InferenceResponse.failed(Internal(f"{type(error).__name__}: {message_of(error)}"))
        if refusal is not None:
            request.respond(refusal)

    def _submit(self, request: InferenceRequest) -> InferenceResponse | None:
        if not self._engine.is_healthy():
            kind = "vLLM" if self._engine.capabilities().engine == VLLM else "LLM"
            return InferenceResponse.failed(Unavailable(f"Model is unavailable due to unhealthy {kind} engine"))
        try:
            self._add_to_engine(request)
        except NeriteError as error:
            return InferenceResponse.failed(error.prefixed(WRONG))
        return None

    def _add_to_engine(self, request: InferenceRequest) -> None:
        call = read_call(request)
        if call.images and not self._engine.capabilities().images:
            raise Unsupported("the model takes no images: omit 'image'")
        images = pixels(call.images)
        with self._adding:
            self._add(request, call, images)

    def _add(self, request: InferenceRequest, call: LlmCall, images: Sequence[Array]) -> None:
        if call.stream and not self._decoupled:
            raise InvalidArgument(
                "the model sends one response per request (model_transaction_policy { decoupled: false }): omit "
                "'stream'"
            )
        # Not the request's id: callers may use one id for several requests.
        number = str(next(self._numbers))
        call = self._echoed(call)
        answer = StreamedAnswer(request, call, self._headers)
        request.on_pause = answer.paused
        request.on_cancel = lambda _request: self._engine.abort(number)
        sampling, caller = call.sampling, request.header.caller
        priority = (sampling.priority or request.header.priority) if self._knows_priorities else 0
        wanted = GenerationRequest(
            number,
            call.prompt,
            sampling,
            call.special_tokens,
            images,
            grammar=sampling.grammar,
            lora=sampling.lora_name,
            priority=priority,
            # Without a tenant, a zero byte and the request's number: no tenant and no other request has this salt.
            cache_salt="" if caller is None or self._shared else caller.tenant or f"\0{number}",
        )
        if "prompt_token_ids" in call.extras or sampling.max_tokens == 0:
            tokens = self._engine.tokenize(wanted)
            answer.tokenized(tokens)
            if sampling.max_tokens == 0 and sampling.prompt_logprobs is None:
                answer.end()
                return
            least = replace(
                sampling, max_tokens=max(sampling.max_tokens, 1) if sampling.max_tokens is not None else None
            )
            wanted = replace(wanted, prompt=tokens, sampling=least)
        listener: RequestListener = RequestFollower(request, answer, sampling.n, self._step, sampling.lora_name)
        if sampling.thinking_budget is not None:
            wanted = replace(wanted, sampling=replace(wanted.sampling, thinking_budget=None))
            listener = budgeted = BudgetedListener(self._engine, wanted, listener, sampling.thinking_budget)
            request.on_cancel = lambda _request: budgeted.abort()
        try:
            self._engine.add(wanted, listener)
        except NeriteError:
            self._step.forget_adapter(request)
            raise
        if request.is_cancelled():  # it was cancelled before the engine knew it
            self._engine.abort(number)

    def _echoed(self, call: LlmCall) -> LlmCall:
        """Return a call whose prompt has its text, if that is wanted and the prompt is tokens."""
        if not call.echo or isinstance(call.prompt, str):
            return call
        most = self._engine.capabilities().context_length
        if len(call.prompt) > most:
            raise InvalidArgument(f"there are {len(call.prompt)} tokens, but the model's context is {most}")
        return replace(call, prepend=self._engine.detokenize(call.prompt))


def _step_timeout(model: ModelContext) -> int:
    """Return how many seconds a step may take before the engine counts as stalled; 0 means no limit."""
    seconds = configuration.parameter(
        model, selection.STEP_TIMEOUT, _STEP_SECONDS, configuration.integer_parameter, "seconds, or 0 for no limit"
    )
    if seconds < 0:
        raise InvalidArgument(
            f"parameter '{selection.STEP_TIMEOUT}' of model '{model.name}' is {seconds}; it must be 0 or more"
        )
    return seconds
