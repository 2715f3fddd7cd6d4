"""What the pieces of a step mean to those who wait: text, and what it took. For the engine's thread alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nerite.backends.llm.engine import Delta
from nerite.backends.llm.openvino_genai.orders import Piece
from nerite.backends.llm.openvino_genai.running import Running, RunningSequence


class Texts:
    """Makes deltas of pieces, and counts tokens."""

    def __init__(self, tokenizer: Any, guesses: int) -> None:
        """``guesses``: so many tokens are guessed at a time, where they are."""
        self._tokenizer = tokenizer
        self._guesses = guesses
        self.generated_tokens = 0
        self.drafted = self.accepted = 0
        """Tokens that were guessed, and those of them that were right."""

    def of(
        self, pieces: Iterable[Piece], wanted: dict[int, RunningSequence]
    ) -> tuple[dict[Running, list[Delta]], list[int]]:
        """Return what is new of those that are ``wanted``, and the numbers of those that the pipeline is to drop.

        What is over is not wanted any more.
        """
        fresh = []
        for piece in pieces:
            sequence = wanted.get(piece[0])
            if sequence is not None:
                sequence.take(*piece[1:])
                fresh.append(sequence)
        deltas: dict[Running, list[Delta]] = {}
        cut = []
        for sequence, text in zip(fresh, self._decoded(fresh), strict=True):
            self.generated_tokens += len(sequence.tokens)
            drafted, accepted = sequence.guesses(self._guesses)
            self.drafted += drafted
            self.accepted += accepted
            deltas.setdefault(sequence.of, []).append(sequence.delta(self._tokenizer, text))
            if sequence.over:
                del wanted[sequence.number]
            if sequence.cut:
                cut.append(sequence.number)
        return deltas, cut

    def _decoded(self, sequences: Sequence[RunningSequence]) -> list[str]:
        """Return the text of the tokens that each wants decoded: many at once cost little more than one."""
        decode = self._tokenizer.decode
        plain = [sequence.text.window for sequence in sequences if sequence.skip_special]
        texts = iter(decode(plain) if plain else ())
        return [
            next(texts) if sequence.skip_special else decode(sequence.text.window, skip_special_tokens=False)
            for sequence in sequences
        ]
