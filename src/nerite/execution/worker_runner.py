"""An instance in a worker process of its own, and its supervision.

States: up (idle or busy), down (the worker died; a new one is being made, or waited for), closed. A death fails the
batch that was running and nothing else. The first death is answered by a new worker at once, the following ones after
a growing pause; the model is not ready meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from nerite.core.at_hand import ids_of
from nerite.core.errors import Internal, NeriteError
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.execution import messages
from nerite.execution.call_desk import CallDesk
from nerite.execution.channel import Channel
from nerite.execution.nursery import WorkerProcess
from nerite.execution.runner import Batch, Done, Part, Runner
from nerite.execution.worker_plan import WorkerPlan
from nerite.scheduling.backoff import Backoff

_log = logging.getLogger("nerite.execution")

CLOSE_PATIENCE = 10.0
"""Seconds that a model has for ``finalize`` before its worker is killed."""
EXIT_PATIENCE = 1.0
"""Seconds to wait for the news of how a worker ended, after its channel closed."""
READY_PATIENCE = 5.0
"""Seconds that a model has for ``is_ready``."""


class WorkerRunner:
    """One instance, in whatever worker it has at the moment."""

    def __init__(
        self,
        plan: WorkerPlan,
        process: WorkerProcess,
        channel: Channel,
        loop: asyncio.AbstractEventLoop,
        loader: Executor,
    ) -> None:
        """Take over a worker in which the model is loaded. For the loop's thread."""
        self.name = plan.instance.name
        self.ahead = False
        self.usable = True
        self.done: Done
        self.part: Part
        self.on_usable: Callable[[Runner], None]
        self.restarts = 0
        self.failure: NeriteError | None = None
        """Why the last attempt to make a new worker failed; None if it did not."""
        self._plan = plan
        self._loop = loop
        self._loader = loader
        self._backoff = Backoff()
        self._batch: Batch | None = None
        self._number = 0
        self._open: dict[int, Batch] = {}
        """Batches that have run, of which requests get their responses one by one."""
        self._due: dict[int, set[int]] = {}
        """Which requests of each of them have not had the last."""
        self._early: set[int] = set()
        """Which requests of the batch that runs have had it."""
        self._closed: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._install(process, channel)

    @property
    def pid(self) -> int:
        """The number of the worker's process."""
        return self._process.pid

    @property
    def busy(self) -> bool:
        """The worker has a batch, or a request whose responses come one by one."""
        return self._batch is not None or bool(self._open)

    def run(self, batch: Batch) -> None:
        """Send a batch to the worker."""
        self._batch = batch
        self._number = (self._number + 1) & 0xFFFFFFFF
        self._channel.execute(self._number, batch)

    def cancel(self, request: InferenceRequest) -> None:
        """Tell the worker, if it has the request, and cancel what the model asks of others for nobody."""
        number = self._tell(messages.CANCEL, request)
        if number is not None:
            self._desk.parent_cancelled(number)

    def pause(self, request: InferenceRequest, paused: bool) -> None:
        """Tell the worker, if it has the request."""
        self._tell(messages.PAUSE if paused else messages.RESUME, request)

    def calls(self) -> Sequence[InferenceRequest]:
        """Return the calls that the batch waits for."""
        return () if self._batch is None else self._desk.under_way(self._number)

    def calls_for(self, request: InferenceRequest) -> Sequence[InferenceRequest] | None:
        """Return the calls that the batch of ``request`` waits for, None if the worker does not have it."""
        place = self._place(request)
        return None if place is None else self._desk.under_way(place[0])

    def is_ready(self, answered: Callable[[bool], None]) -> None:
        """Ask the model in the worker, for a limited time."""
        if not self.usable:
            answered(False)
            return
        pending = [answered]

        def answer(ready: bool) -> None:
            if pending:
                timer.cancel()
                pending.pop()(ready)

        timer = self._loop.call_later(READY_PATIENCE, answer, False)
        self._channel.request(messages.IS_READY, None, lambda value, error: answer(error is None and bool(value)))

    def memory(self) -> int:
        """Return how many bytes the worker has for itself now: 0 while there is none."""
        return self._process.memory if self.usable else 0

    def close(self, closed: Callable[[], None]) -> None:
        """Have the model finalized and the process ended; kill it if that takes too long."""
        self._closed = closed
        if self._timer is not None:
            self._timer.cancel()
        if not self.usable:
            self._finish_closing()
            return
        self._timer = self._loop.call_later(CLOSE_PATIENCE, self._process.kill)
        self._channel.request(messages.CLOSE, None, lambda _value, _error: None)

    def _install(self, process: WorkerProcess, channel: Channel) -> None:
        self._process = process
        self._channel = channel
        self._desk = CallDesk(self._plan.around.door, channel, self._batch_of)
        channel.attach(self._loop, self._result, self._part, self._ended, self._desk)

    def _result(self, number: int, responses: Sequence[InferenceResponse | None], marks: Marks) -> None:
        batch = self._batch
        assert batch is not None and number == self._number
        self._batch = None
        if None in responses:
            due = {index for index, response in enumerate(responses) if response is None} - self._early
            if due:
                self._open[number], self._due[number] = batch, due
        self._early.clear()
        self.done(self, batch, responses, marks)

    def _part(self, number: int, index: int, response: InferenceResponse, final: bool, marks: Marks) -> None:
        batch = self._batch_of(number)
        if batch is None or index >= len(batch):
            return
        self.part(batch[index], response, final, marks)
        if final:
            self._had_last(number, index)

    def _had_last(self, number: int, index: int) -> None:
        """Note that a request has had its last response; forget its batch, if that has run and no other is due."""
        due = self._due.get(number)
        if due is None:
            self._early.add(index)
            return
        due.discard(index)
        if not due:
            del self._open[number], self._due[number]

    def _tell(self, kind: int, request: InferenceRequest) -> int | None:
        """Tell the worker something of a request; return its batch, None if the worker does not have it."""
        place = self._place(request) if self.usable else None
        if place is None:
            return None
        number, index = place
        self._channel.tell(kind, number, index)
        return number

    def _batch_of(self, number: int) -> Batch | None:
        return self._batch if number == self._number and self._batch is not None else self._open.get(number)

    def _place(self, request: InferenceRequest) -> tuple[int, int] | None:
        """Return which batch has a request, and where in it; None if none has."""
        batches = list(self._open.items())
        if self._batch is not None:
            batches.append((self._number, self._batch))
        origin = request.origin
        # From the last: a request that runs again is in several.
        for number, batch in reversed(batches):
            for index, each in enumerate(batch):
                if each.origin is origin:
                    return number, index
        return None

    def _ended(self) -> None:
        """The channel is closed. Wait a moment for the news of how the process ended, then draw the conclusions."""
        self.usable = False
        self._desk.close()
        if self._process.exit_status is not None:
            self._bury()
            return
        self._process.on_exit = self._bury
        self._timer = self._loop.call_later(EXIT_PATIENCE, self._bury)

    def _bury(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._process.on_exit = None
        self._process.kill()
        self._channel.close()
        if self._closed is not None:
            self._finish_closing()
            return
        ending = self._process.ending
        batch, self._batch = self._batch, None
        unanswered = [self._open[number][index] for number, due in self._due.items() for index in sorted(due)]
        self._open.clear()
        self._due.clear()
        self._early.clear()
        _log.error(
            "worker '%s' (pid %d) died: %s; starting another",
            self.name,
            self._process.pid,
            ending,
            extra={"request_id": ids_of([*(batch or ()), *unanswered])},
        )
        self.on_usable(self)
        error = Internal(
            f"Stub process '{self.name}' is not healthy. The worker died while it ran this request: {ending}."
        )
        for request in unanswered:
            self.part(request, InferenceResponse.failed(error), True, None)
        if batch is not None:
            self.done(self, batch, [InferenceResponse.failed(error)] * len(batch), None)
        if self._closed is not None:  # it was to leave after this batch
            return
        self._timer = self._loop.call_later(self._backoff.failed(self._loop.time()), self._revive)

    def _revive(self) -> None:
        self._timer = None
        attempt = self._loop.run_in_executor(self._loader, self._make)
        attempt.add_done_callback(self._revived)

    def _make(self) -> tuple[WorkerProcess, Channel]:
        process, channel = self._plan.start()
        self._plan.load(process, channel)
        return process, channel

    def _revived(self, attempt: asyncio.Future[tuple[WorkerProcess, Channel]]) -> None:
        error: Any = attempt.exception()
        if error is not None:
            self.failure = error if isinstance(error, NeriteError) else Internal(str(error))
            if self._closed is not None:
                return
            pause = self._backoff.failed(self._loop.time())
            _log.error("no new worker for '%s': %s; next try in %.1f s", self.name, self.failure.message, pause)
            self.on_usable(self)
            self._timer = self._loop.call_later(pause, self._revive)
            return
        process, channel = attempt.result()
        if self._closed is not None:
            channel.close()
            process.kill()
            return
        self._install(process, channel)
        self.restarts += 1
        self.failure = None
        self.usable = True
        _log.warning("worker '%s' runs again (pid %d)", self.name, process.pid)
        self.on_usable(self)

    def _finish_closing(self) -> None:
        closed, self._closed = self._closed, lambda: None
        if closed is not None:
            closed()
