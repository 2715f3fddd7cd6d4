"""Instances of models that are not run by a language model engine: they answer requests one by one, or a batch at once.

Everything that such instances share is here: how requests are read, which of them fail, and what an instance owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

from nerite.backends.interface import ExecutionTimes, ModelContext
from nerite.core.errors import Cancelled, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array, to_array
from nerite.llm.streaming import CANCELLED, ResponseHeaders


class Pipeline(Protocol):
    """What an instance computes with, and owns."""

    def close(self) -> None:
        """Release all resources."""


P = TypeVar("P", bound=Pipeline)


class PipelineInstance(Generic[P]):
    """Instance that answers requests one after the other. A request that is refused fails alone."""

    checks_readiness = False

    def __init__(self, model: ModelContext, pipeline: P) -> None:
        config = model.config
        self._pipeline = pipeline
        self._headers = ResponseHeaders(model.name, str(model.version), [output["name"] for output in config["output"]])

    def execute(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Sequence[InferenceResponse | None]:
        """Answer each request; invalid ones get an error, and None stands for one that was answered already."""
        responses: list[InferenceResponse | None] = []
        for request in requests:
            try:
                responses.append(self._answer(request, inputs_of(request)))
            except NeriteError as error:
                responses.append(InferenceResponse.failed(error))
        return responses

    def _answer(self, request: InferenceRequest, given: Mapping[str, Array]) -> InferenceResponse | None:
        """Return the response; None if it was sent because the caller streams. Raises ``NeriteError``."""
        outputs = self._outputs(request, given)
        check_wanted(request)
        return self._headers.response(request, outputs)

    def _outputs(self, request: InferenceRequest, given: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs for the inputs ``given``. Raises ``NeriteError``."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Return True: the model has no state that could be lost."""
        return True

    def close(self) -> None:
        """Release the model."""
        self._pipeline.close()


class TextPipeline(Pipeline, Protocol):
    """A network that reads texts."""

    def tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text. Raises ``InvalidArgument`` if a text is too long for the model."""


T = TypeVar("T", bound=TextPipeline)
Results: TypeAlias = Callable[[Array, Sequence[int]], Mapping[str, Array]]
"""Returns the outputs of a request whose texts have these rows and numbers of tokens. Raises ``NeriteError``."""


class TextBatchInstance(PipelineInstance[T]):
    """Instance that answers a batch of requests with one run of the network."""

    def __init__(self, model: ModelContext, pipeline: T) -> None:
        super().__init__(model, pipeline)
        self._batched = bool(model.config.get("max_batch_size"))

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        """Answer each request; invalid ones get an error."""
        responses: dict[int, InferenceResponse] = {}
        calls: list[tuple[int, Sequence[str], list[int], Results]] = []
        for place, request in enumerate(requests):
            try:
                texts, results = self._read(inputs_of(request))
                calls.append((place, texts, self._pipeline.tokens(texts), results))
            except NeriteError as error:
                responses[place] = InferenceResponse.failed(error)
        timings.inputs_ready()
        if calls:
            rows = self._run([text for _, texts, _, _ in calls for text in texts])
        timings.computed()
        at = 0
        for place, texts, tokens, results in calls:
            own = rows[at : at + len(texts)]
            at += len(texts)
            try:
                responses[place] = self._headers.response(requests[place], results(own, tokens))
            except NeriteError as error:
                responses[place] = InferenceResponse.failed(error)
        return [responses[place] for place in range(len(requests))]

    def _read(self, given: Mapping[str, Array]) -> tuple[Sequence[str], Results]:
        """Return the texts of a request with the inputs ``given``, and how to answer it. Raises ``NeriteError``."""
        raise NotImplementedError

    def _run(self, texts: Sequence[str]) -> Array:
        """Return one row per text."""
        raise NotImplementedError

    def _shape(self, texts: int) -> tuple[int, ...]:
        """Return the shape of an output with a row for each text."""
        return (texts, -1) if self._batched else (-1,)


def inputs_of(request: InferenceRequest) -> dict[str, Array]:
    """Return the elements of each input of a request."""
    pairs = zip(request.header.inputs, request.buffers, strict=True)
    return {spec.name: to_array(spec, data).reshape(-1) for spec, data in pairs}


def check_wanted(request: InferenceRequest) -> None:
    """Raise ``Cancelled`` if the client has cancelled the request."""
    if request.is_cancelled():
        raise Cancelled(CANCELLED)


def decoded(name: str, text: bytes) -> str:
    """Return an element of the input ``name`` as text. Raises ``InvalidArgument``."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"'{name}' is not valid UTF-8: {error}") from None
