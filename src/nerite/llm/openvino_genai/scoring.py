"""Log probabilities of the tokens of a prompt, which the pipeline does not report.

A second copy of the model computes them, in 32 bits. It is loaded with the first request for them.
A prompt goes through it in parts, whose logits are reduced at once: those of a whole prompt would take gigabytes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from nerite.core.errors import NeriteError, Unsupported
from nerite.core.tensor import Array
from nerite.frameworks.openvino.graph import openvino, translated
from nerite.llm.engine import TokenLogprob
from nerite.llm.openvino_genai.options import PipelineOptions

_PART: Final = 128
"""Tokens per part."""
_INPUTS: Final = frozenset({"input_ids", "attention_mask", "position_ids", "beam_idx"})
_EXACT: Final = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "PERFORMANCE_HINT": "LATENCY",
}

Scores = Sequence[TokenLogprob]
"""One for each token of a prompt. The first follows none, and its log probability is no number."""


class PromptScorer:
    """Computes the log probabilities of prompts, one after the other in a thread of its own."""

    def __init__(self, options: PipelineOptions, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode`` returns the text of tokens. The model is loaded lazily."""
        self._options = options
        self._decode = decode
        self._request: Any = None
        self._names: frozenset[str] = frozenset()
        self._thread = ThreadPoolExecutor(1, "scoring")
        self._closing = threading.Event()

    def score(self, tokens: Array, count: int, then: Callable[[Scores, NeriteError | None], None]) -> None:
        """Compute the scores of ``tokens`` with the ``count`` likeliest alternatives, and call ``then`` with them."""
        self._thread.submit(self._answer, tokens.reshape(-1), count, then)

    def close(self) -> None:
        """Stop after the current part."""
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)
        self._request = None

    def _answer(self, tokens: Array, count: int, then: Callable[[Scores, NeriteError | None], None]) -> None:
        try:
            then(self._scores(tokens, count), None)
        except NeriteError as error:
            then((), error)
        except Exception as error:  # of the framework, which says why
            then((), translated(error, "computing the log probabilities of a prompt"))

    def _load(self) -> Any:
        if self._request is None:
            model = openvino().Core().compile_model(str(self._options.model), self._options.device, _EXACT)
            self._names = frozenset(name for port in model.inputs for name in port.names)
            if not {"input_ids"} <= self._names or not self._names <= _INPUTS:
                raise Unsupported("the model takes more than tokens, so its prompts have no 'logprobs'")
            self._request = model.create_infer_request()
        return self._request

    def _scores(self, tokens: Array, count: int) -> Scores:
        request = self._load()
        request.reset_state()
        scores = [TokenLogprob(int(tokens[0]), math.nan, self._decode([int(tokens[0])]))]
        for begin in range(0, len(tokens) - 1, _PART):
            if self._closing.is_set():
                raise Unsupported("the model is being unloaded")
            part = tokens[begin : min(begin + _PART, len(tokens) - 1)]
            logits = request.infer(self._inputs(part, begin))["logits"][0]
            scores += self._reduced(logits.astype(np.float32, copy=False), tokens[begin + 1 :], count)
        return scores

    def _inputs(self, part: Array, begin: int) -> dict[str, Array]:
        end = begin + len(part)
        inputs: dict[str, Array] = {
            "input_ids": part[None].astype(np.int64),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(begin, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return {name: value for name, value in inputs.items() if name in self._names}

    def _reduced(self, logits: Array, following: Array, count: int) -> list[TokenLogprob]:
        """Return the log probability of each token that follows, and of the likeliest in its place."""
        highest = logits.max(axis=-1, keepdims=True)
        total = np.log(np.exp(logits - highest).sum(axis=-1)) + highest[:, 0]
        scores = []
        for place, row in enumerate(logits):
            token = int(following[place])
            likely = np.argpartition(row, -count)[-count:].tolist() if count else []
            rank = int((row > row[token]).sum()) + 1
            others = [self._one(each, row, total[place]) for each in likely if each != token]
            scores.append(self._one(token, row, total[place], rank, others))
        return scores

    def _one(
        self, token: int, row: Array, total: float, rank: int | None = None, others: Sequence[TokenLogprob] = ()
    ) -> TokenLogprob:
        return TokenLogprob(token, float(row[token] - total), self._decode([token]), rank, others)
