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
        "_admission",
        "_alarm",
        "_answers",
        "_busy",
        "_enough",
        "_granted",
        "_instances",
        "_leases",
        "_leaving",
        "_looking",
        "_loop",
        "_name",
        "_on_cancel",
        "_on_done",
        "_on_drained",
        "_on_part",
        "_picker",
        "_renewed_ns",
        "_settles",
        "_soon",
        "_splits",
        "_stalled",
        "_started",
        "_statistics",
        "_stir",
        "_through",
        "_timed",
        "_unlisted",
        "on_usable",
        "sound",
    )  # fmt: skip

    def __init__(
        self,
        picker: InstancePicker,
        instances: Sequence[ModelInstance],
        statistics: VersionStatistics,
        loop: asyncio.AbstractEventLoop,
        busy_poll: BusyPoll,
        admission: LoadShedder,
        *,
        preserve_ordering: bool = False,
    ) -> None:
        self._name = admission.model
        self._picker = picker
        self._admission = admission
        self._instances: list[ModelInstance] = []
        self._statistics = statistics
        self._loop = loop
        self._stir = busy_poll.stir
        self._soon = busy_poll.soon
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
        self._timed, self._settles = picker.timed, picker.settles
        self._alarm = LoopTimer(loop, self._turn)
        """Rings when the decider wants to be asked again."""
        self._answers = ResponseDispatcher(statistics, self._pause, preserve_ordering=preserve_ordering)
        self._on_cancel = self._cancelled
        self._on_done: Done = self._done
        self._on_part: Part = self._part
        self._on_drained: list[Callable[[], None]] = []
        self.on_usable: Callable[[], object] = tuple
        """Called when an instance came or left, went down, came up, or failed to come up."""
        for instance in instances:
            self._adopt(instance)

    @property
    def pending(self) -> int:
        """Requests that wait for an instance."""
        return self._picker.size

    @property
    def able(self) -> bool:
        """Whether requests come to an end: an instance can run them, or none can be started and they are refused."""
        return any(each.usable for each in self._instances) or all(each.failure is not None for each in self._instances)

    @property
    def waiting(self) -> Mapping[int, int]:
        """Those of them in each priority."""
        return self._picker.waiting

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Why batches began, and how often."""
        return self._picker.releases

    @property
    def in_flight(self) -> int:
        """Requests that wait, run, or have not had their last response."""
        return self._answers.entered

    def submit(self, request: InferenceRequest) -> None:
        """Queue a request; its answer comes through ``request.respond``."""
        now = _now()
        picker = self._picker
        self._granted -= 1
        if self._granted < 0 and not self._let_in(request, now):
            return
        try:
            refusal = picker.offer(request, now)
        except Exception as error:
            request.respond(InferenceResponse.failed(self._replace_picker(error)))
            return
        if refusal is not None:
            if not isinstance(refusal, InvalidArgument):  # what is the caller's own mistake counts nowhere
                self._statistics.failed(RequestOutcome.REJECTED, request.arrived_ns)
            request.respond(InferenceResponse.failed(refusal))
            return
        self._answers.entered += 1
        request.on_cancel = self._on_cancel
        if (picker.idle or picker.ahead) and not self._looking:
            self._looking = True
            self._soon(self._turn)
        elif not picker.idle:
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
        granted = admission.grant(self._picker.size, self._through, now)
        self._granted = max(granted - 1, 0)
        if granted or request.caused:
            return True
        least = self._picker.give_way(request)
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
        for instance in self._instances:
            if (calls := instance.calls_for(request)) is not None:
                return calls
        if self._picker.idle:
            return ()
        awaited: list[InferenceRequest] = []
        for instance in self._instances:
            if instance not in self._leaving:
                calls = instance.calls()
                if not calls:
                    return ()
                awaited += calls
        return awaited

    def begun(self, request: InferenceRequest) -> bool:
        """Return whether an instance has ``request``, which is here."""
        return any(instance.calls_for(request) is not None for instance in self._instances)

    def add(self, instance: ModelInstance) -> None:
        """Have one more instance."""
        self._adopt(instance)
        self.on_usable()
        self._turn()

    def remove(self, instance: ModelInstance, left: Callable[[ModelInstance], None]) -> None:
        """Begin nothing new with an instance; ``left`` is called once it has nothing under way."""
        self._picker.retire(instance)
        self._leaving[instance] = left
        self._see_off()

    def _adopt(self, instance: ModelInstance) -> None:
        instance.done = self._on_done
        instance.part = self._on_part
        instance.traced = self._on_part == self._witnessed_part
        instance.on_usable = self._usable
        self._instances.append(instance)
        if instance.usable:  # a worker may have died as soon as it was there
            self._picker.came(instance)

    def _see_off(self) -> None:
        """Let go of the instances that leave and are done."""
        for instance in [
            instance for instance in self._leaving if not instance.busy and not self._picker.holds(instance)
        ]:
            self._instances.remove(instance)
            self._picker.gone(instance)
            self._leaving.pop(instance)(instance)
            self.on_usable()
        if not self._instances:
            self._fail_hopeless()

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once nothing waits or runs any more: at once, if so now. No more requests come."""
        self._guarded(self._picker.finish)
        # What waited for those that are over now may begin.
        self._loop.call_soon(self._turn)
        if self.in_flight:
            self._on_drained.append(call)
        else:
            call()

    def server_stops(self) -> None:
        """Refuse what waits for something that does not come any more."""
        self._guarded(self._picker.server_stops)
        self._loop.call_soon(self._turn)

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that waits with ``error``. What runs, runs on."""
        try:
            for request in self._picker.drain():
                self._answers.refuse(request, error, RequestOutcome.OTHER)
        except Exception as failure:
            self._replace_picker(failure)
        self._check_drained()

    def tell_witnesses(self) -> None:
        """Tell sinks that are a ``Witness`` how their requests ran, from now on. Until then nobody looks for any."""
        self._on_done, self._on_part = self._witnessed_done, self._witnessed_part
        for instance in self._instances:
            instance.done, instance.part, instance.traced = self._on_done, self._on_part, True

    def _witnessed_done(
        self,
        instance: ModelInstance,
        batch: Batch,
        responses: Sequence[InferenceResponse | None],
        timings: ExecutionTimes | None,
    ) -> None:
        answers.tell_of_batch(batch, responses, timings)
        self._done(instance, batch, responses, timings)

    def _witnessed_part(
        self, request: InferenceRequest, response: InferenceResponse, final: bool, timings: ExecutionTimes | None
    ) -> None:
        answers.tell_of_response(request, timings)
        self._part(request, response, final, timings)

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
                chosen = self._picker.choose(now)
                if chosen is None:
                    break
                self._start(*chosen)
            wake_at = self._picker.wake_at()
        except Exception as error:
            self._looking = False
            self._replace_picker(error)
            return
        self._looking = False
        if self._enough:
            self.look_soon()
        self._alarm.set(wake_at)

    def _start(self, instance: ModelInstance, batch: Batch) -> None:
        """Hand a batch to an instance. If that fails the batch is back when this returns."""
        self._answers.begin(batch)
        self._busy += len(batch)
        self._started += 1
        self._leases[id(batch)] = instance, batch
        try:
            instance.run(batch)
        except Exception as error:
            self._not_taken(instance, batch, error)

    def _not_taken(self, instance: ModelInstance, batch: Batch, error: Exception) -> None:
        """Run the requests of a batch that an instance could not take one by one; fail the one that it cannot take."""
        if id(batch) not in self._leases:  # it ran, and what was done with the answers failed
            report("dispatcher", error, f"of instance '{instance.name}'")
            return
        if len(batch) == 1:
            failure = report("dispatcher", error, f"of instance '{instance.name}'", batch[0].id)
            self._on_done(instance, batch, [InferenceResponse.failed(failure)], None)
            return
        del self._leases[id(batch)]
        self._run_next(instance, BatchSplit(batch))

    def _run_next(self, instance: ModelInstance, split: BatchSplit) -> None:
        """Hand over the requests of a batch that runs one by one, until the instance is at work or the batch is back.

        A loop, and not one call in the other: an instance may answer before ``run`` returns.
        """
        split.looping = True
        while (index := split.next()) is not None:
            alone = self._picker.alone(split.batch, index)
            self._splits[id(alone)] = split
            self._leases[id(alone)] = instance, alone
            try:
                instance.run(alone)
            except Exception as error:
                failure = report("dispatcher", error, f"of instance '{instance.name}'", split.batch[index].id)
                if id(alone) in self._leases:
                    self._on_done(instance, alone, [InferenceResponse.failed(failure)] * len(alone), None)
            if split.awaited is not None:
                split.looping = False
                return
        self._leases[id(split.batch)] = instance, split.batch
        self._done(instance, split.batch, split.responses, split.timings)

    def _done(
        self,
        instance: ModelInstance,
        batch: Batch,
        responses: Sequence[InferenceResponse | None],
        timings: ExecutionTimes | None,
    ) -> None:
        """An instance has finished: start its next batch, then pass the answers on."""
        if self._leases.pop(id(batch), None) is None:
            report("dispatcher", RuntimeError("a batch came back that was not out"), f"of instance '{instance.name}'")
            return
        if self._splits and (split := self._splits.pop(id(batch), None)) is not None:
            split.answered(batch, responses, timings)
            if not split.looping:
                self._run_next(instance, split)
            return
        self._busy -= len(batch)
        took_ns = timings.ended_ns - timings.started_ns if timings is not None else 0
        waiting = self._picker.size
        apart: Sequence[InferenceRequest] = ()
        if instance in self._unlisted:
            responses = self._listed(instance, responses)
        else:
            try:
                batch, responses, apart = self._picker.ended(instance, batch, responses, took_ns)
            except Exception as error:
                self._unlisted.add(instance)
                self._replace_picker(error)
                responses = self._listed(instance, responses)
        self._through += len(batch)
        for request in apart:
            if request.cancelled:  # meanwhile, and the model wants it once more
                self._drop(request)
        self._enough = self._looking and self._picker.size > waiting
        if self._leaving:
            self._loop.call_soon(self._see_off)
        if not self._looking:
            self._look()
        self._answers.returned(batch, responses, timings, apart)
        if not self._looking:
            self._stir(self._busy > 0)
        self._check_drained()

    def _replace_picker(self, error: Exception) -> NeriteError:
        """Go on with an empty roster after an exception in the one that there was, whose state cannot be trusted.

        What waits is answered with the error that is returned; the next audit finds what the roster has lost. What
        runs, runs on.
        """
        failure = report("dispatcher", error, f"of model '{self._name}'")
        before, self._picker = self._picker, self._picker.renewed()
        self._renewed_ns = _now()
        for instance in self._instances:
            if self._leases.holds(instance):
                self._unlisted.add(instance)
            elif instance.usable and instance not in self._leaving and instance not in self._unlisted:
                self._came_back(instance)
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
        for instance, batch in self._leases.lost():
            found.append(f"instance '{instance.name}' has lost a batch of {len(batch)} requests")
            self._on_done(instance, batch, [lost] * len(batch), None)
        idle = self._picker.idle
        for instance in self._instances:
            if (
                instance.usable
                and instance not in idle
                and instance not in self._leaving
                and not self._leases.holds(instance)
            ):
                found.append(f"instance '{instance.name}' was neither idle nor at work")
                self._unlisted.discard(instance)
                self._guarded(self._gone, instance)
                self._guarded(self._picker.came, instance)
        running = self._running()
        known = self._picker.size + len(running | self._answers.open)
        if self._answers.entered != known:
            known_ones = running | self._answers.open
            missing = [each for each in unanswered(self._on_cancel, self._renewed_ns) if each not in known_ones]
            found.append(f"{self._answers.entered - known} requests neither waited nor ran")
            for request in missing:
                request.respond(lost)
            self._answers.entered = known
            self._check_drained()
        waiting = self._picker.size
        if self._stalls():
            found.append(f"{waiting} requests waited beside an idle instance")
        self.sound = not found
        if found:
            self._turn()
        return [f"model '{self._name}': {what}" for what in found]

    def _stalls(self) -> bool:
        """Return whether requests that could have run have waited since the last audit; if so, they run now."""
        picker, now = self._picker, _now()
        wake_at = picker.wake_at()
        if not picker.size or not picker.idle or (wake_at is not None and wake_at > now - _OVERDUE_NS):
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
        self._alarm.set(self._picker.wake_at())

    def _guarded(self, tell: Callable[..., object], *arguments: object) -> None:
        """Tell the roster something; replace it if that raises."""
        try:
            tell(*arguments)
        except Exception as error:
            self._replace_picker(error)

    def _came_back(self, instance: ModelInstance) -> None:
        """Make an idle instance known to a new roster. If that fails the next audit does it."""
        try:
            self._picker.came(instance)
        except Exception as error:
            report("dispatcher", error, f"of instance '{instance.name}'")

    def _listed(
        self, instance: ModelInstance, responses: Sequence[InferenceResponse | None]
    ) -> Sequence[InferenceResponse | None]:
        """Make an instance known to the roster that replaced the one its batch was of; return the answers to that."""
        if not self._leases.holds(instance):
            self._unlisted.discard(instance)
            if instance.usable and instance not in self._leaving:
                self._came_back(instance)
        lost = InferenceResponse.failed(Internal("the request was to run again, and the server has lost its state"))
        return [lost if response is not None and response.again else response for response in responses]

    def _part(
        self, request: InferenceRequest, response: InferenceResponse, final: bool, timings: ExecutionTimes | None
    ) -> None:
        """One of several responses to a request is here."""
        if self._settles:
            try:
                settled = self._picker.settle(request, response)
            except Exception as error:
                settled = InferenceResponse.failed(report("dispatcher", error, f"of model '{self._name}'", request.id))
            if settled is None or (settled.empty and not final):
                return
            response = settled
        self._answers.part(request, response, final, timings)
        if final:
            if self._leaving:
                self._loop.call_soon(self._see_off)
            self._check_drained()

    def _usable(self, instance: ModelInstance) -> None:
        """An instance went down, came up, or failed to come up."""
        self.on_usable()
        if not instance.usable:
            self._guarded(self._gone, instance)
            self._check_drained()
            # What it was to run may be for another one now.
            self.look_soon()
        if instance in self._leaving:
            self._loop.call_soon(self._see_off)
            return
        if instance.usable:
            self._guarded(self._picker.came, instance)
            self._turn()
        if not self._picker.idle and not self._busy:
            self._fail_hopeless()

    def _gone(self, instance: ModelInstance) -> None:
        """Refuse what only ``instance``, which is down, could have run."""
        for request, error in self._picker.gone(instance):
            self._answers.refuse(request, error, RequestOutcome.OTHER)

    def _fail_hopeless(self) -> None:
        """Answer everything that waits, if no instance can be brought up: nobody may wait for ever."""
        failures = [failure for instance in self._instances if (failure := instance.failure) is not None]
        if not self._instances:
            self.abandon(Unavailable("all instances of the model are passive: none of them takes requests"))
        elif len(failures) == len(self._instances):
            self.abandon(Unavailable(f"no instance of the model can be started: {failures[0].message}"))

    def _expire(self, now: int) -> None:
        for request, error in self._picker.expire(now):
            self._answers.refuse(request, error, RequestOutcome.TIMED_OUT)

    def _cancelled(self, request: InferenceRequest) -> None:
        dropped = self._drop(request)
        if request not in dropped:
            for instance in self._instances:
                instance.cancel(request)
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
                withdrawn = self._picker.withdraw(request)
        except Exception as error:
            self._replace_picker(error)
            return ()
        for each in withdrawn:
            self._answers.refuse(each, Cancelled(""), RequestOutcome.CANCELED)
        return withdrawn

    def look_soon(self) -> None:
        """Look at the queue in the next turn of the loop, if an instance is idle."""
        if self._picker.idle and not self._looking:
            self._looking = True
            self._soon(self._turn)

    def _pause(self, request: InferenceRequest, paused: bool) -> None:
        for instance in self._instances:
            instance.pause(request, paused)
        if not paused:
            self._guarded(self._picker.resume, request)
            self.look_soon()

    def _check_drained(self) -> None:
        """Tell those who wait for the end, if it has come. Only where every answer due by now has left."""
        if self._on_drained and not self.in_flight:
            waiting, self._on_drained = self._on_drained, []
            for call in waiting:
                call()
