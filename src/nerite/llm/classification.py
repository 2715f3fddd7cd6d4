"""Instances of models that classify texts. A batch of requests is one run of the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from nerite.backends.interface import ExecutionTimes, ModelContext
from nerite.core import tensor
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Array, to_array
from nerite.llm.embedding import decoded
from nerite.llm.streaming import ResponseHeaders


class Classifier(Protocol):
    """Computes the probability of each class."""

    labels: Sequence[str]
    """Names of the classes; empty if the model has none."""

    def tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text. Raises ``InvalidArgument`` if a text is too long for the model."""

    def probabilities(self, texts: Sequence[str]) -> Array:
        """Return one row per text."""

    def close(self) -> None:
        """Release all resources."""


class ClassificationInstance:
    """Instance that answers batches of requests with a classifier."""

    checks_readiness = False

    def __init__(self, model: ModelContext, classifier: Classifier) -> None:
        config = model.config
        self._classifier = classifier
        self._batched = bool(config.get("max_batch_size"))
        self._headers = ResponseHeaders(model.name, str(model.version), [output["name"] for output in config["output"]])

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        """Answer each request; invalid ones get an error."""
        responses: dict[int, InferenceResponse] = {}
        calls: list[tuple[int, list[str], list[int]]] = []
        for place, request in enumerate(requests):
            try:
                texts = [decoded("text_input", each) for each in _elements(request)]
                calls.append((place, texts, self._classifier.tokens(texts)))
            except NeriteError as error:
                responses[place] = InferenceResponse.failed(error)
        timings.inputs_ready()
        if calls:
            rows = self._classifier.probabilities([text for _, texts, _ in calls for text in texts])
        timings.computed()
        at = 0
        for place, texts, tokens in calls:
            responses[place] = self._response(requests[place], rows[at : at + len(texts)], tokens)
            at += len(texts)
        return [responses[place] for place in range(len(requests))]

    def _response(self, request: InferenceRequest, rows: Array, tokens: Sequence[int]) -> InferenceResponse:
        shape = (len(rows), -1) if self._batched else (-1,)
        labels = self._classifier.labels
        best = [labels[each] if each < len(labels) else str(each) for each in rows.argmax(axis=1).tolist()]
        return self._headers.response(
            request,
            {
                "scores": np.ascontiguousarray(rows, np.float32).reshape(shape),
                "label": np.array([label.encode() for label in best], tensor.BYTES.numpy).reshape(shape),
                "num_input_tokens": np.array(tokens, np.uint32).reshape(shape),
            },
        )

    def is_ready(self) -> bool:
        """Return True: the model has no state that could be lost."""
        return True

    def close(self) -> None:
        """Release the model."""
        self._classifier.close()


def _elements(request: InferenceRequest) -> Sequence[bytes]:
    """Return the texts of a request."""
    pairs = zip(request.header.inputs, request.data, strict=True)
    texts: Array = next(to_array(spec, data) for spec, data in pairs if spec.name == "text_input")
    elements: list[bytes] = texts.reshape(-1).tolist()
    return elements
