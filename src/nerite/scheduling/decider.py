"""What every scheduler of a model answers to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.scheduling.release import Release


class Decider(Protocol):
    """Holds the requests that wait for one model, and says which run next.

    Whoever owns it offers requests, asks ``take`` whenever an instance is free, and asks again at ``wake_at``.
    """

    timed: bool
    """Requests may expire while no instance is free."""

    @property
    def size(self) -> int:
        """Requests that wait."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait, by priority."""

    @property
    def releases(self) -> Mapping[Release, int]:
        """How many batches began for which reason; empty where no request waits for others."""

    def renewed(self) -> Decider:
        """Return an empty one with the same rules."""

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Let ``request`` wait, or return why it is refused."""

    def give_way(self, request: InferenceRequest) -> InferenceRequest | None:
        """Drop and return the request that matters least, if it matters less than ``request``; else None."""

    def take(self, now: int) -> list[InferenceRequest] | None:
        """Return the batch that a free instance should run now; None if it should wait."""

    def due(self, now: int) -> bool:
        """Return whether ``take`` would return a batch."""

    def take_full(self, now: int) -> list[InferenceRequest] | None:
        """Return the batch that ``take`` would, if no request that is yet to come could join it; else None."""

    def wake_at(self, free: bool) -> int | None:
        """Return when to call ``expire`` and ``take`` again if nothing else happens before; None for never.

        ``free``: an instance is, and ``take`` was asked last. If none is, only what expires matters.
        """

    def expire(self, now: int) -> list[InferenceRequest]:
        """Drop and return the requests that waited too long."""

    def withdraw(self, request: InferenceRequest) -> bool:
        """Drop ``request``, whose caller gave up; False if it does not wait here any more."""

    def drain(self) -> list[InferenceRequest]:
        """Drop and return everything that waits, because nobody will ever take it."""
