"""Order of the answers of a request whose steps stream: that of the responses that they come from. Pure.

A decoupled step of an ensemble sends a stream of responses, and each runs through the remaining steps by itself. One
may overtake another there, because a model has several instances. Its answer then waits for those of the responses
before it. A response that leads to a stream in turn is replaced by that stream.
"""

from __future__ import annotations

from typing import Generic, TypeVar

_T = TypeVar("_T")


class StreamPlace(Generic[_T]):
    """Place in the order: of the request, of one response of a stream, or of the end of a stream."""

    __slots__ = ("answer", "before", "behind", "open")

    def __init__(self, steps: int = 0) -> None:
        self.open = steps
        """Number of steps under way that may lead to an answer in this place."""
        self.answer: _T | None = None
        self.before: StreamPlace[_T] | None = None
        self.behind: StreamPlace[_T] | None = None


class StreamOrder(Generic[_T]):
    """Order of the answers of one request."""

    __slots__ = ("_first", "root")

    def __init__(self) -> None:
        self.root: StreamPlace[_T] = StreamPlace()
        """The place of the request itself."""
        self._first: StreamPlace[_T] | None = self.root

    @property
    def complete(self) -> bool:
        """Whether all answers have left."""
        return self._first is None

    def begin_stream(self, place: StreamPlace[_T]) -> StreamPlace[_T]:
        """Return the end of a stream that begins in ``place``: ``open`` until it is over."""
        end: StreamPlace[_T] = StreamPlace(1)
        end.before, end.behind = place, place.behind
        if place.behind is not None:
            place.behind.before = end
        place.behind = end
        return end

    def add_response(self, end: StreamPlace[_T]) -> StreamPlace[_T]:
        """Return the place of the next response of the stream that ends with ``end``."""
        place: StreamPlace[_T] = StreamPlace()
        place.before, place.behind = end.before, end
        if end.before is None:
            self._first = place
        else:
            end.before.behind = place
        end.before = place
        return place

    def release(self) -> list[_T]:
        """Return the answers that nothing before them holds back any more."""
        answers: list[_T] = []
        place = self._first
        while place is not None:
            if place.answer is not None:
                answers.append(place.answer)
                place.answer = None
            if place.open:
                break
            place = place.behind
            if place is not None:
                place.before = None
        self._first = place
        return answers
