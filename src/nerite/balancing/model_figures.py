"""What is learned of each model: how long its answers are, and how long they take."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from nerite.balancing.member import RoutedRequest
from nerite.balancing.retries import LatencyQuantile

LEAST_WORK: Final = 1.0
"""Tokens that a request counts for at least, such as one of tensors."""
_MOST_MODELS: Final = 1024
"""Clients may invent names, where members do not say what they serve."""
_WEIGHT: Final = 0.02
"""Of the newest answer in the average of their lengths."""


class _Figures:
    """Of one model."""

    __slots__ = ("answer_tokens", "answers", "latency")

    def __init__(self, latency: LatencyQuantile | None) -> None:
        self.answers = 0
        self.answer_tokens = 0.0
        self.latency = latency


class ModelFigures:
    """Figures of the models of a pool, of which the least recently used are forgotten."""

    def __init__(self, quantile: float = 0.0) -> None:
        """``quantile`` of latencies to learn for hedging; 0: none."""
        self._quantile = quantile
        self._models: OrderedDict[str, _Figures] = OrderedDict()

    def answer_tokens(self, request: RoutedRequest) -> float:
        """Return how many tokens the answer is expected to have: what is asked for or usual, and what is allowed."""
        expected = request.answer_tokens
        if not expected and (figures := self._models.get(request.model)):
            expected = figures.answer_tokens
        return min(expected, request.answer_limit)

    def answered(self, model: str, tokens: float, latency_ns: int) -> None:
        """Take an answer."""
        figures = self._models.get(model)
        if figures is None:
            figures = _Figures(LatencyQuantile(self._quantile) if self._quantile else None)
            self._models[model] = figures
            if len(self._models) > _MOST_MODELS:
                self._models.popitem(last=False)
        else:
            self._models.move_to_end(model)
        figures.answers += 1
        figures.answer_tokens += max(_WEIGHT, 1 / figures.answers) * (tokens - figures.answer_tokens)
        if figures.latency is not None:
            figures.latency.add(latency_ns)

    def hedge_delay_ns(self, request: RoutedRequest) -> int | None:
        """Return after how long a request of tensors is late; None: not known, or nothing to hedge."""
        figures = self._models.get(request.model)
        if figures is None or figures.latency is None or request.prompt_tokens or request.answer_tokens > LEAST_WORK:
            return None
        return figures.latency.nanoseconds if request.repeatable and not request.sequence else None
