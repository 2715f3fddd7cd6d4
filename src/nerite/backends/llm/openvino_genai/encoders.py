"""Models that read and do not write: OpenVINO GenAI's pipelines for embeddings and for reranking.

Both cut texts that are too long in silence. So texts are counted before, and refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from nerite.backends.llm.engine import LONGEST_TOKEN
from nerite.backends.llm.openvino_genai import framework
from nerite.backends.llm.openvino_genai.options import EncoderOptions
from nerite.backends.openvino.framework import translated
from nerite.core.errors import InvalidArgument
from nerite.core.tensor import Array

_MOST: Final = 32
"""Texts in one run of a reranker: each is padded to the longest."""
_UNTOLD: Final = 8192
"""Tokens that are tried where nobody says how many a model takes."""


class _Encoder(ABC):
    """What both have: a tokenizer to count with, and a limit."""

    def __init__(self, options: EncoderOptions, *, pairs: bool = False) -> None:
        """Raises ``NeriteError``."""
        try:
            self._tokenizer: Any = framework.tokenizer(options.directory, pairs=pairs)
            self._most = _limit(self._tokenizer, options.context_length)
            self._pipeline: Any = self._made(options)
        except Exception as error:  # Whatever the framework raises says why the model cannot be loaded.
            raise translated(error, "loading model") from error

    @abstractmethod
    def _made(self, options: EncoderOptions) -> Any:
        """Return the framework's pipeline. Raises what the framework raises."""

    def _check(self, length: int, what: str) -> None:
        if not length:
            raise InvalidArgument(f"{what} is empty")
        if self._most and length > self._most:
            raise InvalidArgument(f"{what} has {length} tokens, and the model takes {self._most}: make it shorter")

    def _check_text(self, text: str, what: str) -> None:
        """Refuse a text that is too long whatever its tokens are: counting them takes its time."""
        if self._most and len(text) > self._most * LONGEST_TOKEN:
            raise InvalidArgument(
                f"{what} has {len(text)} characters, and the model takes {self._most} tokens: make it shorter"
            )

    def close(self) -> None:
        """Let go of the model."""
        self._pipeline = self._tokenizer = None


class OpenVinoEmbedder(_Encoder):
    """Texts to vectors."""

    def _made(self, options: EncoderOptions) -> Any:
        pipelines = framework.genai().TextEmbeddingPipeline
        config = pipelines.Config()
        config.pooling_type = getattr(pipelines.PoolingType, options.pooling)
        config.normalize = options.normalize
        return pipelines(str(options.directory), options.device, config, **options.properties)

    def tokens(self, texts: Sequence[str]) -> list[int]:
        """Return how many tokens each text has. Raises ``InvalidArgument`` if one has more than the model takes."""
        for text in texts:
            self._check_text(text, "the text")
        lengths = _lengths(self._tokenizer.encode(list(texts)))
        for length in lengths:
            self._check(length, "the text")
        return lengths

    def vectors(self, texts: Sequence[str]) -> Array:
        """Return a row for each text."""
        return np.asarray(self._pipeline.embed_documents(list(texts)), np.float32)


class OpenVinoReranker(_Encoder):
    """How well texts answer a query."""

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__(options, pairs=True)
        self._pairs = self._tokenizer.supports_paired_input()

    def _made(self, options: EncoderOptions) -> Any:
        pipelines = framework.genai().TextRerankPipeline
        config = pipelines.Config()
        config.top_n = _MOST
        return pipelines(str(options.directory), options.device, config, **options.properties)

    def tokens(self, query: str, documents: Sequence[str]) -> int:
        """Return how many tokens they have. Raises ``InvalidArgument`` if a text with the query has too many."""
        total = 0
        for text in (query, *documents):
            self._check_text(text, "a document, with the query,")
        for some in _chunks(documents):
            if self._pairs:
                encoded = self._tokenizer.encode([query], list(some))
            else:
                encoded = self._tokenizer.encode([query + each for each in some])
            for length in _lengths(encoded):
                self._check(length, "a document, with the query,")
                total += length
        return total

    def scores(self, query: str, documents: Sequence[str]) -> Array:
        """Return a number for each text, 0 to 1."""
        scores = np.zeros(len(documents), np.float32)
        at = 0
        for some in _chunks(documents):
            for index, score in self._pipeline.rerank(query, list(some)):
                scores[at + index] = score
            at += len(some)
        return scores


def _limit(tokenizer: Any, most: int) -> int:
    """Return how many tokens a text may have: ``most``, or fewer if the pipeline cuts there; 0 for any number."""
    text = "a " * ((most or _UNTOLD) + 1)
    (whole,), (cut,) = (_lengths(tokenizer.encode([text], truncation=truncation)) for truncation in (False, True))
    return min((limit for limit in (most, cut if cut < whole else 0) if limit), default=0)


def _chunks(documents: Sequence[str]) -> Iterator[Sequence[str]]:
    return (documents[at : at + _MOST] for at in range(0, len(documents), _MOST))


def _lengths(encoded: Any) -> list[int]:
    lengths: list[int] = encoded.attention_mask.data.sum(axis=1).tolist()
    return lengths
