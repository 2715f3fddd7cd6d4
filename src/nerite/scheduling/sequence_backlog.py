"""Sequences that wait for a slot: in order of arrival, and only here for a limited time, if their requests say so."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from nerite.scheduling.sequence import Sequence, SequenceRequest


class Backlog:
    """A line of sequences. One that leaves from the middle costs no more than the first."""

    __slots__ = ("_deadlines", "_line", "_most", "_number")

    def __init__(self) -> None:
        self._line: dict[Sequence, None] = {}
        self._deadlines: list[tuple[int, int, SequenceRequest]] = []
        self._number = itertools.count()
        self._most = 64

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._line

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        self._line[sequence] = None

    def pop(self) -> Sequence:
        """Take out the sequence that has waited longest."""
        sequence = next(iter(self._line))
        del self._line[sequence]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, if it is here."""
        self._line.pop(sequence, None)

    def limit(self, request: SequenceRequest) -> None:
        """Note how long a request of a sequence without a slot wants to wait at the most."""
        timeout_us = request.header.timeout_us
        if timeout_us:
            heapq.heappush(self._deadlines, (request.queued_ns + timeout_us * 1000, next(self._number), request))
            # Requests that wait no more leave their entry behind; it must not keep their tensors alive for long.
            if len(self._deadlines) > self._most:
                self._deadlines = [entry for entry in self._deadlines if _waits(entry[2])]
                heapq.heapify(self._deadlines)
                self._most = 2 * len(self._deadlines) + 64

    def next_deadline(self) -> int | None:
        """Return when ``expire`` has something to do next."""
        deadlines = self._deadlines
        while deadlines and not _waits(deadlines[0][2]):
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def expire(self, now: int) -> list[Sequence]:
        """Take out and return the sequences of which a request has waited too long."""
        expired: list[Sequence] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            sequence = heapq.heappop(self._deadlines)[2].sequence
            self.remove(sequence)
            if sequence not in expired:
                expired.append(sequence)
        return expired


def _waits(request: SequenceRequest) -> bool:
    return request.queue is not None and request.sequence.slots is None
