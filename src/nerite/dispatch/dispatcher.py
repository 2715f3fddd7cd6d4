"""Between the queue of a model and its instances: what the roster decides is done here.

Requests that arrive together run together: the first of them schedules one look at the queue after everything that the
sockets had for this turn of the loop was read. An instance that finishes gets its next batch before the answers of the
last one are sent, so that it works while we write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from nerite.core.errors import Cancelled, Internal, InvalidArgument, NeriteError, Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.failures import report
from nerite.core.request import NOBODY, InferenceRequest, with_request_id
from nerite.core.response import InferenceResponse
from nerite.dispatch import answers
from nerite.dispatch.answers import ResponseDispatcher
from nerite.dispatch.busy_poll import BusyPoll, LoopTimer
from nerite.dispatch.deadlocks import break_deadlocks
from nerite.dispatch.instance_picker import BatchSplit, Leases, unanswered
from nerite.dispatch.interface import InstancePicker
from nerite.instances.instance import Batch, Done, ModelInstance, Part
from nerite.observability.statistics import RequestOutcome, VersionStatistics
from nerite.scheduling.decider import BatchReason
from nerite.scheduling.load_shedding import LoadShedder

_now = time.monotonic_ns
_OVERDUE_NS: Final = 500_000_000
"""What is late by this is not late by chance."""


class Dispatcher:
    """One model version's queue, instances and timers. For the loop's thread only."""

    # Slots, as an object with more than thirty attributes is slow to read in CPython 3.11.
    __slots__ = (
        "_admission", "_alarm", "_answers", "_busy", "_enough", "_granted", "_leases", "_leaving", "_looking",
        "_loop", "_name", "_on_cancel", "_on_done", "_on_drained", "_on_part", "_renewed_ns", "_roster", "_runners",
        "_settles", "_soon", "_splits", "_stalled", "_started", "_statistics", "_stir", "_through", "_timed",
        "_unlisted", "on_usable", "sound",
    )  # fmt: skip

    def __init__(
        self,
        roster: InstancePicker,
        runners: Sequence[ModelInstance],
        statistics: VersionStatistics,
        loop: asyncio.AbstractEventLoop,
        sentry: BusyPoll,
        admission: LoadShedder,
        *,
        preserve_ordering: bool = False,
    ) -> None:
        self._name = admission.model
        self._roster = roster
        self._admission = admission
        self._runners: list[ModelInstance] = []
        self._statistics = statistics
        self._loop = loop
        self._stir = sentry.stir
        self._soon = sentry.soon
        self._leaving: dict[ModelInstance, Callable[[ModelInstance], None]] = {}
        self._busy = 0
        """Requests that instances have, in batches that are out."""
        self._started = 0
        """Batches that were handed to instances, ever."""
        self._stalled = (-1, 0)
        """``_started`` when an audit found requests beside an idle instance, and when that was; -1: it found none."""
        self.sound = True
        """The last audit found nothing to restore."""
        self._leases = Leases()
        self._splits: dict[int, BatchSplit] = {}
        """By the identity of the batch that runs now, the batch that it is a part of."""
        self._renewed_ns = 0
        """When the roster was replaced; what has waited since before that is in none."""
        self._unlisted: set[ModelInstance] = set()
        """Instances that were at work when the roster was replaced: it learns of each when its batch is back."""
        self._granted = 0
        """Requests that may be let in before ``admission`` is asked again."""
        self._through = 0
        """Requests that an instance was given and is through with: they do not come back to the queue."""
        self._looking = False
        """A look at the queue is under way, or arranged for this turn of the loop."""
        self._enough = False
        """What waits now has to wait for the next turn of the loop: a batch that ran on the loop is to run again."""
        self._timed, self._settles = roster.timed, roster.settles
        self._alarm = LoopTimer(loop, self._turn)
        """Rings when the decider wants to be asked again."""
        self._answers = ResponseDispatcher(statistics, self._pause, preserve_ordering=preserve_ordering)
        self._on_cancel = self._cancelled
        self._on_done: Done = self._done
        self._on_part: Part = self._part
        self._on_drained: list[Callable[[], None]] = []
        self.on_usable: Callable[[], object] = tuple
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
        return any(each.usable for each in self._runners) or all(each.failure is not None for each in self._runners)

    @property
    def waiting(self) -> Mapping[int, int]:
        """Those of them in each priority."""
        return self._roster.waiting

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Why batches began, and how often."""
        return self._roster.releases

    @property
    def in_flight(self) -> int:
        """Requests that wait, run, or have not had their last response."""
        return self._answers.entered

    def submit(self, request: InferenceRequest) -> None:
        """Queue a request; its answer comes through ``request.respond``."""
        now = _now()
        roster = self._roster
        self._granted -= 1
        if self._granted < 0 and not self._let_in(request, now):
            return
        try:
            refusal = roster.offer(request, now)
        except Exception as error:
            request.respond(InferenceResponse.failed(self._replace_roster(error)))
            return
        if refusal is not None:
            if not isinstance(refusal, InvalidArgument):  # what is the caller's own mistake counts nowhere
                self._statistics.failed(RequestOutcome.REJECTED, request.arrived_ns)
            request.respond(InferenceResponse.failed(refusal))
            return
        self._answers.entered += 1
        request.on_cancel = self._on_cancel
        if (roster.idle or roster.ahead) and not self._looking:
            self._looking = True
            self._soon(self._turn)
        elif not roster.idle:
            if not self._busy:
                self._fail_hopeless()
            elif request.caused:
                break_deadlocks(request)
        if self._timed:
            self._guarded(self._set_alarm)

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
        if least is request:
            self._statistics.failed(RequestOutcome.REJECTED, request.arrived_ns)
            request.respond(InferenceResponse.failed(with_request_id(admission.refusal(), request.id)))
        elif least is not None:
            self._answers.refuse(least, with_request_id(admission.refusal(), least.id), RequestOutcome.REJECTED)
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

    def add(self, runner: ModelInstance) -> None:
        """Have one more instance."""
        self._adopt(runner)
        self.on_usable()
        self._turn()

    def remove(self, runner: ModelInstance, left: Callable[[ModelInstance], None]) -> None:
        """Begin nothing new with an instance; ``left`` is called once it has nothing under way."""
        self._roster.retire(runner)
        self._leaving[runner] = left
        self._see_off()

    def _adopt(self, runner: ModelInstance) -> None:
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
        self._guarded(self._roster.finish)
        # What waited for those that are over now may begin.
        self._loop.call_soon(self._turn)
        if self.in_flight:
            self._on_drained.append(call)
        else:
            call()

    def server_stops(self) -> None:
        """Refuse what waits for something that does not come any more."""
        self._guarded(self._roster.server_stops)
        self._loop.call_soon(self._turn)

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that waits with ``error``. What runs, runs on."""
        try:
            for request in self._roster.drain():
                self._answers.refuse(request, error, RequestOutcome.OTHER)
        except Exception as failure:
            self._replace_roster(failure)
        self._check_drained()

    def tell_witnesses(self) -> None:
        """Tell sinks that are a ``Witness`` how their requests ran, from now on. Until then nobody looks for any."""
        self._on_done, self._on_part = self._witnessed_done, self._witnessed_part
        for runner in self._runners:
            runner.done, runner.part, runner.traced = self._on_done, self._on_part, True

    def _witnessed_done(
        self,
        runner: ModelInstance,
        batch: Batch,
        responses: Sequence[InferenceResponse | None],
        marks: ExecutionTimes | None,
    ) -> None:
        answers.tell_of_batch(batch, responses, marks)
        self._done(runner, batch, responses, marks)

    def _witnessed_part(
        self, request: InferenceRequest, response: InferenceResponse, final: bool, marks: ExecutionTimes | None
    ) -> None:
        answers.tell_of_response(request, marks)
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
        try:
            while not self._enough:
                now = _now()
                if self._timed:
                    self._expire(now)
                chosen = self._roster.choose(now)
                if chosen is None:
                    break
                self._start(*chosen)
            wake_at = self._roster.wake_at()
        except Exception as error:
            self._looking = False
            self._replace_roster(error)
            return
        self._looking = False
        if self._enough:
            self.look_soon()
        self._alarm.set(wake_at)

    def _start(self, runner: ModelInstance, batch: Batch) -> None:
        """Hand a batch to an instance. If that fails the batch is back when this returns."""
        self._answers.begin(batch)
        self._busy += len(batch)
        self._started += 1
        self._leases[id(batch)] = runner, batch
        try:
            runner.run(batch)
        except Exception as error:
            self._not_taken(runner, batch, error)

    def _not_taken(self, runner: ModelInstance, batch: Batch, error: Exception) -> None:
        """Run the requests of a batch that an instance could not take one by one; fail the one that it cannot take."""
        if id(batch) not in self._leases:  # it ran, and what was done with the answers failed
            report("dispatcher", error, f"of instance '{runner.name}'")
            return
        if len(batch) == 1:
            failure = report("dispatcher", error, f"of instance '{runner.name}'", batch[0].id)
            self._on_done(runner, batch, [InferenceResponse.failed(failure)], None)
            return
        del self._leases[id(batch)]
        self._run_next(runner, BatchSplit(batch))

    def _run_next(self, runner: ModelInstance, split: BatchSplit) -> None:
        """Hand over the requests of a batch that runs one by one, until the instance is at work or the batch is back.

        A loop, and not one call in the other: an instance may answer before ``run`` returns.
        """
        split.looping = True
        while (index := split.next()) is not None:
            alone = self._roster.alone(split.batch, index)
            self._splits[id(alone)] = split
            self._leases[id(alone)] = runner, alone
            try:
                runner.run(alone)
            except Exception as error:
                failure = report("dispatcher", error, f"of instance '{runner.name}'", split.batch[index].id)
                if id(alone) in self._leases:
                    self._on_done(runner, alone, [InferenceResponse.failed(failure)] * len(alone), None)
            if split.awaited is not None:
                split.looping = False
                return
        self._leases[id(split.batch)] = runner, split.batch
        self._done(runner, split.batch, split.responses, split.marks)

    def _done(
        self,
        runner: ModelInstance,
        batch: Batch,
        responses: Sequence[InferenceResponse | None],
        marks: ExecutionTimes | None,
    ) -> None:
        """An instance has finished: start its next batch, then pass the answers on."""
        if self._leases.pop(id(batch), None) is None:
            report("dispatcher", RuntimeError("a batch came back that was not out"), f"of instance '{runner.name}'")
            return
        if self._splits and (split := self._splits.pop(id(batch), None)) is not None:
            split.answered(batch, responses, marks)
            if not split.looping:
                self._run_next(runner, split)
            return
        self._busy -= len(batch)
        took_ns = marks.ended_ns - marks.started_ns if marks is not None else 0
        waiting = self._roster.size
        apart: Sequence[InferenceRequest] = ()
        if runner in self._unlisted:
            responses = self._listed(runner, responses)
        else:
            try:
                batch, responses, apart = self._roster.ended(runner, batch, responses, took_ns)
            except Exception as error:
                self._unlisted.add(runner)
                self._replace_roster(error)
                responses = self._listed(runner, responses)
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

    def _replace_roster(self, error: Exception) -> NeriteError:
        """Go on with an empty roster after an exception in the one that there was, whose state cannot be trusted.

        What waits is answered with the error that is returned; the next audit finds what the roster has lost. What
        runs, runs on.
        """
        failure = report("dispatcher", error, f"of model '{self._name}'")
        before, self._roster = self._roster, self._roster.renewed()
        self._renewed_ns = _now()
        for runner in self._runners:
            if self._leases.holds(runner):
                self._unlisted.add(runner)
            elif runner.usable and runner not in self._leaving and runner not in self._unlisted:
                self._came_back(runner)
        try:
            for request in before.drain():
                if request.on_cancel is self._on_cancel:  # else it was just offered, or is cancelled and answered
                    self._answers.refuse(request, failure, RequestOutcome.OTHER)
        except Exception as another:
            report("dispatcher", another, f"of model '{self._name}'")
        self._alarm.set(None)
        self._check_drained()
        return failure

    def audit(self) -> list[str]:
        """Compare what instances were given with what they have, restore what differs, and return what that was.

        Called from the loop about once a second. Every batch is checked when it comes back, too; this finds what never
        does: it stands for mistakes that nothing else has caught.
        """
        found: list[str] = []
        lost = InferenceResponse.failed(Internal("the request was lost in the server, see its log: send it again"))
        for runner, batch in self._leases.lost():
            found.append(f"instance '{runner.name}' has lost a batch of {len(batch)} requests")
            self._on_done(runner, batch, [lost] * len(batch), None)
        idle = self._roster.idle
        for runner in self._runners:
            if runner.usable and runner not in idle and runner not in self._leaving and not self._leases.holds(runner):
                found.append(f"instance '{runner.name}' was neither idle nor at work")
                self._unlisted.discard(runner)
                self._guarded(self._gone, runner)
                self._guarded(self._roster.came, runner)
        running = self._running()
        known = self._roster.size + len(running | self._answers.open)
        if self._answers.entered != known:
            known_ones = running | self._answers.open
            missing = [each for each in unanswered(self._on_cancel, self._renewed_ns) if each not in known_ones]
            found.append(f"{self._answers.entered - known} requests neither waited nor ran")
            for request in missing:
                request.respond(lost)
            self._answers.entered = known
            self._check_drained()
        waiting = self._roster.size
        if self._stalls():
            found.append(f"{waiting} requests waited beside an idle instance")
        self.sound = not found
        if found:
            self._turn()
        return [f"model '{self._name}': {what}" for what in found]

    def _stalls(self) -> bool:
        """Return whether requests that could have run have waited since the last audit; if so, they run now."""
        roster, now = self._roster, _now()
        wake_at = roster.wake_at()
        if not roster.size or not roster.idle or (wake_at is not None and wake_at > now - _OVERDUE_NS):
            self._stalled = (-1, 0)
            return False
        started, since = self._stalled
        if started != self._started:
            self._stalled = (self._started, now)
            return False
        if now - since < _OVERDUE_NS:
            return False
        self._turn()
        return self._started != started

    def _running(self) -> set[InferenceRequest]:
        """Return the requests of all batches that are out, without those that only fill a slot."""
        batches = (*self._leases.batches(), *(split.batch for split in self._splits.values()))
        return {request for batch in batches for request in batch if request.sink is not NOBODY}

    def _set_alarm(self) -> None:
        self._alarm.set(self._roster.wake_at())

    def _guarded(self, tell: Callable[..., object], *arguments: object) -> None:
        """Tell the roster something; replace it if that raises."""
        try:
            tell(*arguments)
        except Exception as error:
            self._replace_roster(error)

    def _came_back(self, runner: ModelInstance) -> None:
        """Make an idle instance known to a new roster. If that fails the next audit does it."""
        try:
            self._roster.came(runner)
        except Exception as error:
            report("dispatcher", error, f"of instance '{runner.name}'")

    def _listed(
        self, runner: ModelInstance, responses: Sequence[InferenceResponse | None]
    ) -> Sequence[InferenceResponse | None]:
        """Make an instance known to the roster that replaced the one its batch was of; return the answers to that."""
        if not self._leases.holds(runner):
            self._unlisted.discard(runner)
            if runner.usable and runner not in self._leaving:
                self._came_back(runner)
        lost = InferenceResponse.failed(Internal("the request was to run again, and the server has lost its state"))
        return [lost if response is not None and response.again else response for response in responses]

    def _part(
        self, request: InferenceRequest, response: InferenceResponse, final: bool, marks: ExecutionTimes | None
    ) -> None:
        """One of several responses to a request is here."""
        if self._settles:
            try:
                settled = self._roster.settle(request, response)
            except Exception as error:
                settled = InferenceResponse.failed(report("dispatcher", error, f"of model '{self._name}'", request.id))
            if settled is None or (settled.empty and not final):
                return
            response = settled
        self._answers.part(request, response, final, marks)
        if final:
            if self._leaving:
                self._loop.call_soon(self._see_off)
            self._check_drained()

    def _usable(self, runner: ModelInstance) -> None:
        """An instance went down, came up, or failed to come up."""
        self.on_usable()
        if not runner.usable:
            self._guarded(self._gone, runner)
            self._check_drained()
            # What it was to run may be for another one now.
            self.look_soon()
        if runner in self._leaving:
            self._loop.call_soon(self._see_off)
            return
        if runner.usable:
            self._guarded(self._roster.came, runner)
            self._turn()
        if not self._roster.idle and not self._busy:
            self._fail_hopeless()

    def _gone(self, runner: ModelInstance) -> None:
        """Refuse what only ``runner``, which is down, could have run."""
        for request, error in self._roster.gone(runner):
            self._answers.refuse(request, error, RequestOutcome.OTHER)

    def _fail_hopeless(self) -> None:
        """Answer everything that waits, if no instance can be brought up: nobody may wait for ever."""
        failures = [failure for runner in self._runners if (failure := runner.failure) is not None]
        if not self._runners:
            self.abandon(Unavailable("all instances of the model are passive: none of them takes requests"))
        elif len(failures) == len(self._runners):
            self.abandon(Unavailable(f"no instance of the model can be started: {failures[0].message}"))

    def _expire(self, now: int) -> None:
        for request, error in self._roster.expire(now):
            self._answers.refuse(request, error, RequestOutcome.TIMED_OUT)

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
        withdrawn: Sequence[InferenceRequest]
        try:
            if request.queue is not None and request.queued_ns < self._renewed_ns:  # in the queue of a former roster
                request.queue, withdrawn = None, (request,)
            else:
                withdrawn = self._roster.withdraw(request)
        except Exception as error:
            self._replace_roster(error)
            return ()
        for each in withdrawn:
            self._answers.refuse(each, Cancelled(""), RequestOutcome.CANCELED)
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
            self._guarded(self._roster.resume, request)
            self.look_soon()

    def _check_drained(self) -> None:
        """Tell those who wait for the end, if it has come. Only where every answer due by now has left."""
        if self._on_drained and not self.in_flight:
            waiting, self._on_drained = self._on_drained, []
            for call in waiting:
                call()
