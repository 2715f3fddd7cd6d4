"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from nerite.backends.interface import Instance, InstanceContext, Marks, ModelContext
from nerite.backends.llm import call, ports, tasks
from nerite.backends.llm.answer import WRONG, Answer, Headers
from nerite.backends.llm.embedding import EmbeddingInstance
from nerite.backends.llm.engine import Engine, GenerationRequest
from nerite.backends.llm.openvino_genai import OpenVinoEmbedder, OpenVinoGenAiEngine, OpenVinoReranker, options
from nerite.backends.llm.reranking import RerankingInstance
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse


class LlmBackend:
    """Language models that generate text, that turn it into vectors, or that say which of several answers a query."""

    name = "llm"
    isolated = True

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with the tensors of a language model, and decoupled where it does not say.

        Raises ``NeriteError``, also where the version directory holds nothing that an engine can run.
        """
        task = tasks.task(context)
        options.check_files(context, task)
        return ports.completed(context, task)

    def open(self, context: ModelContext) -> LlmModel:
        """Open a model whose configuration is complete. Raises ``NeriteError``."""
        if context.parameter("EXECUTION_MODE") == "in_process":
            raise InvalidArgument(
                f"model '{context.name}' has EXECUTION_MODE in_process, and its engine holds the interpreter while it "
                "computes, so that the server would stand still: leave the parameter out"
            )
        return LlmModel(context)


class LlmModel:
    """An open model. Each instance has an engine of its own."""

    def __init__(self, context: ModelContext) -> None:
        self._context = context

    def instance(self, context: InstanceContext) -> Instance:
        """Make an instance, and load its engine. Raises ``NeriteError``."""
        task = tasks.task(self._context)
        if task == tasks.EMBED:
            embedder = OpenVinoEmbedder(options.read_encoder(self._context, context, task))
            return EmbeddingInstance(self._context, embedder)
        if task == tasks.RERANK:
            reranker = OpenVinoReranker(options.read_encoder(self._context, context, task))
            return RerankingInstance(self._context, reranker)
        engine = OpenVinoGenAiEngine(options.read(self._context, context))
        engine.start()
        return LlmInstance(self._context, context.name, engine)

    def close(self) -> None:
        """Do nothing: engines end with their instances."""


class LlmInstance:
    """An engine at work. ``execute`` hands it requests and returns at once; answers follow from the engine's thread."""

    def __init__(self, model: ModelContext, name: str, engine: Engine) -> None:
        self._name = name
        self._engine = engine
        config = model.config
        self._headers = Headers(model.name, str(model.version), [output["name"] for output in config["output"]])
        self._decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._numbers = itertools.count()

    def execute(self, requests: Sequence[InferenceRequest], marks: Marks) -> Sequence[InferenceResponse | None]:
        """Give the engine each request. What is refused is answered here, in the words of Triton's vLLM backend."""
        return [self._begun(request) for request in requests]

    def is_ready(self) -> bool:
        """Return whether the engine takes requests."""
        return self._engine.is_healthy()

    def close(self) -> None:
        """Stop the engine. What still runs is answered."""
        self._engine.stop()

    def _begun(self, request: InferenceRequest) -> InferenceResponse | None:
        if not self._engine.is_healthy():
            return InferenceResponse.failed(Unavailable("Model is unavailable due to unhealthy LLM engine"))
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
        sampling = asked.sampling
        wanted = GenerationRequest(
            number, asked.prompt, sampling, asked.images, grammar=sampling.grammar, lora=sampling.lora_name
        )
        self._engine.add(wanted, answer)
        if request.is_cancelled():  # before the engine had it
            self._engine.abort(number)
