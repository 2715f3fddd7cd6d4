"""A slot: what carries one request at a time, and is told what comes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from nerite.bench.generator.recorder import Recorder


class Work(Protocol):
    """Who gives slots their work."""

    recorder: Recorder

    def answered(self, slot: Slot) -> None:
        """Note the answer, and give the slot its next request, or put it aside."""

    def failed(self, slot: Slot, reason: str) -> None:
        """Note that there is no answer, or a refusal; the rest as for ``answered``."""


class Slot(ABC):
    """Carries one request at a time. ``ask`` may be called at once after it was made; it connects by itself."""

    __slots__ = ("due", "next", "sent", "work")

    def __init__(self, work: Work, following: Callable[[], bytes]) -> None:
        self.work = work
        self.next = following
        """Returns the request to send next."""
        self.due = 0.0
        self.sent = 0.0
        """When the request under way was sent; 0 if there is none."""

    @abstractmethod
    def ask(self) -> None:
        """Send the next request; ``due`` and ``sent`` were set by the caller."""

    @abstractmethod
    def abandon(self, reason: str) -> None:
        """Give up the request under way."""

    @abstractmethod
    def close(self) -> None:
        """Send nothing more, and hang up."""


MakeSlot = Callable[[Work, Callable[[], bytes]], Slot]
