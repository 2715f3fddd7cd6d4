"""A request inside the engine: what vLLM says of it, in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nerite.backends.llm.engine import Delta, FinishReason, GenerationRequest, Listener, TokenLogprob
from nerite.core.errors import Internal
from nerite.core.tensor import Array

_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


class Running:
    """One request, from when the engine took it up. For the engine's thread alone."""

    def __init__(
        self, request: GenerationRequest, listener: Listener, tokens: list[int], images: Sequence[Array], sampling: Any
    ) -> None:
        """``sampling`` are vLLM's parameters, ``tokens`` the prompt, in which images are marks."""
        self.request = request
        self.id = request.id
        self.listener = listener
        self.tokens = tokens
        self.images = images
        self.sampling = sampling
        self.outputs: Any = None
        """Where vLLM puts what comes."""
        self.finished = False

    def taken(self) -> list[Delta]:
        """Return what has come. Raises what vLLM put there instead."""
        output = self.outputs.get_nowait()
        if output is None:
            return []
        self.finished = output.finished
        return [_delta(each) for each in output.outputs]


def _delta(output: Any) -> Delta:
    reason = None
    if output.finish_reason is not None:
        if output.finish_reason not in _REASONS:
            raise Internal(f"vLLM ended the sequence with '{output.finish_reason}'")
        reason = _REASONS[output.finish_reason]
    logprobs = [_logprob(token, told) for token, told in zip(output.token_ids, output.logprobs or (), strict=False)]
    return Delta(output.index, list(output.token_ids), output.text, logprobs, reason)


def _logprob(token: int, told: Mapping[int, Any]) -> TokenLogprob:
    """Return what is told of one place: of the token that was chosen, and of those that were likelier or nearly so."""
    others = [_one(each, about) for each, about in told.items() if each != token]
    chosen = told[token]
    return TokenLogprob(token, chosen.logprob, chosen.decoded_token or "", chosen.rank, others)


def _one(token: int, about: Any) -> TokenLogprob:
    return TokenLogprob(token, about.logprob, about.decoded_token or "", about.rank)
