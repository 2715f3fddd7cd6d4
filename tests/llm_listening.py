"""Asking an engine for language models, and hearing what becomes of it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from nerite.core.errors import NeriteError
from nerite.llm.engine import FinishReason, GenerationRequest, LlmEngine, TokenDelta
from nerite.llm.images import pixels
from nerite.llm.sampling_parameters import SamplingParameters

FEW = SamplingParameters(max_tokens=8, temperature=0, ignore_eos=True)


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self, sequences: int = 1) -> None:
        self.prompt_tokens = self.text_tokens = 0
        self.deltas: list[TokenDelta] = []
        self.steps: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._over: queue.SimpleQueue[NeriteError | None] = queue.SimpleQueue()
        self._unfinished = sequences

    def admitted(self, prompt_tokens: int, cached_tokens: int = 0, image_tokens: int = 0) -> None:
        self.prompt_tokens, self.text_tokens = prompt_tokens, prompt_tokens - image_tokens

    def advanced(self, deltas: Any) -> None:
        self.deltas += deltas
        self.steps.put(None)
        self._unfinished -= sum(delta.finish_reason is not None for delta in deltas)
        if not self._unfinished:
            self._over.put(None)

    def failed(self, error: NeriteError) -> None:
        self._over.put(error)

    def begun(self) -> Heard:
        self.steps.get(timeout=20)
        return self

    def over(self) -> Heard:
        error = self._over.get(timeout=20)
        if error is not None:
            raise error
        return self

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def tokens(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.tokens]

    @property
    def reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason


def ignored(_told: object) -> None:
    """Take no note of what an engine tells."""


def asked(
    engine: LlmEngine,
    sampling: SamplingParameters = FEW,
    prompt: Any = "once",
    id: str = "a",
    images: Sequence[bytes] = (),
    **more: Any,
) -> Heard:
    heard = Heard(sampling.n)
    engine.add(GenerationRequest(id, prompt, sampling, images=pixels(images), **more), heard)
    return heard


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)
