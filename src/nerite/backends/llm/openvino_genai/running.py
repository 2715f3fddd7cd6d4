"""A request inside the engine, and its sequences. For the engine's thread alone.

Each of the ``n`` sequences of a request is a request of its own to the pipeline: it hands out several sequences of one
only when they are all done, and cannot end one alone. Their prompt is computed once where prefixes are cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nerite.backends.llm.engine import Delta, FinishReason, GenerationRequest, Listener, TokenLogprob
from nerite.backends.llm.text import TextStream
from nerite.core.errors import Internal, NeriteError


class RunningSequence:
    """One sequence of a request."""

    def __init__(self, of: Running, index: int, handle: Any, most: int) -> None:
        """``most``: tokens that it can have."""
        sampling = of.request.sampling
        self.of = of
        self.text = TextStream(
            sampling.stop, include_stop=sampling.include_stop_str_in_output, min_tokens=sampling.min_tokens
        )
        self.skip_special = sampling.skip_special_tokens
        self._stop = frozenset(sampling.stop_token_ids if sampling.ignore_eos else ())
        """Tokens that end it, of which the pipeline does not know."""
        self._least = sampling.min_tokens
        self._count = 0
        self.tokens: list[int] = []
        """Those of this step."""
        self._most = most
        self._had = self._came = 0
        """Tokens before this step, and in it."""
        self._index = index
        self._handle = handle
        self._logprobs: list[float] = []
        self._reason: FinishReason | None = None

    def read(self) -> bool:
        """Take what is new; return whether anything is."""
        self.tokens, self._logprobs = [], []
        ended = None
        # ``read_all`` would wait for the end.
        while self._handle.can_read():
            for output in self._handle.read().values():
                self.tokens += output.generated_ids
                self._logprobs += output.generated_log_probs
                ended = output.finish_reason.name
        self._had, self._came = self._had + self._came, len(self.tokens)
        if ended == "STOP":
            self._reason = FinishReason.STOP
        elif ended == "LENGTH":
            self._reason = FinishReason.LENGTH
        elif self._handle.get_status().name != "RUNNING":
            # The pipeline says nothing more of a request that it will not do.
            raise Internal("the pipeline ignores a request that was admitted")
        if self._stop:
            self._look_for_stop()
        self.text.add(self.tokens)
        return bool(self.tokens) or self._reason is not None

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
                self._reason = FinishReason.STOP
                self._handle.cancel()
                return

    def delta(self, tokenizer: Any, decoded: str) -> Delta:
        """Return what is new, given the text of the tokens that ``text`` wants decoded."""

        def decode(tokens: Sequence[int]) -> str:
            text: str = tokenizer.decode(tokens, skip_special_tokens=self.skip_special)
            return text

        text = self.text.take(decoded, decode, last=self._reason is not None)
        if self.text.stopped and self._reason is not FinishReason.STOP:
            self._reason = FinishReason.STOP
            self._handle.cancel()
        if self._reason is not None:
            self.of.open.remove(self)
        logprobs = []
        if self.of.request.sampling.logprobs is not None:
            logprobs = [
                TokenLogprob(token, logprob, tokenizer.decode([token], skip_special_tokens=False))
                for token, logprob in zip(self.tokens, self._logprobs, strict=True)
            ]
        return Delta(self._index, self.tokens, text, logprobs, self._reason)

    def cancel(self) -> Delta:
        """Have the pipeline let go of it; return what is to be said."""
        self._handle.cancel()
        return Delta(self._index, (), "", (), FinishReason.ABORT)


class Running:
    """A request, from when the engine took it up."""

    def __init__(
        self, request: GenerationRequest, listener: Listener, length: int, prompt: Sequence[Any], configs: Sequence[Any]
    ) -> None:
        """``length`` is the prompt's; ``prompt`` as the pipeline takes it; ``configs`` how each sequence is made."""
        self.request = request
        self.id = request.id
        self.listener = listener
        self.configs = configs
        self.prompt_tokens = length
        self.open: list[RunningSequence] = []
        """The sequences that are not finished, once it has begun."""
        self._begun = False
        self._prompt = prompt

    def begin(self, pipeline: Any, numbers: Iterable[int]) -> None:
        """Give the sequences to the pipeline, under these numbers, and say so."""
        self._begun = True
        for index, (number, config) in enumerate(zip(numbers, self.configs, strict=True)):
            handle = pipeline.add_request(number, *self._prompt, config)
            self.open.append(RunningSequence(self, index, handle, config.max_new_tokens))
        self.listener.admitted(self.prompt_tokens)

    def abort(self) -> None:
        """End the sequences that are not finished, and say so."""
        deltas = [sequence.cancel() for sequence in self.open]
        if not self._begun:
            deltas = [Delta(index, (), "", (), FinishReason.ABORT) for index in range(len(self.configs))]
        self.open.clear()
        self.listener.advanced(deltas)

    def fail(self, error: NeriteError) -> None:
        """End the sequences that are not finished, for a reason that is not their own."""
        for sequence in self.open:
            sequence.cancel()
        self.open.clear()
        self.listener.failed(error)


def decoded(tokenizer: Any, sequences: Sequence[RunningSequence]) -> list[str]:
    """Return the text of the tokens that each sequence wants decoded: many at once cost little more than one."""
    plain = [sequence.text.window for sequence in sequences if sequence.skip_special]
    texts = iter(tokenizer.decode(plain) if plain else ())
    return [
        next(texts) if sequence.skip_special else tokenizer.decode(sequence.text.window, skip_special_tokens=False)
        for sequence in sequences
    ]
