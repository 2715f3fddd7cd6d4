"""Divides the steps of an engine over its requests. No I/O, no clock.

A step computes one token for each sequence that decodes, and the prompts of those that begin. Its time is divided by
tokens: a request that decodes pays for its new tokens, one whose prompt is read for the part of it that was not cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from nerite.core.engine_report import EngineReport, RequestBegun


class EngineShare:
    """What one request has used of an engine."""

    __slots__ = ("_held_ns", "answer_tokens", "begun", "decode_ns", "kv_block_ns", "over", "prefill_ns")

    def __init__(self, begun: RequestBegun) -> None:
        self.begun = begun
        self.answer_tokens = 0
        self.prefill_ns = self.decode_ns = 0
        self.kv_block_ns = 0
        self._held_ns = begun.at_ns
        self.over = False
        """The engine has it no longer."""

    @property
    def busy_ns(self) -> int:
        """The time of the engine that it used."""
        return self.prefill_ns + self.decode_ns

    @property
    def unread_tokens(self) -> int:
        """Tokens of the prompt that are to be computed: at least the last."""
        return max(self.begun.prompt_tokens - self.begun.cached_tokens, 1)

    def add(self, used_ns: int) -> None:
        """Add its share of a step."""
        if self.answer_tokens:
            self.decode_ns += used_ns
        else:
            self.prefill_ns += used_ns

    def advance(self, tokens: int, block_size: int, now: int) -> None:
        """Count the blocks that it held until ``now``, and the tokens that were generated since."""
        if block_size and now > self._held_ns:
            blocks = -(-(self.begun.prompt_tokens + self.answer_tokens) // block_size)
            self.kv_block_ns += blocks * (now - self._held_ns)
            self._held_ns = now
        self.answer_tokens += tokens


def divide_step(used_ns: int, report: EngineReport, shares: Sequence[tuple[EngineShare, int]]) -> None:
    """Divide the time of a step over all requests of the engine, given with the number of tokens that each got.

    Those that decode got one. Of the others, whose prompts are being read, as many took part as the batch had room for,
    the earliest first; if nobody got a token, at least the first. If all were read and nobody got a token, as in a step
    that failed, all take part.
    """
    weights: list[tuple[EngineShare, int]] = []
    reading: list[EngineShare] = []
    room = report.running
    for share, tokens in shares:
        if tokens:
            weights.append((share, tokens if share.answer_tokens else share.unread_tokens))
            room -= share.begun.sequences
        elif not share.answer_tokens:
            reading.append(share)
    for share in reading:
        if weights and room < share.begun.sequences:
            break
        weights.append((share, share.unread_tokens))
        room -= share.begun.sequences
    if not weights:
        weights = [(share, 1) for share, _ in shares]
    total = sum(weight for _, weight in weights)
    left = used_ns
    for share, weight in weights[1:]:
        part = used_ns * weight // total
        share.add(part)
        left -= part
    if weights:
        weights[0][0].add(left)
