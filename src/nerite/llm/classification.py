"""Instances of models that classify texts. A batch of requests is one run of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from nerite.core import tensor
from nerite.core.tensor import Array
from nerite.llm.pipeline_instance import Results, TextBatchInstance, TextPipeline, decoded


class Classifier(TextPipeline, Protocol):
    """Computes the probability of each class."""

    labels: Sequence[str]
    """Names of the classes; empty if the model has none."""

    def probabilities(self, texts: Sequence[str]) -> Array:
        """Return one row per text."""


class ClassificationInstance(TextBatchInstance[Classifier]):
    """Instance that answers batches of requests with a classifier."""

    def _read(self, given: Mapping[str, Array]) -> tuple[Sequence[str], Results]:
        return [decoded("text_input", each) for each in given["text_input"]], self._results

    def _run(self, texts: Sequence[str]) -> Array:
        return self._pipeline.probabilities(texts)

    def _results(self, rows: Array, tokens: Sequence[int]) -> Mapping[str, Array]:
        shape = self._shape(len(rows))
        labels = self._pipeline.labels
        best = [labels[each] if each < len(labels) else str(each) for each in rows.argmax(axis=1).tolist()]
        return {
            "scores": np.ascontiguousarray(rows, np.float32).reshape(shape),
            "label": np.array([label.encode() for label in best], tensor.BYTES.numpy).reshape(shape),
            "num_input_tokens": np.array(tokens, np.uint32).reshape(shape),
        }
