"""Between the queue of a model and its instances: what the roster decides is done here.

Requests that arrive together run together: the first of them schedules one look at the queue after everything that the
sockets had for this turn of the loop was read. An instance that finishes gets its next batch before the answers of the
last one are sent, so that it works while we write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from nerite.core.errors import Cancelled, InvalidArgument, NeriteError, Unavailable
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest, labelled
from nerite.core.response import InferenceResponse
from nerite.core.witness import Witness
from nerite.execution.alarm import Alarm
from nerite.execution.answers import Answers
from nerite.execution.roster import Roster
from nerite.execution.runner import Batch, Done, Part, Runner
from nerite.execution.sentry import Sentry
from nerite.execution.waits import relieve
from nerite.observability.statistics import Outcome, VersionStatistics
from nerite.scheduling.admission import Admission
from nerite.scheduling.release import Release

_now = time.monotonic_ns


class Dispatcher:
    """One model version's queue, instances and timers. For the loop's thread only."""

    def __init__(
        self,
        roster: Roster,
        runners: Sequence[Runner],
        statistics: VersionStatistics,
        loop: asyncio.AbstractEventLoop,
        sentry: Sentry,
        admission: Admission,
        *,
        preserve_ordering: bool = False,
    ) -> None:
        self._roster = roster
        self._admission = admission
        self._runners: list[Runner] = []
        self._statistics = statistics
        self._loop = loop
        self._stir = sentry.stir
        self._soon = sentry.soon
        self._leaving: dict[Runner, Callable[[Runner], None]] = {}
        self._busy = 0
        self._granted = 0
        """Requests that may be let in before ``admission`` is asked again."""
        self._through = 0
        """Requests that an instance was given and is through with: they do not come back to the queue."""
        self._looking = False
        self._enough = False
        """What waits now has to wait for the next turn of the loop: a batch that ran on the loop is to run again."""
        self._timed = roster.timed
        self._settles = roster.settles
        self._alarm = Alarm(loop, self._wake)
        """Rings when the decider wants to be asked again."""
        self._answers = Answers(statistics, self._pause, preserve_ordering=preserve_ordering)
        self._on_cancel = self._cancelled
        self._on_done: Done = self._done
        self._on_part: Part = self._part
        self._on_drained: list[Callable[[], None]] = []
        self.on_usable: Callable[[], None] = _nothing
        """Called when an instance came or left, went down, came up, or failed to come up."""
        for runner in runners:
            self._adopt(runner)

    @property
    def pending(self) -> int:
        """Requests that wait for an instance."""
        return self._roster.size

    @property
    def able(self) -> bool:
        """Whether requests come to an end: an instance can run them, or none can be started and they are refused."""
        runners = self._runners
        return any(each.usable for each in runners) or all(each.failure is not None for each in runners)

    @property
    def waiting(self) -> Mapping[int, int]:
        """Those of them in each priority."""
        return self._roster.waiting

    @property
    def releases(self) -> Mapping[Release, int]:
        """Why batches began, and how often."""
        return self._roster.releases

    @property
    def in_flight(self) -> int:
        """Requests that wait, run, or have not had their last response."""
        return self._roster.size + self._busy + len(self._answers.open)

    def submit(self, request: InferenceRequest) -> None:
        """Queue a request; its answer comes through ``request.respond``."""
        now = _now()
        roster = self._roster
        self._granted -= 1
        if self._granted < 0 and not self._let_in(request, now):
            return
        refusal = roster.offer(request, now)
        if refusal is not None:
            if not isinstance(refusal, InvalidArgument):  # what is the caller's own mistake counts nowhere
                self._statistics.failed(Outcome.REJECTED, request.arrived_ns)
            request.respond(InferenceResponse.failed(refusal))
            return
        request.on_cancel = self._on_cancel
        if (roster.idle or roster.ahead) and not self._looking:
            self._looking = True
            self._soon(self._turn)
        elif not roster.idle:
            if not self._busy:
                self._fail_hopeless()
            elif request.caused:
                relieve(request)
        if self._timed:
            self._alarm.set(roster.wake_at())

    def _let_in(self, request: InferenceRequest, now: int) -> bool:
        """Return whether a request may wait. If there are too many, one is refused: it, or one that matters less.

        What another request needs to go on is not refused: its caller was let in.
        """
        admission = self._admission
        granted = admission.grant(self._roster.size, self._through, now)
        self._granted = max(granted - 1, 0)
        if granted or request.caused:
            return True
        least = self._roster.give_way(request)
        if least is not None:
            self._answers.refuse(least, labelled(admission.refusal(), least.id), Outcome.REJECTED)
        return least is not request

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return the calls to other models of which one must be answered before ``request``, which is here, can be.

        None of them if an instance is free, or will be so by itself.
        """
        for runner in self._runners:
            if (calls := runner.calls_for(request)) is not None:
                return calls
        if self._roster.idle:
            return ()
        awaited: list[InferenceRequest] = []
        for runner in self._runners:
            if runner not in self._leaving:
                calls = runner.calls()
                if not calls:
                    return ()
                awaited += calls
        return awaited

    def begun(self, request: InferenceRequest) -> bool:
        """Return whether an instance has ``request``, which is here."""
        return any(runner.calls_for(request) is not None for runner in self._runners)

    def add(self, runner: Runner) -> None:
        """Have one more instance."""
        self._adopt(runner)
        self.on_usable()
        self._turn()

    def remove(self, runner: Runner, left: Callable[[Runner], None]) -> None:
        """Begin nothing new with an instance; ``left`` is called once it has nothing under way."""
        self._roster.retire(runner)
        self._leaving[runner] = left
        self._see_off()

    def _adopt(self, runner: Runner) -> None:
        runner.done = self._on_done
        runner.part = self._on_part
        runner.traced = self._on_part == self._witnessed_part
        runner.on_usable = self._usable
        self._runners.append(runner)
        if runner.usable:  # a worker may have died as soon as it was there
            self._roster.came(runner)

    def _see_off(self) -> None:
        """Let go of the instances that leave and are done."""
        for runner in [runner for runner in self._leaving if not runner.busy and not self._roster.holds(runner)]:
            self._runners.remove(runner)
            self._roster.gone(runner)
            self._leaving.pop(runner)(runner)
            self.on_usable()
        if not self._runners:
            self._fail_hopeless()

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once nothing waits or runs any more: at once, if so now. No more requests come."""
        self._roster.finish()
        # What waited for those that are over now may begin.
        self._loop.call_soon(self._turn)
        if self.in_flight:
            self._on_drained.append(call)
        else:
            call()

    def server_stops(self) -> None:
        """Refuse what waits for something that does not come any more."""
        self._roster.server_stops()
        self._loop.call_soon(self._turn)

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that waits with ``error``. What runs, runs on."""
        for request in self._roster.drain():
            self._answers.refuse(request, error, Outcome.OTHER)
        self._check_drained()

    def tell_witnesses(self) -> None:
        """Tell sinks that are a ``Witness`` how their requests ran, from now on. Until then nobody looks for any."""
        self._on_done, self._on_part = self._witnessed_done, self._witnessed_part
        for runner in self._runners:
            runner.done, runner.part, runner.traced = self._on_done, self._on_part, True

    def _witnessed_done(
        self, runner: Runner, batch: Batch, responses: Sequence[InferenceResponse | None], marks: Marks | None
    ) -> None:
        if marks is not None:
            marks.requests = len(batch)
        for request, response in zip(batch, responses, strict=True):
            if isinstance(request.sink, Witness):
                again = response is not None and response.again
                (request.sink.turned if again else request.sink.ran)(request, marks)
        self._done(runner, batch, responses, marks)

    def _witnessed_part(
        self, request: InferenceRequest, response: InferenceResponse, final: bool, marks: Marks | None
    ) -> None:
        if isinstance(request.sink, Witness):
            request.sink.parted(request, marks)
        self._part(request, response, final, marks)

    def _turn(self) -> None:
        """Look at the queue, as was arranged."""
        self._look()
        if self._leaving:
            self._see_off()
        self._stir(self._busy > 0)
        self._check_drained()

    def _look(self) -> None:
        """Give batches to instances for as long as the roster says so."""
        self._looking = True
        self._enough = False
        while not self._enough:
            now = _now()
            if self._timed:
                self._expire(now)
            chosen = self._roster.choose(now)
            if chosen is None:
                break
            self._start(*chosen)
        self._looking = False
        if self._enough:
            self.look_soon()
        self._alarm.set(self._roster.wake_at())

    def _start(self, runner: Runner, batch: Batch) -> None:
        self._answers.begin(batch)
        self._busy += len(batch)
        runner.run(batch)

    def _done(
        self, runner: Runner, batch: Batch, responses: Sequence[InferenceResponse | None], marks: Marks | None
    ) -> None:
        """An instance has finished: start its next batch, then pass the answers on."""
        self._busy -= len(batch)
        took_ns = marks.ended_ns - marks.started_ns if marks is not None else 0
        waiting = self._roster.size
        batch, responses, apart = self._roster.ended(runner, batch, responses, took_ns)
        self._through += len(batch)
        for request in apart:
            if request.cancelled:  # meanwhile, and the model wants it once more
                self._drop(request)
        self._enough = self._looking and self._roster.size > waiting
        if self._leaving:
            self._loop.call_soon(self._see_off)
        if not self._looking:
            self._look()
        self._answers.returned(batch, responses, marks, apart)
        if not self._looking:
            self._stir(self._busy > 0)
        self._check_drained()

    def _part(self, request: InferenceRequest, response: InferenceResponse, final: bool, marks: Marks | None) -> None:
        """One of several responses to a request is here."""
        if self._settles:
            settled = self._roster.settle(request, response)
            if settled is None or (settled.empty and not final):
                return
            response = settled
        self._answers.part(request, response, final, marks)
        if final:
            if self._leaving:
                self._loop.call_soon(self._see_off)
            self._check_drained()

    def _usable(self, runner: Runner) -> None:
        """An instance went down, came up, or failed to come up."""
        self.on_usable()
        if not runner.usable:
            for request, error in self._roster.gone(runner):
                self._answers.refuse(request, error, Outcome.OTHER)
            self._check_drained()
            # What it was to run may be for another one now.
            self.look_soon()
        if runner in self._leaving:
            self._loop.call_soon(self._see_off)
            return
        if runner.usable:
            self._roster.came(runner)
            self._turn()
        if not self._roster.idle and not self._busy:
            self._fail_hopeless()

    def _fail_hopeless(self) -> None:
        """Answer everything that waits, if no instance can be brought up: nobody may wait for ever."""
        failures = [failure for runner in self._runners if (failure := runner.failure) is not None]
        if not self._runners:
            self.abandon(Unavailable("all instances of the model are passive: none of them takes requests"))
        elif len(failures) == len(self._runners):
            self.abandon(Unavailable(f"no instance of the model can be started: {failures[0].message}"))

    def _expire(self, now: int) -> None:
        for request, error in self._roster.expire(now):
            self._answers.refuse(request, error, Outcome.TIMED_OUT)

    def _cancelled(self, request: InferenceRequest) -> None:
        dropped = self._drop(request)
        if request not in dropped:
            for runner in self._runners:
                runner.cancel(request)
        if not dropped:
            return
        self._check_drained()
        # What is left may be a batch that need not wait.
        self.look_soon()

    def _drop(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Answer what waits no more because ``request`` was cancelled, and return it."""
        withdrawn = self._roster.withdraw(request)
        for each in withdrawn:
            self._answers.refuse(each, Cancelled(""), Outcome.CANCELED)
        return withdrawn

    def look_soon(self) -> None:
        """Look at the queue in the next turn of the loop, if an instance is idle."""
        if self._roster.idle and not self._looking:
            self._looking = True
            self._soon(self._turn)

    def _pause(self, request: InferenceRequest, paused: bool) -> None:
        for runner in self._runners:
            runner.pause(request, paused)
        if not paused:
            self._roster.resume(request)
            self.look_soon()

    def _check_drained(self) -> None:
        """Tell those who wait for the end, if it has come. Only where every answer due by now has left."""
        if self._on_drained and not self.in_flight:
            waiting, self._on_drained = self._on_drained, []
            for call in waiting:
                call()

    def _wake(self) -> None:
        self._expire(_now())
        self._turn()


def _nothing() -> None:
    """Tell nobody."""
