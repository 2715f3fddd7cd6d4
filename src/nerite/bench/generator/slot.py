"""A slot: what carries one request at a time, and is told what comes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import Protocol

from nerite.bench.generator.recorder import Recorder
from nerite.bench.scripts import Script


class Work(Protocol):
    """Who gives slots their work."""

    recorder: Recorder

    def answered(self, slot: Slot) -> None:
        """Note the answer, and give the slot its next request, or put it aside."""

    def failed(self, slot: Slot, reason: str) -> None:
        """Note that there is no answer, or a refusal; the rest as for ``answered``."""


class Slot(ABC):
    """Carries one request at a time. ``ask`` may be called at once after it was made; it connects by itself."""

    __slots__ = ("_ending", "due", "next", "sent", "work")

    def __init__(self, work: Work, script: Script) -> None:
        self.work = work
        self._ending = script.ending
        self.next = script.following
        """Returns the request to send next."""
        self.due = 0.0
        self.sent = 0.0
        """When the request under way was sent; 0 if there is none."""

    @abstractmethod
    def ask(self) -> None:
        """Send the next request; ``due`` and ``sent`` were set by the caller."""

    def rest(self) -> None:
        """Send no more of the load: only, once, what ends a sequence that is open."""
        ending = self._ending()
        if ending is None:
            self.sent = 0.0
        else:
            self.next = lambda: ending
            self.sent = perf_counter()
            self.ask()

    @abstractmethod
    def abandon(self, reason: str) -> None:
        """Give up the request under way."""

    @abstractmethod
    def close(self) -> None:
        """Send nothing more, and hang up."""
