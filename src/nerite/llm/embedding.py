"""Instances of embedding models and of reranking models, which compute without generating text.

A batch of embedding requests is one run of the network. A reranking request holds all documents of one query.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import numpy as np

from nerite.core import tensor
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.core.request import InferenceRequest
from nerite.core.tensor import Array
from nerite.llm.pipeline_instance import (
    Pipeline,
    PipelineInstance,
    Results,
    TextBatchInstance,
    TextPipeline,
    decoded,
)
from nerite.llm.request import TOKENS, read_tokens

_KNOWN: Final = ("input", "pooling_params")


class Embedder(TextPipeline, Protocol):
    """Computes embeddings."""

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Raises ``NeriteError`` if the model has no way back from tokens."""

    def vectors(self, texts: Sequence[str]) -> Array:
        """Return one row per text."""


class _EmbeddingCall:
    """A parsed embedding request."""

    def __init__(self, given: Mapping[str, Array], text_of: Callable[[Sequence[int]], str]) -> None:
        """``text_of`` returns the text of tokens. Raises ``NeriteError``."""
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


class EmbeddingInstance(TextBatchInstance[Embedder]):
    """Instance that answers batches of requests with an embedder."""

    def _read(self, given: Mapping[str, Array]) -> tuple[Sequence[str], Results]:
        call = _EmbeddingCall(given, self._pipeline.text)
        return call.texts, partial(self._results, call)

    def _run(self, texts: Sequence[str]) -> Array:
        return self._pipeline.vectors(texts)

    def _results(self, call: _EmbeddingCall, rows: Array, tokens: Sequence[int]) -> Mapping[str, Array]:
        vectors, shape = call.cut(rows), self._shape(len(call.texts))
        outputs: dict[str, Array] = {"embedding": np.ascontiguousarray(vectors, np.float32).reshape(shape)}
        if call.described:
            encoded = [json.dumps(vector.tolist()).encode() for vector in vectors]
            outputs["text_output"] = np.array(encoded, tensor.BYTES.numpy).reshape(shape)
        outputs["num_input_tokens"] = np.array(tokens, np.uint32).reshape(shape)
        if call.wants_output_tokens:
            outputs["num_output_tokens"] = np.zeros_like(outputs["num_input_tokens"])
        return outputs


MAX_DOCUMENTS: Final = 1000
"""Maximum number of documents per request, as with Cohere: nothing else runs while they are scored."""


class Reranker(Pipeline, Protocol):
    """Scores how well documents answer a query."""

    def tokens(self, query: str, documents: Sequence[str]) -> int:
        """Return the total number of tokens. Raises ``InvalidArgument`` if a document with the query is too long."""

    def scores(self, query: str, documents: Sequence[str]) -> Array:
        """Return a score from 0 to 1 for each document."""


class RerankingInstance(PipelineInstance[Reranker]):
    """Instance that answers requests with a reranker."""

    def _outputs(self, request: InferenceRequest, given: Mapping[str, Array]) -> Mapping[str, Array]:
        query = decoded("query", given["query"][0])
        documents = [decoded("documents", each) for each in given["documents"]]
        if not documents:
            raise InvalidArgument("'documents' is empty")
        if len(documents) > MAX_DOCUMENTS:
            raise InvalidArgument(f"'documents' has {len(documents)} texts; the maximum is {MAX_DOCUMENTS}")
        tokens = self._pipeline.tokens(query, documents)
        scores = self._pipeline.scores(query, documents)
        return {"scores": scores.astype(np.float32), "num_input_tokens": np.array([tokens], np.uint32)}
