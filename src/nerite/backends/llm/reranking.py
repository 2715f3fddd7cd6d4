"""Models that say how well texts answer a query. A request has all texts of one query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from nerite.backends.interface import Marks, ModelContext
from nerite.backends.llm.embedding import decoded
from nerite.backends.llm.headers import Headers
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array, to_array

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
        self._headers = Headers(model.name, str(model.version), [output["name"] for output in model.config["output"]])

    def execute(self, requests: Sequence[InferenceRequest], marks: Marks) -> Sequence[InferenceResponse]:
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
