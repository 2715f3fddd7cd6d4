"""Instances of embedding models and of reranking models, which compute without generating text.

A batch of embedding requests is one run of the network. A reranking request holds all documents of one query.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from nerite.backends.interface import ExecutionTimes, ModelContext
from nerite.core import tensor
from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array, to_array
from nerite.llm.request import TOKENS, read_tokens
from nerite.llm.streaming import ResponseHeaders

_KNOWN: Final = ("input", "pooling_params")


class Embedder(Protocol):
    """Computes embeddings."""

    def tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text. Raises ``InvalidArgument`` if a text is too long for the model."""

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Raises ``NeriteError`` if the model has no way back from tokens."""

    def vectors(self, texts: Sequence[str]) -> Array:
        """Return one row per text."""

    def close(self) -> None:
        """Release all resources."""


class _EmbeddingCall:
    """A parsed embedding request."""

    def __init__(self, request: InferenceRequest, text_of: Callable[[Sequence[int]], str]) -> None:
        """``text_of`` returns the text of tokens. Raises ``NeriteError``."""
        header = request.header
        given = {
            spec.name: to_array(spec, data).reshape(-1) for spec, data in zip(header.inputs, request.data, strict=True)
        }
        self.request = request
        self.wants_output_tokens = bool(given.get("return_num_output_tokens", [False])[0])
        self.described = "embedding_request" in given
        """Whether the request has the form of Triton's vLLM backend."""
        if self.described == ("text_input" in given):
            raise InvalidArgument("set exactly one of the inputs 'text_input' and 'embedding_request'")
        self.dimensions = 0
        """0 means all dimensions."""
        if self.described:
            self.texts = [self._described(each) for each in given["embedding_request"]]
        elif TOKENS in given:
            self.texts = [text_of(read_tokens(decoded(TOKENS, each))) for each in given[TOKENS]]
        else:
            self.texts = [decoded("text_input", each) for each in given["text_input"]]

    def _described(self, text: bytes) -> str:
        """Return the text of an ``embedding_request``, and store the dimensions that it requests."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"'embedding_request' is not valid JSON: {error}") from None
        if not isinstance(value, dict) or "input" not in value:
            raise InvalidArgument('\'embedding_request\' must be an object, such as {"input": "a text"}')
        if unknown := sorted(value.keys() - set(_KNOWN)):
            raise InvalidArgument(f"'embedding_request' has '{unknown[0]}'. There are: {', '.join(_KNOWN)}.")
        if not isinstance(value["input"], str):
            raise Unsupported("the 'input' of 'embedding_request' must be text; tokens are not supported")
        given = (value.get("pooling_params") or {}).get("dimensions", 0)
        dimensions = given[0] if isinstance(given, list) and given else given
        if not isinstance(dimensions, int) or dimensions < 0:
            raise InvalidArgument(f"'dimensions' must be a number above 0, got {given!r}")
        self.dimensions = dimensions
        result: str = value["input"]
        return result

    def cut(self, vectors: Array) -> Array:
        """Truncate each vector to the requested dimensions and normalize it again."""
        if not self.dimensions:
            return vectors
        if self.dimensions > vectors.shape[1]:
            raise InvalidArgument(f"'dimensions' is {self.dimensions}, but the model has {vectors.shape[1]}")
        vectors = vectors[:, : self.dimensions]
        shorter: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return shorter


def decoded(name: str, text: bytes) -> str:
    """Return an element of the input ``name`` as text. Raises ``InvalidArgument``."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"'{name}' is not valid UTF-8: {error}") from None


class EmbeddingInstance:
    """Instance that answers batches of requests with an embedder."""

    def __init__(self, model: ModelContext, embedder: Embedder) -> None:
        config = model.config
        self._embedder = embedder
        self._batched = bool(config.get("max_batch_size"))
        self._headers = ResponseHeaders(model.name, str(model.version), [output["name"] for output in config["output"]])

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        """Answer each request; invalid ones get an error."""
        responses: list[InferenceResponse | None] = []
        calls: list[tuple[int, _EmbeddingCall, list[int]]] = []
        for place, request in enumerate(requests):
            responses.append(None)
            try:
                call = _EmbeddingCall(request, self._embedder.text)
                calls.append((place, call, self._embedder.tokens(call.texts)))
            except NeriteError as error:
                responses[place] = InferenceResponse.failed(error)
        timings.inputs_ready()
        if calls:
            vectors = self._embedder.vectors([text for _, call, _ in calls for text in call.texts])
        timings.computed()
        at = 0
        for place, call, tokens in calls:
            rows = vectors[at : at + len(call.texts)]
            at += len(call.texts)
            try:
                responses[place] = self._headers.response(call.request, self._outputs(call, call.cut(rows), tokens))
            except NeriteError as error:
                responses[place] = InferenceResponse.failed(error)
        return [response for response in responses if response is not None]

    def _outputs(self, call: _EmbeddingCall, vectors: Array, tokens: Sequence[int]) -> Mapping[str, Array]:
        shape = (len(call.texts), -1) if self._batched else (-1,)
        outputs: dict[str, Array] = {"embedding": np.ascontiguousarray(vectors, np.float32).reshape(shape)}
        if call.described:
            encoded = [json.dumps(vector.tolist()).encode() for vector in vectors]
            outputs["text_output"] = np.array(encoded, tensor.BYTES.numpy).reshape(shape)
        outputs["num_input_tokens"] = np.array(tokens, np.uint32).reshape(shape)
        if call.wants_output_tokens:
            outputs["num_output_tokens"] = np.zeros_like(outputs["num_input_tokens"])
        return outputs

    checks_readiness = False

    def is_ready(self) -> bool:
        """Return True: the model has no state that could be lost."""
        return True

    def close(self) -> None:
        """Release the model."""
        self._embedder.close()


MAX_DOCUMENTS: Final = 1000
"""Maximum number of documents per request, as with Cohere: nothing else runs while they are scored."""


class Reranker(Protocol):
    """Scores how well documents answer a query."""

    def tokens(self, query: str, documents: Sequence[str]) -> int:
        """Return the total number of tokens. Raises ``InvalidArgument`` if a document with the query is too long."""

    def scores(self, query: str, documents: Sequence[str]) -> Array:
        """Return a score from 0 to 1 for each document."""

    def close(self) -> None:
        """Release all resources."""


class RerankingInstance:
    """Instance that answers requests with a reranker."""

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
            if len(documents) > MAX_DOCUMENTS:
                raise InvalidArgument(f"'documents' has {len(documents)} texts; the maximum is {MAX_DOCUMENTS}")
            tokens = self._reranker.tokens(query, documents)
        except NeriteError as error:
            return InferenceResponse.failed(error)
        scores = self._reranker.scores(query, documents)
        return self._headers.response(
            request, {"scores": scores.astype(np.float32), "num_input_tokens": np.array([tokens], np.uint32)}
        )

    checks_readiness = False

    def is_ready(self) -> bool:
        """Return True: the model has no state that could be lost."""
        return True

    def close(self) -> None:
        """Release the model."""
        self._reranker.close()
