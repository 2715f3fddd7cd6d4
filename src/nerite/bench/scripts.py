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


class Script(NamedTuple):
    """What one slot sends."""

    following: Callable[[], bytes]
    """Returns the next request."""
    ending: Callable[[], bytes | None] = lambda: None
    """Returns the request that ends what is open on the server; None where nothing is."""


class Scripts(ABC):
    """Says what slots send. Each of ``shares`` generators takes its share."""

    @abstractmethod
    def begin(self, share: int, shares: int) -> Callable[[], Script]:
        """Return what makes a script for each slot."""


@dataclass(frozen=True, slots=True)
class Turns(Scripts):
    """The same requests over and over; slots take the next."""

    messages: Sequence[bytes]

    def begin(self, share: int, shares: int) -> Callable[[], Script]:
        """Begin each share at another request."""
        count = len(self.messages)
        first = count * share // shares
        following = itertools.cycle([*self.messages[first:], *self.messages[:first]]).__next__
        return lambda: Script(following)


@dataclass(frozen=True, slots=True)
class Sequences(Scripts):
    """Each slot has a sequence at a time: its requests, the first and the last of them marked."""

    forms: Sequence[Sequence[Form]]
    """The requests of a sequence; sequences take these in turn."""
    first_id: int = 1

    def begin(self, share: int, shares: int) -> Callable[[], Script]:
        """Give no id twice."""
        ids = itertools.count(self.first_id + share, shares)
        contents = itertools.cycle(self.forms)

        def script() -> Script:
            turn = _Turn(ids, contents)
            return Script(turn.following, turn.ending)

        return script


class _Turn:
    """One sequence after the other, of those that several share."""

    def __init__(self, ids: Iterator[int], contents: Iterator[Sequence[Form]]) -> None:
        self._ids = ids
        self._contents = contents
        self._id = 0
        self._forms: Sequence[Form] = ()
        self._sent = 0

    def following(self) -> bytes:
        """Return the next request of the sequence, or the first of the next."""
        if self._sent == len(self._forms):
            self._id, self._forms, self._sent = next(self._ids), next(self._contents), 0
        self._sent += 1
        step = SequenceStep(self._id, self._sent == 1, self._sent == len(self._forms))
        return self._forms[self._sent - 1].of(step)

    def ending(self) -> bytes | None:
        """Return the last request of a sequence that has begun."""
        if self._sent == len(self._forms):
            return None
        self._sent = len(self._forms)
        return self._forms[-1].of(SequenceStep(self._id, start=False, end=True))
