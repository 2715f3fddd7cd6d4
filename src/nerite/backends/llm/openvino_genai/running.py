"""A request inside the engine, and its sequences. For the engine's thread alone.

Each of the ``n`` sequences of a request is a request of its own to the pipeline: it hands out several sequences of one
only when they are all done, and cannot end one alone. Their prompt is computed once where prefixes are cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nerite.backends.llm.engine import Delta, FinishReason, GenerationRequest, Listener, TokenLogprob
from nerite.backends.llm.openvino_genai.image_tokens import ImageTokens
from nerite.backends.llm.openvino_genai.orders import Order
from nerite.backends.llm.text import TextStream
from nerite.core.errors import NeriteError


class RunningSequence:
    """One sequence of a request."""

    def __init__(self, of: Running, index: int, number: int) -> None:
        """``number`` is what the pipeline knows it by."""
        sampling = of.request.sampling
        self.of = of
        self.number = number
        self.text = TextStream(
            sampling.stop, include_stop=sampling.include_stop_str_in_output, min_tokens=sampling.min_tokens
        )
        self.skip_special = sampling.skip_special_tokens
        self._stop = frozenset(sampling.stop_token_ids if sampling.ignore_eos else ())
        """Tokens that end it, of which the pipeline does not know."""
        self._least = sampling.min_tokens
        self._count = 0
        self.tokens: Sequence[int] = ()
        """Those of this step."""
        self._most = min(sampling.max_tokens or of.order.room, of.order.room)
        self._had = self._came = 0
        """Tokens before this step, and in it."""
        self._index = index
        self._logprobs: Sequence[float] = ()
        self._reason: FinishReason | None = None
        self.cut = False
        """It has ended for a reason that the pipeline does not know."""

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], ended: FinishReason | None, counted: int) -> None:
        """Take what is new, as a ``Piece`` has it."""
        if counted:
            self.of.counted(counted)
        self.tokens, self._logprobs = tokens, logprobs
        self._had, self._came = self._had + self._came, len(tokens)
        self._reason = ended
        if self._stop:
            self._look_for_stop()
        self.text.add(self.tokens)

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self._reason is not None

    def guesses(self, at_a_time: int) -> tuple[int, int]:
        """Return how many tokens were guessed for this step, if so many are at a time, and how many were right.

        For the first one none are. What was right comes with the one token that each step brings anyway.
        """
        if not self._had or not self._came:
            return 0, 0
        return min(at_a_time, self._most - self._had - 1), self._came - 1

    def _look_for_stop(self) -> None:
        for place, token in enumerate(self.tokens, 1):
            self._count += 1
            if token in self._stop and self._count > self._least:
                self.tokens, self._logprobs = self.tokens[:place], self._logprobs[:place]
                self._end_with_stop()
                return

    def _end_with_stop(self) -> None:
        self.cut = self._reason is None
        self._reason = FinishReason.STOP

    def delta(self, tokenizer: Any, decoded: str) -> Delta:
        """Return what is new, given the text of the tokens that ``text`` wants decoded."""

        def decode(tokens: Sequence[int]) -> str:
            text: str = tokenizer.decode(tokens, skip_special_tokens=self.skip_special)
            return text

        text = self.text.take(decoded, decode, last=self._reason is not None)
        if self.text.stopped and self._reason is not FinishReason.STOP:
            self._end_with_stop()
        if self._reason is not None:
            del self.of.open[self.number]
        logprobs = []
        if self.of.request.sampling.logprobs is not None:
            logprobs = [
                TokenLogprob(token, logprob, tokenizer.decode([token], skip_special_tokens=False))
                for token, logprob in zip(self.tokens, self._logprobs, strict=True)
            ]
        return Delta(self._index, self.tokens, text, logprobs, self._reason)

    def abort(self) -> Delta:
        """Return what is said when nobody wants the rest."""
        return Delta(self._index, (), "", (), FinishReason.ABORT)


class Running:
    """A request, from when the engine took it up."""

    def __init__(
        self, request: GenerationRequest, listener: Listener, length: int, order: Order, known: ImageTokens
    ) -> None:
        """``length`` is that of the prompt's text; ``known`` is what is known of images."""
        self.request = request
        self.id = request.id
        self.listener = listener
        self.order = order
        self._text_tokens = self.prompt_tokens = length
        self._known = known
        images = order.prompt[1] if isinstance(order.prompt, tuple) else ()
        self._sizes = [(image.shape[0], image.shape[1]) for image in images]
        self.begun = False
        """The pipeline has begun with it."""
        self.open = {number: RunningSequence(self, index, number) for index, number in enumerate(order.numbers)}
        """The sequences that are not finished."""

    def begin(self) -> None:
        """Say that the pipeline has begun."""
        self.begun = True
        image_tokens = self._known.of(self._sizes)
        self.prompt_tokens += image_tokens
        self.listener.admitted(self.prompt_tokens, image_tokens=image_tokens)

    def counted(self, tokens: int) -> None:
        """Note how many tokens the prompt had with its images."""
        self._known.learn(self._sizes, tokens - self._text_tokens)

    def abort(self) -> None:
        """End the sequences that are not finished, and say so."""
        deltas = [sequence.abort() for sequence in self.open.values()]
        self.open.clear()
        self.listener.advanced(deltas)

    def fail(self, error: NeriteError) -> None:
        """End the sequences that are not finished, for a reason that is not their own."""
        self.open.clear()
        self.listener.failed(error)
