"""What an engine and the process of its pipeline say to each other. Plain data, which is pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from nerite.backends.llm.engine import FinishReason
from nerite.backends.llm.sampling import SamplingParameters
from nerite.backends.llm.structured import Grammar
from nerite.core.errors import NeriteError
from nerite.core.tensor import Array

# To the process


class Order(NamedTuple):
    """A request: as many sequences as it has numbers, each a request of its own to the pipeline."""

    numbers: Sequence[int]
    prompt: Array | tuple[str, Sequence[Array]]
    """Its tokens, or its text and pixels."""
    special_tokens: bool
    """Whether a text gets those that stand at its beginning."""
    sampling: SamplingParameters
    room: int
    """Tokens that there is room for after the prompt."""
    most: int
    """Tokens of prompt and answer; 0 where the prompt is tokens, which were counted."""
    ends: frozenset[int]
    """Tokens by which the model says that it is done."""
    grammar: Grammar | None


class Drop(NamedTuple):
    """Sequences that nobody wants any more. In any case a ``Step`` follows."""

    numbers: Sequence[int]


class Compile(NamedTuple):
    """A grammar that is to be compiled. ``Compiled`` follows, between steps."""

    grammar: Grammar
    ends: frozenset[int]
    vocabulary: int
    """How many tokens the model knows."""


# From the process


class Loaded(NamedTuple):
    """The model is there."""

    blocks: int
    """Of the KV cache."""
    ends: frozenset[int]


Piece: TypeAlias = tuple[int, list[int], list[float], FinishReason | None, int]
"""Of a sequence: its number, new tokens, how likely they were, and how it has ended, if it has.

At the end, of a model that takes images, also how many tokens the prompt had with them; else 0.
"""


class Step(NamedTuple):
    """What a step has brought."""

    begun: Sequence[int]
    """Sequences that it was the first for."""
    refused: Sequence[tuple[int, NeriteError]]
    """Those that the pipeline did not take."""
    pieces: Sequence[Piece]
    scheduled: int
    """Sequences in the batch."""
    blocks: int
    """Of the KV cache that are in use."""
    failure: str
    """Why the step has failed, and all that was begun with it, if it has. The process ends then."""


class Compiled(NamedTuple):
    """The end of a ``Compile``."""

    wrong: str
    """Why there can be no text of that form; nothing if there can."""
