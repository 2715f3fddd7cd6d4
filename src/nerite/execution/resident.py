"""An instance in a worker process: the model it is of, its seat, and the jobs that are for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from nerite.backends import registry
from nerite.backends.interface import Instance, InstanceContext, Model, ModelContext
from nerite.core.request import RequestHeader
from nerite.execution.inbox import Message
from nerite.execution.records import Unpacker

at_seat: Final[ContextVar[int | None]] = ContextVar("at_seat", default=None)
"""The seat of the instance that is being made or finalized."""


class Resident:
    """One instance. It has one job at a time, on whichever thread comes first."""

    def __init__(self, seat: int, do: Callable[[Resident, Message], None], requests: Unpacker[RequestHeader]) -> None:
        """``do`` does one of the jobs; ``requests`` unpacks those of the instance."""
        self.seat = seat
        self.requests = requests
        self._do = do
        self.name = ""
        self.instance: Instance | None = None
        self._model: Model | None = None
        self._jobs: deque[Message] = deque()
        self._at_work = threading.Lock()

    def open(self, context: ModelContext, instance: InstanceContext) -> None:
        """Open the model and make the instance. Raises what the backend raises."""
        self.name = instance.name
        with self._seated():
            self._model = registry.backend_of(context).open(context)
            self.instance = self._model.instance(instance)

    def close(self) -> None:
        """Finalize the instance and close the model."""
        with self._seated():
            if self.instance is not None:
                self.instance.close()
            if self._model is not None:
                self._model.close()
        self.instance = None

    def attend(self, job: Message) -> None:
        """Do a job; or leave it to the thread that is at another one for this instance."""
        if not self._jobs and self._at_work.acquire(blocking=False):
            try:
                self._do(self, job)
            finally:
                self._at_work.release()
        else:
            self._jobs.append(job)
        del job
        if self._jobs:
            self._work()

    def enlist(self) -> bool:
        """Take the instance for a while, if it is there and nobody else has it; return whether that is so."""
        return self.instance is not None and self._at_work.acquire(blocking=False)

    def release(self) -> None:
        """Give the instance back, and do what has come for it meanwhile."""
        self._at_work.release()
        self._work()

    def _work(self) -> None:
        while self._jobs and self._at_work.acquire(blocking=False):
            try:
                while self._jobs:
                    self._do(self, self._jobs.popleft())
            finally:
                self._at_work.release()

    @contextmanager
    def _seated(self) -> Iterator[None]:
        before = at_seat.set(self.seat)
        try:
            yield
        finally:
            at_seat.reset(before)
