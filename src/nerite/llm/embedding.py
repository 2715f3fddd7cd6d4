"""Models that turn texts into vectors: a batch of requests is one run of the network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from nerite.backends.interface import ExecutionTimes, ModelContext
from nerite.core import tensor
from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array, to_array
from nerite.llm.streaming import ResponseHeaders

_KNOWN: Final = ("input", "pooling_params")


class Embedder(Protocol):
    """What makes vectors."""

    def tokens(self, texts: Sequence[str]) -> list[int]:
        """Return how many tokens each text has. Raises ``InvalidArgument`` if one has more than the model takes."""

    def vectors(self, texts: Sequence[str]) -> Array:
        """Return a row for each text."""

    def close(self) -> None:
        """Give everything back."""


class _Asked:
    """A request, understood."""

    def __init__(self, request: InferenceRequest) -> None:
        """Raises ``NeriteError``."""
        header = request.header
        given = {
            spec.name: to_array(spec, data).reshape(-1) for spec, data in zip(header.inputs, request.data, strict=True)
        }
        self.request = request
        self.wants_output_tokens = bool(given.get("return_num_output_tokens", [False])[0])
        self.described = "embedding_request" in given
        """It is one of Triton's vLLM backend."""
        if self.described == ("text_input" in given):
            raise InvalidArgument("give one of the inputs 'text_input' and 'embedding_request', and not both")
        self.dimensions = 0
        """0: as many as there are."""
        if self.described:
            self.texts = [self._described(each) for each in given["embedding_request"]]
        else:
            self.texts = [decoded("text_input", each) for each in given["text_input"]]

    def _described(self, text: bytes) -> str:
        """Return the text of an embedding request, and take the dimensions that it asks for."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"'embedding_request' is no JSON: {error}") from None
        if not isinstance(value, dict) or "input" not in value:
            raise InvalidArgument('\'embedding_request\' has to be an object, such as {"input": "a text"}')
        if unknown := sorted(value.keys() - set(_KNOWN)):
            raise InvalidArgument(f"'embedding_request' has '{unknown[0]}'. There are: {', '.join(_KNOWN)}.")
        if not isinstance(value["input"], str):
            raise Unsupported("'embedding_request' has an 'input' that is no text: tokens are the model's")
        said = (value.get("pooling_params") or {}).get("dimensions", 0)
        dimensions = said[0] if isinstance(said, list) and said else said
        if not isinstance(dimensions, int) or dimensions < 0:
            raise InvalidArgument(f"'dimensions' has to be a number above 0, got {said!r}")
        self.dimensions = dimensions
        wanted: str = value["input"]
        return wanted

    def cut(self, vectors: Array) -> Array:
        """Return the first so many numbers of each vector, at length 1 again."""
        if not self.dimensions:
            return vectors
        if self.dimensions > vectors.shape[1]:
            raise InvalidArgument(f"'dimensions' is {self.dimensions}, and the model has {vectors.shape[1]}")
        vectors = vectors[:, : self.dimensions]
        shorter: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return shorter


def decoded(name: str, text: bytes) -> str:
    """Return an element of the input ``name`` as text. Raises ``InvalidArgument``."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"'{name}' is no UTF-8: {error}") from None


class EmbeddingInstance:
    """An embedder at work."""

    def __init__(self, model: ModelContext, embedder: Embedder) -> None:
        config = model.config
        self._embedder = embedder
        self._batched = bool(config.get("max_batch_size"))
        self._headers = ResponseHeaders(model.name, str(model.version), [output["name"] for output in config["output"]])

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        """Answer each request; those that are wrong are answered with what is wrong with them."""
        responses: list[InferenceResponse | None] = []
        asked: list[tuple[int, _Asked, list[int]]] = []
        for place, request in enumerate(requests):
            responses.append(None)
            try:
                understood = _Asked(request)
                asked.append((place, understood, self._embedder.tokens(understood.texts)))
            except NeriteError as error:
                responses[place] = InferenceResponse.failed(error)
        timings.inputs_ready()
        if asked:
            vectors = self._embedder.vectors([text for _, each, _ in asked for text in each.texts])
        timings.computed()
        at = 0
        for place, each, tokens in asked:
            rows = vectors[at : at + len(each.texts)]
            at += len(each.texts)
            try:
                responses[place] = self._headers.response(each.request, self._outputs(each, each.cut(rows), tokens))
            except NeriteError as error:
                responses[place] = InferenceResponse.failed(error)
        return [response for response in responses if response is not None]

    def _outputs(self, asked: _Asked, vectors: Array, tokens: Sequence[int]) -> Mapping[str, Array]:
        shape = (len(asked.texts), -1) if self._batched else (-1,)
        outputs: dict[str, Array] = {"embedding": np.ascontiguousarray(vectors, np.float32).reshape(shape)}
        if asked.described:
            written = [json.dumps(vector.tolist()).encode() for vector in vectors]
            outputs["text_output"] = np.array(written, tensor.BYTES.numpy).reshape(shape)
        outputs["num_input_tokens"] = np.array(tokens, np.uint32).reshape(shape)
        if asked.wants_output_tokens:
            outputs["num_output_tokens"] = np.zeros_like(outputs["num_input_tokens"])
        return outputs

    checks_readiness = False

    def is_ready(self) -> bool:
        """Return True: it has no state that could be lost."""
        return True

    def close(self) -> None:
        """Let go of the model."""
        self._embedder.close()


# Models that say how well texts answer a query. A request has all texts of one query.

MOST_DOCUMENTS: Final = 1000
"""That are rated at once, as with Cohere: nothing else runs meanwhile."""


class Reranker(Protocol):
    """What knows how well texts answer a query."""

    def tokens(self, query: str, documents: Sequence[str]) -> int:
        """Return how many tokens they have. Raises ``InvalidArgument`` if a text with the query has too many."""

    def scores(self, query: str, documents: Sequence[str]) -> Array:
        """Return a number for each text, 0 to 1."""

    def close(self) -> None:
        """Give everything back."""


class RerankingInstance:
    """A reranker at work."""

    def __init__(self, model: ModelContext, reranker: Reranker) -> None:
        self._reranker = reranker
        self._headers = ResponseHeaders(
            model.name, str(model.version), [output["name"] for output in model.config["output"]]
        )

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        """Answer each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: InferenceRequest) -> InferenceResponse:
        inputs = zip(request.header.inputs, request.data, strict=True)
        given = {spec.name: to_array(spec, data).reshape(-1) for spec, data in inputs}
        try:
            query = decoded("query", given["query"][0])
            documents = [decoded("documents", each) for each in given["documents"]]
            if not documents:
                raise InvalidArgument("'documents' is empty")
            if len(documents) > MOST_DOCUMENTS:
                raise InvalidArgument(f"'documents' has {len(documents)} texts, and may have {MOST_DOCUMENTS}")
            tokens = self._reranker.tokens(query, documents)
        except NeriteError as error:
            return InferenceResponse.failed(error)
        scores = self._reranker.scores(query, documents)
        return self._headers.response(
            request, {"scores": scores.astype(np.float32), "num_input_tokens": np.array([tokens], np.uint32)}
        )

    checks_readiness = False

    def is_ready(self) -> bool:
        """Return True: it has no state that could be lost."""
        return True

    def close(self) -> None:
        """Let go of the model."""
        self._reranker.close()
