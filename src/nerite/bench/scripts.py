"""What a slot sends, one request after the other: bytes that were made before."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class SequenceStep(NamedTuple):
    """A request's place in its sequence."""

    sequence_id: int
    start: bool
    end: bool


class Form(ABC):
    """A request, of which all is known but its place in a sequence. Can be sent to another process."""

    @abstractmethod
    def plain(self) -> bytes:
        """Return the request as it is sent outside of sequences."""

    @abstractmethod
    def of(self, step: SequenceStep) -> bytes:
        """Return the request at a place in a sequence."""


class Scripts(ABC):
    """Says what slots send. Each of ``shares`` generators takes its share."""

    @abstractmethod
    def begin(self, share: int, shares: int) -> Callable[[], Callable[[], bytes]]:
        """Return what makes a script for each slot: a function that returns the next request."""


@dataclass(frozen=True, slots=True)
class Turns(Scripts):
    """The same requests over and over; slots take the next."""

    messages: Sequence[bytes]

    def begin(self, share: int, shares: int) -> Callable[[], Callable[[], bytes]]:
        """Begin each share at another request."""
        count = len(self.messages)
        first = count * share // shares
        following = itertools.cycle([*self.messages[first:], *self.messages[:first]]).__next__
        return lambda: following


@dataclass(frozen=True, slots=True)
class Sequences(Scripts):
    """Each slot has a sequence at a time: its requests, the first and the last of them marked."""

    forms: Sequence[Sequence[Form]]
    """The requests of a sequence; sequences take these in turn."""
    first_id: int = 1

    def begin(self, share: int, shares: int) -> Callable[[], Callable[[], bytes]]:
        """Give no id twice."""
        ids = itertools.count(self.first_id + share, shares)
        contents = itertools.cycle(self.forms)
        return lambda: self._steps(ids, contents).__next__

    @staticmethod
    def _steps(ids: Iterator[int], contents: Iterator[Sequence[Form]]) -> Iterator[bytes]:
        for sequence_id, forms in zip(ids, contents, strict=False):
            last = len(forms) - 1
            for number, form in enumerate(forms):
                yield form.of(SequenceStep(sequence_id, number == 0, number == last))
