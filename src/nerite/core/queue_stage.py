"""Stages of the queue pipeline of a model version: idempotency keys, response cache, admission, execution.

A request enters the first stage. Each stage answers it, holds it for a while, or passes it to the following stage; the
last one is a scheduler, which executes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Protocol

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest


class QueueStage(Protocol):
    """Accepts requests and answers each of them exactly once. Used from the loop's thread only."""

    @property
    def pending(self) -> int:
        """Number of requests that wait in this stage or a following one."""

    @property
    def in_flight(self) -> int:
        """Number of requests in this stage and the following ones that have not had their last response."""

    def submit(self, request: InferenceRequest) -> None:
        """Enqueue a request; its answer comes through ``request.respond``."""

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call ``call`` once no request waits or runs, possibly at once. No further requests may be submitted."""

    def abandon(self, error: NeriteError) -> None:
        """Answer all waiting requests with ``error``. Running requests continue."""

    def hand_back(self, take: Callable[[InferenceRequest], bool], error: NeriteError) -> None:
        """Answer with ``error`` the waiting requests that ``take`` returns True for, because they can run elsewhere."""


class FrontStage(ABC):
    """Base of the stages in front of another one."""

    def __init__(self, following: QueueStage) -> None:
        self._following = following
        self._on_drained: list[Callable[[], None]] = []

    @property
    @abstractmethod
    def held(self) -> Collection[InferenceRequest]:
        """Requests that wait in this stage."""

    @abstractmethod
    def submit(self, request: InferenceRequest) -> None:
        """Enqueue a request; its answer comes through ``request.respond``."""

    @abstractmethod
    def _refuse_held(self, error: NeriteError) -> None:
        """Answer the requests that wait in this stage with ``error``."""

    @property
    def pending(self) -> int:
        """Number of requests that wait in this stage or a following one."""
        return self._following.pending + len(self.held)

    @property
    def in_flight(self) -> int:
        """Number of requests in this stage and the following ones that have not had their last response."""
        return self._following.in_flight + len(self.held)

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call ``call`` once no request waits or runs, possibly at once. No further requests may be submitted."""
        if self.held:
            self._on_drained.append(call)
        else:
            self._following.when_drained(call)

    def abandon(self, error: NeriteError) -> None:
        """Answer all waiting requests with ``error``. Running requests continue."""
        self._refuse_held(error)
        self._following.abandon(error)
        self._check_drained()

    def hand_back(self, take: Callable[[InferenceRequest], bool], error: NeriteError) -> None:
        """Answer with ``error`` the waiting requests that ``take`` returns True for. Those held here stay."""
        self._following.hand_back(take, error)

    def _check_drained(self) -> None:
        """Let the following stage drain once this one holds nothing. To be called whenever a held request has left."""
        if self._on_drained and not self.held:
            waiting, self._on_drained = self._on_drained, []
            for call in waiting:
                self._following.when_drained(call)
