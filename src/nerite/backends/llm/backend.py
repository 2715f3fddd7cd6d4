"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from nerite.backends import values
from nerite.backends.interface import Instance, InstanceContext, Marks, ModelContext
from nerite.backends.llm import call, parameters, ports, selection, tasks
from nerite.backends.llm.answer import WRONG, Answer
from nerite.backends.llm.choice import VLLM
from nerite.backends.llm.embedding import EmbeddingInstance
from nerite.backends.llm.engine import Engine, GenerationRequest
from nerite.backends.llm.headers import Headers
from nerite.backends.llm.reranking import RerankingInstance
from nerite.backends.llm.selection import EngineModule, ReaderModule
from nerite.backends.llm.step import Follower, Step
from nerite.config import tenant_caches
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse

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
        selection.check(context, self.name)
        return ports.completed(context, tasks.task(context))

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
        task = tasks.task(self._context)
        if task != tasks.GENERATE:
            readers = cast(ReaderModule, self._engines)  # No other one is chosen for such a model.
            if task == tasks.EMBED:
                return EmbeddingInstance(self._context, readers.embedder(self._context, context))
            return RerankingInstance(self._context, readers.reranker(self._context, context))
        engine = self._engines.engine(self._context, context)
        step = Step(context.reporter, _patience(self._context))
        engine.start(step.over, context.reporter.give_up)
        return LlmInstance(self._context, context.name, engine, step)

    def close(self) -> None:
        """Do nothing: engines end with their instances."""


class LlmInstance:
    """An engine at work. ``execute`` hands it requests and returns at once; answers follow from the engine's thread."""

    def __init__(self, model: ModelContext, name: str, engine: Engine, step: Step) -> None:
        self._name = name
        self._engine = engine
        self._step = step
        self._knows_priorities = engine.capabilities().priorities
        config = model.config
        self._headers = Headers(model.name, str(model.version), [output["name"] for output in config["output"]])
        self._decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._shared = model.parameter(tenant_caches.PARAMETER) == tenant_caches.TRUE
        """Tenants use what was computed of the prompts of others."""
        self._numbers = itertools.count()

    def execute(self, requests: Sequence[InferenceRequest], marks: Marks) -> Sequence[InferenceResponse | None]:
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
        asked = call.read(request)
        if asked.stream and not self._decoupled:
            raise InvalidArgument(
                "the model has one response for each request (model_transaction_policy { decoupled: false }): leave "
                "'stream' out"
            )
        # A caller may give two requests the same id.
        number = str(next(self._numbers))
        answer = Answer(request, asked, self._headers)
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
        self._engine.add(wanted, Follower(request, answer, sampling.n, self._step))
        if request.is_cancelled():  # before the engine had it
            self._engine.abort(number)


def _patience(model: ModelContext) -> int:
    """Return how many seconds a step may take before the engine counts as hanging; 0: any time."""
    seconds = values.parameter(
        model, parameters.STEP_TIMEOUT, _STEP_SECONDS, values.integer, "seconds, or 0 for any time"
    )
    if seconds < 0:
        raise InvalidArgument(
            f"parameter '{parameters.STEP_TIMEOUT}' of model '{model.name}' is {seconds}; it has to be 0 or more"
        )
    return seconds
