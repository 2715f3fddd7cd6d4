"""Thinking budgets: a model that thinks for too long is made to answer.

Its sequence is ended, and another one continues the text with the marker that ends thoughts. With prefix caching, what
was computed is not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from nerite.core.errors import NeriteError
from nerite.llm.engine import FinishReason, GenerationRequest, LlmEngine, RequestListener, TokenDelta
from nerite.llm.sampling_parameters import ThinkingBudget

_MARGIN: Final = 64
"""Characters of white space that may precede a thought."""


class ThoughtCounter:
    """Counts the tokens of a thought until it ends. Pure."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._thinks: bool | None = True if budget.begun else None
        """None until the text says whether it begins with a thought."""
        self._head = ""
        self._tail = ""
        self._tokens = 0

    def exceeds(self, text: str, tokens: int) -> bool:
        """Return whether the thought is longer than its budget with the ``text`` of further ``tokens``."""
        if self._thinks is None:
            self._head += text
            begun = self._head.lstrip()
            if begun.startswith(self._budget.begin):
                self._thinks = True
            elif not self._budget.begin.startswith(begun) or len(self._head) > _MARGIN:
                self._thinks = False
        if self._thinks is False:
            return False
        self._tokens += tokens
        searched = self._tail + text
        if self._budget.end in searched:
            self._thinks = False
            return False
        self._tail = searched[1 - len(self._budget.end) :] if len(self._budget.end) > 1 else ""
        return self._thinks is True and self._tokens >= self._budget.tokens


class BudgetedListener:
    """Listener of a request with one sequence, which passes on each delta, and ends its thought at the budget."""

    def __init__(
        self, engine: LlmEngine, request: GenerationRequest, inner: RequestListener, budget: ThinkingBudget
    ) -> None:
        self._engine = engine
        self._request = request
        self._inner = inner
        self._counter: ThoughtCounter | None = ThoughtCounter(budget)
        """None once the thought was ended."""
        self._end = f"\n{budget.end}\n\n"
        self._text: list[str] = []
        self._ids: list[int] = []
        self._switching = False
        """Whether the first sequence is being ended so that a second one continues it."""
        self._cancelled = False

    def abort(self) -> None:
        """End the request, because its caller does not want it any more."""
        self._cancelled = True
        self._engine.abort(self._request.id)

    def admitted(self, prompt_tokens: int, cached_tokens: int = 0, image_tokens: int = 0) -> None:
        """Pass on the length of the prompt; that of the continued one is no news."""
        if self._counter is not None:
            self._inner.admitted(prompt_tokens, cached_tokens, image_tokens)

    def advanced(self, deltas: Sequence[TokenDelta]) -> None:
        """Pass on the output of a step, and end the thought if it has become too long."""
        (delta,) = deltas
        if self._switching:
            if delta.finish_reason is not None:
                self._switching = False
                self._continue()
            return
        self._inner.advanced(deltas)
        if self._counter is None or delta.finish_reason is not None:
            return
        self._text.append(delta.text)
        self._ids.extend(delta.tokens)
        if self._counter.exceeds(delta.text, len(delta.tokens)):
            self._switching = True
            self._engine.abort(self._request.id)

    def _continue(self) -> None:
        """Have a second sequence answer."""
        self._counter = None
        request = self._request
        left = None if request.sampling.max_tokens is None else request.sampling.max_tokens - len(self._ids)
        if self._cancelled or (left is not None and left < 1):
            reason = FinishReason.ABORT if self._cancelled else FinishReason.LENGTH
            self._inner.advanced([TokenDelta(0, (), "", (), reason)])
            return
        self._inner.advanced([TokenDelta(0, (), self._end)])
        try:
            prompt: str | Sequence[int]
            if isinstance(request.prompt, str):
                prompt = request.prompt + "".join(self._text) + self._end
            else:
                end = self._engine.tokenize(replace(request, prompt=self._end, special_tokens=False))
                prompt = [*request.prompt, *self._ids, *end]
            sampling = replace(request.sampling, max_tokens=left, min_tokens=0, prompt_logprobs=None)
            self._request = replace(request, id=f"{request.id}+", prompt=prompt, sampling=sampling)
            self._engine.add(self._request, self)
        except NeriteError as error:
            self._inner.failed(error)

    def failed(self, error: NeriteError) -> None:
        """Pass on the error that ended the request."""
        self._inner.failed(error)
