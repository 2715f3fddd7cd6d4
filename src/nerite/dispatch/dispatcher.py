"""Dispatcher of a model version: carries out the instance picker's decisions and returns responses to callers.

Requests that arrive together run together: the first of them schedules one dispatch, which runs after everything that
the sockets had for this turn of the loop was read. An instance that finishes gets its next batch before the responses
of the last one are sent, so that it computes while the server writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns

from nerite.core.errors import Cancelled, Internal, InvalidArgument, NeriteError, Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.failures import report
from nerite.core.request import NOBODY, InferenceRequest, with_request_id
from nerite.core.response import InferenceResponse
from nerite.dispatch.answers import ResponseDispatcher, report_execution, report_response
from nerite.dispatch.busy_poll import BusyPoll, LoopTimer
from nerite.dispatch.deadlocks import break_deadlocks
from nerite.dispatch.instance_picker import BatchSplit, Leases, unanswered
from nerite.dispatch.interface import InstancePicker, Responses
from nerite.instances.instance import Batch, Done, ModelInstance, Part
from nerite.observability.statistics import RequestOutcome, VersionStatistics
from nerite.scheduling.decider import BatchReason
from nerite.scheduling.load_shedding import LoadShedder
from nerite.scheduling.stall_detectors import QueueStallDetector


class Dispatcher:
    """Queue, instances and timers of one model version. For the loop's thread only."""

    # Slots, because attribute access on an object with more than thirty attributes is slow in CPython 3.11.
    __slots__ = (
        "_admission", "_answers", "_dispatching", "_executed", "_granted", "_instances", "_leases", "_loop",
        "_name", "_on_cancel", "_on_done", "_on_drained", "_on_part", "_picker", "_picker_since_ns", "_poll_again",
        "_retiring", "_settles", "_soon", "_splits", "_stall", "_statistics", "_timed", "_timer",
        "_unregistered", "_yielding", "on_lost", "on_usable", "sound",
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
        leases: Leases | None = None,
    ) -> None:
        self._name = admission.model
        self._picker = picker
        self._admission = admission
        self._instances: list[ModelInstance] = []
        self._statistics = statistics
        self._loop = loop
        self._poll_again = busy_poll.event
        self._soon = busy_poll.soon
        self._retiring: dict[ModelInstance, Callable[[ModelInstance], None]] = {}
        """Instances that are being removed, with the callback for when they are."""
        self._stall = QueueStallDetector()
        self.sound = True
        """The last audit found nothing to restore."""
        self._leases = Leases() if leases is None else leases
        self._splits: dict[int, BatchSplit] = {}
        """By the identity of the batch that runs now, the batch that it is a part of."""
        self._picker_since_ns = 0
        """When the picker was last replaced; requests queued before that are in no queue."""
        self._unregistered: set[ModelInstance] = set()
        """Instances that were busy when the picker was replaced: registered with the new one when their batch ends."""
        self._granted = 0
        """Requests that may be queued before ``admission`` is queried again."""
        self._executed = 0
        """Total number of requests that were executed and do not return to the queue."""
        self._dispatching = False
        """A dispatch is in progress or scheduled for this turn of the loop."""
        self._yielding = False
        """Dispatching stops until the next turn of the loop: a batch that ran on the loop is to run again."""
        self._timed, self._settles = picker.timed, picker.settles
        self._timer = LoopTimer(loop, self._turn)
        """Fires at the picker's ``wake_at``."""
        self._answers = ResponseDispatcher(statistics, self._pause, preserve_ordering=preserve_ordering)
        self._on_cancel = self._cancelled
        self._on_done: Done = self._done
        self._on_part: Part = self._part
        self._on_drained: list[Callable[[], None]] = []
        self.on_usable: Callable[[], object] = tuple
        """Called when an instance was added or removed, went down, came up, or failed to come up."""
        self.on_lost: Callable[[InferenceRequest], object] = bool
        """Called with a request that is about to fail because its instance is lost, or none can be started."""
        for instance in instances:
            self._adopt(instance)

    @property
    def pending(self) -> int:
        """Number of requests that wait for an instance."""
        return self._picker.size

    @property
    def makes_progress(self) -> bool:
        """Whether requests make progress: an instance can run them, or none can be started and they are refused."""
        return any(each.usable for each in self._instances) or all(each.failure is not None for each in self._instances)

    @property
    def waiting(self) -> Mapping[int, int]:
        """Number of requests that wait for an instance, by priority."""
        return self._picker.waiting

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Number of batches by the reason why they were released."""
        return self._picker.releases

    @property
    def in_flight(self) -> int:
        """Number of requests that wait, run, or have not had their last response."""
        return self._answers.entered

    @property
    def holds_sequences(self) -> bool:
        """Whether an instance has the state of a sequence that goes on."""
        return any(self._holds_sequence(instance) for instance in tuple(self._instances))

    @property
    def settled(self) -> bool:
        """Whether no state is kept for any request that was executed."""
        return self._answers.settled

    def submit(self, request: InferenceRequest) -> None:
        """Queue a request; its responses come through ``request.respond``."""
        now = monotonic_ns()
        picker = self._picker
        self._granted -= 1
        if self._granted < 0 and not self._admit(request, now):
            return
        try:
            refusal = picker.offer(request, now)
        except Exception as error:
            request.respond(InferenceResponse.failed(self._replace_picker(error)))
            return
        if refusal is not None:
            if not isinstance(refusal, InvalidArgument):  # the caller's own mistakes are not counted
                self._statistics.failed(RequestOutcome.REJECTED, request.arrived_ns)
            request.respond(InferenceResponse.failed(refusal))
            return
        self._answers.entered += 1
        request.on_cancel = self._on_cancel
        if (picker.idle or picker.ahead) and not self._dispatching:
            self._dispatching = True
            self._soon(self._turn)
        elif not picker.idle:
            if not self._leases.requests:
                self._fail_unservable()
            elif request.caused:
                break_deadlocks(request)
        if self._timed:
            self._notify_picker(self._set_timer)

    def _admit(self, request: InferenceRequest, now: int) -> bool:
        """Return whether ``request`` may be queued; under overload, reject it, or instead one of lower priority."""
        admission = self._admission
        granted = admission.grant(self._picker.size, self._executed, now)
        self._granted = max(granted - 1, 0)
        if granted or request.caused:
            return True
        least = self._picker.displace(request)
        if least is request:
            self._statistics.failed(RequestOutcome.REJECTED, request.arrived_ns)
            request.respond(InferenceResponse.failed(with_request_id(admission.refusal(), request.id)))
        elif least is not None:
            self._answers.refuse(least, with_request_id(admission.refusal(), least.id), RequestOutcome.REJECTED)
        return least is not request

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return the calls that block ``request``; none if an instance is free, or will be without any of them."""
        for instance in self._instances:
            if (calls := instance.calls_for(request)) is not None:
                return calls
        if self._picker.idle:
            return ()
        awaited: list[InferenceRequest] = []
        for instance in self._instances:
            if instance not in self._retiring:
                calls = instance.calls()
                if not calls:
                    return ()
                awaited += calls
        return awaited

    def begun(self, request: InferenceRequest) -> bool:
        """Return whether an instance has ``request``, which is in this version."""
        return any(instance.calls_for(request) is not None for instance in self._instances)

    def add(self, instance: ModelInstance) -> None:
        """Add an instance."""
        self._adopt(instance)
        self.on_usable()
        self._turn()

    def remove(self, instance: ModelInstance, left: Callable[[ModelInstance], None]) -> None:
        """Start no new work on an instance; call ``left`` once it has finished what it has."""
        self._retiring[instance] = left
        self._notify_picker(self._picker.retire, instance)
        self._remove_retired()

    def _adopt(self, instance: ModelInstance) -> None:
        instance.done = self._on_done
        instance.part = self._on_part
        instance.traced = self._on_part == self._observed_part
        instance.on_usable = self._usable
        instance.on_lost = self._lost
        self._instances.append(instance)
        if instance.usable:  # a worker may have ended right after its start
            self._notify_picker(self._picker.add_instance, instance)

    def _remove_retired(self) -> None:
        """Remove the retiring instances that have nothing left to do."""
        for instance in [each for each in tuple(self._retiring) if not each.busy and not self._holds_sequence(each)]:
            self._instances.remove(instance)
            self._notify_picker(self._remove_instance, instance)
            self._retiring.pop(instance)(instance)
            self.on_usable()
        if not self._instances:
            self._fail_unservable()

    def _holds_sequence(self, instance: ModelInstance) -> bool:
        """Return whether an instance has the state of a sequence that goes on."""
        try:
            return self._picker.holds(instance)
        except Exception as error:
            self._replace_picker(error)
            return False

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call ``call`` once nothing waits or runs, at once if that is so now. No more requests come."""
        self._notify_picker(self._picker.finish)
        self._loop.call_soon(self._turn)  # requests behind sequences that have ended now may start
        if self.in_flight:
            self._on_drained.append(call)
        else:
            call()

    def server_stops(self) -> None:
        """Refuse requests that wait for something that will not come during shutdown."""
        self._notify_picker(self._picker.server_stops)
        self._loop.call_soon(self._turn)

    def abandon(self, error: NeriteError) -> None:
        """Answer all waiting requests with ``error``. Running batches go on."""
        try:
            for request in self._picker.drain():
                self.on_lost(request.origin)
                self._answers.refuse(request, error, RequestOutcome.OTHER)
        except Exception as failure:
            self._replace_picker(failure)
        self._check_drained()

    def hand_back(self, take: Callable[[InferenceRequest], bool], error: NeriteError) -> None:
        """Answer with ``error`` the waiting requests that ``take`` returns True for, unless they are of sequences."""
        try:
            for request in () if self._settles else self._picker.drain():
                refusal = error if take(request.origin) else self._picker.offer(request, request.queued_ns)
                if refusal is not None:
                    self._answers.refuse(request, refusal, RequestOutcome.OTHER)
        except Exception as failure:
            self._replace_picker(failure)
        self._check_drained()

    def _lost(self, requests: Sequence[InferenceRequest]) -> None:
        for request in requests:
            if not self._answers.answering(request):
                self.on_lost(request.origin)

    def notify_observers(self) -> None:
        """Report executions to sinks that are an ``ExecutionObserver`` from now on; until then none is looked for."""
        self._on_done, self._on_part = self._observed_done, self._observed_part
        for instance in self._instances:
            instance.done, instance.part, instance.traced = self._on_done, self._on_part, True

    def _observed_done(
        self, instance: ModelInstance, batch: Batch, responses: Responses, timings: ExecutionTimes | None
    ) -> None:
        report_execution(batch, responses, timings)
        self._done(instance, batch, responses, timings)

    def _observed_part(
        self, request: InferenceRequest, response: InferenceResponse, final: bool, timings: ExecutionTimes | None
    ) -> None:
        report_response(request, timings)
        self._part(request, response, final, timings)

    def _turn(self) -> None:
        """Run a scheduled dispatch."""
        self._dispatch()
        if self._retiring:
            self._remove_retired()
        self._poll_again(self._leases.requests > 0)
        self._check_drained()

    def _dispatch(self) -> None:
        """Hand batches to instances until the picker has none to start."""
        self._dispatching = True
        self._yielding = False
        try:
            while not self._yielding:
                now = monotonic_ns()
                if self._timed:
                    self._expire(now)
                if (chosen := self._picker.choose(now)) is None:
                    break
                self._start(*chosen)
            wake_at = self._picker.wake_at()
        except Exception as error:
            self._dispatching = False
            self._replace_picker(error)
            return
        self._dispatching = False
        if self._yielding:
            self.check_soon()
        self._timer.set(wake_at)

    def _start(self, instance: ModelInstance, batch: Batch) -> None:
        """Lease a batch to an instance. If the instance cannot take it, the lease has ended when this returns."""
        self._answers.begin(batch)
        self._leases.begin(instance, batch)
        try:
            instance.run(batch)
        except Exception as error:
            self._run_failed(instance, batch, error)

    def _run_failed(self, instance: ModelInstance, batch: Batch, error: Exception) -> None:
        """Run the requests of a batch that ``run`` raised for one by one, so that only the request at fault fails."""
        if batch not in self._leases:  # it was executed, and handling its responses failed
            report("dispatcher", error, f"of instance '{instance.name}'")
            return
        if len(batch) == 1:
            failure = report("dispatcher", error, f"of instance '{instance.name}'", batch[0].id)
            self._on_done(instance, batch, [InferenceResponse.failed(failure)], None)
            return
        self._leases.end(batch)
        self._run_next(instance, BatchSplit(batch))

    def _run_next(self, instance: ModelInstance, split: BatchSplit) -> None:
        """Run the requests of a split batch one by one, until the instance is busy or the batch is complete."""
        split.looping = True  # instead of recursion, because an instance may answer before ``run`` returns
        while (index := split.next()) is not None:
            alone = self._picker.alone(split.batch, index)
            self._splits[id(alone)] = split
            self._leases.begin(instance, alone)
            try:
                instance.run(alone)
            except Exception as error:
                failure = report("dispatcher", error, f"of instance '{instance.name}'", split.batch[index].id)
                if alone in self._leases:
                    self._on_done(instance, alone, [InferenceResponse.failed(failure)] * len(alone), None)
            if split.awaited is not None:
                split.looping = False
                return
        self._leases.begin(instance, split.batch)
        self._done(instance, split.batch, split.responses, split.timings)

    def _done(
        self, instance: ModelInstance, batch: Batch, responses: Responses, timings: ExecutionTimes | None
    ) -> None:
        """End the lease of an executed batch: start the instance's next batch, then pass on the responses."""
        if not self._leases.end(batch, timings):
            report("dispatcher", RuntimeError("a batch was returned that is not leased"), f"of '{instance.name}'")
            return
        if self._splits and (split := self._splits.pop(id(batch), None)) is not None:
            split.answered(batch, responses, timings)
            if not split.looping:
                self._run_next(instance, split)
            return
        took_ns = timings.ended_ns - timings.started_ns if timings is not None else 0
        waiting = self._picker.size
        excluded: Sequence[InferenceRequest] = ()
        if instance in self._unregistered:
            responses = self._reregister(instance, responses)
        else:
            try:
                batch, responses, excluded = self._picker.ended(instance, batch, responses, took_ns)
            except Exception as error:
                self._unregistered.add(instance)
                self._replace_picker(error)
                responses = self._reregister(instance, responses)
        self._executed += len(batch)
        for request in excluded:
            if request.cancelled:  # during an execution that its model wants to repeat
                self._withdraw(request)
        self._yielding = self._dispatching and self._picker.size > waiting
        if self._retiring:
            self._loop.call_soon(self._remove_retired)
        if not self._dispatching:
            self._dispatch()
        self._answers.returned(batch, responses, timings, excluded)
        if not self._dispatching:
            self._poll_again(self._leases.requests > 0)
        self._check_drained()

    def _replace_picker(self, error: Exception) -> NeriteError:
        """Replace a picker that raised by an empty one; return the error with which waiting requests were answered."""
        failure = report("dispatcher", error, f"of model '{self._name}'")
        before, self._picker = self._picker, self._picker.renewed()
        self._picker_since_ns = monotonic_ns()
        for instance in self._instances:
            if self._leases.holds(instance):
                self._unregistered.add(instance)
            elif instance.usable and instance not in self._retiring and instance not in self._unregistered:
                self._register_idle(instance)
        try:
            for request in before.drain():
                if request.on_cancel is self._on_cancel:  # else it was just offered, or is cancelled and answered
                    self._answers.refuse(request, failure, RequestOutcome.OTHER)
        except Exception as another:
            report("dispatcher", another, f"of model '{self._name}'")
        self._timer.set(None)
        self._check_drained()
        return failure

    def audit(self) -> list[str]:
        """Compare the leases with what instances have, restore what differs, and return descriptions of it.

        Called from the loop about once a second. Batches are also checked when they return; this finds what never does.
        """
        found: list[str] = []
        lost = InferenceResponse.failed(Internal("the request was lost in the server, see its log: send it again"))
        for instance, batch in self._leases.lost():
            found.append(f"instance '{instance.name}' has lost a batch of {len(batch)} requests")
            self._on_done(instance, batch, [lost] * len(batch), None)
        idle = self._picker.idle
        for instance in self._instances:
            ready = instance.usable and instance not in self._retiring
            if ready and instance not in idle and not self._leases.holds(instance):
                found.append(f"instance '{instance.name}' was neither idle nor busy")
                self._unregistered.discard(instance)
                self._notify_picker(self._remove_instance, instance)
                self._notify_picker(self._picker.add_instance, instance)
        begun = self._running() | self._answers.open
        known = self._picker.size + len(begun)
        if self._answers.entered != known:
            missing = [each for each in unanswered(self._on_cancel, self._picker_since_ns) if each not in begun]
            found.append(f"{self._answers.entered - known} requests were neither waiting nor running")
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
        """Start requests that could have run and have waited since the last audit; return whether there were any."""
        picker, begun = self._picker, self._leases.begun
        if self._stall.check(bool(picker.size and picker.idle), picker.wake_at(), begun, monotonic_ns()):
            self._turn()
        return self._leases.begun != begun

    def _running(self) -> set[InferenceRequest]:
        """Return the requests of all leased batches, without those that only fill a slot."""
        batches = (*self._leases, *(split.batch for split in self._splits.values()))
        return {request for batch in batches for request in batch if request.sink is not NOBODY}

    def _set_timer(self) -> None:
        self._timer.set(self._picker.wake_at())

    def _notify_picker(self, notify: Callable[..., object], *arguments: object) -> None:
        """Call a method that notifies the picker; replace the picker if that raises."""
        try:
            notify(*arguments)
        except Exception as error:
            self._replace_picker(error)

    def _register_idle(self, instance: ModelInstance) -> None:
        """Register an idle instance with a new picker. If that fails, the next audit does it."""
        try:
            self._picker.add_instance(instance)
        except Exception as error:
            report("dispatcher", error, f"of instance '{instance.name}'")

    def _reregister(
        self, instance: ModelInstance, responses: Sequence[InferenceResponse | None]
    ) -> Sequence[InferenceResponse | None]:
        """Register an instance whose batch is from a replaced picker; fail requests that were to run again."""
        if not self._leases.holds(instance):
            self._unregistered.discard(instance)
            if instance.usable and instance not in self._retiring:
                self._register_idle(instance)
        lost = InferenceResponse.failed(Internal("the request was to run again, but the server has lost its state"))
        return [lost if response is not None and response.again else response for response in responses]

    def _part(
        self, request: InferenceRequest, response: InferenceResponse, final: bool, timings: ExecutionTimes | None
    ) -> None:
        """Pass on one of several responses to a request."""
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
            if self._retiring:
                self._loop.call_soon(self._remove_retired)
            self._check_drained()

    def _usable(self, instance: ModelInstance) -> None:
        """React to an instance that went down, came up, or failed to come up."""
        self.on_usable()
        if not instance.usable:
            self._notify_picker(self._remove_instance, instance)
            self._check_drained()
            self.check_soon()  # another instance may run now what was reserved for this one
        if instance in self._retiring:
            self._loop.call_soon(self._remove_retired)
            return
        if instance.usable:
            self._notify_picker(self._picker.add_instance, instance)
            self._turn()
        if not self._picker.idle and not self._leases.requests:
            self._fail_unservable()

    def _remove_instance(self, instance: ModelInstance) -> None:
        """Refuse the requests that only ``instance``, which is down, could have run."""
        for request, error in self._picker.remove_instance(instance):
            self._answers.refuse(request, error, RequestOutcome.OTHER)

    def _fail_unservable(self) -> None:
        """Fail all waiting requests if no instance can be brought up, so that none waits indefinitely."""
        failures = [failure for instance in self._instances if (failure := instance.failure) is not None]
        if not self._instances:
            self.abandon(Unavailable("all instances of the model are passive: none of them takes requests"))
        elif len(failures) == len(self._instances):
            self.abandon(Unavailable(f"no instance of the model can be started: {failures[0].message}"))

    def _expire(self, now: int) -> None:
        for request, error in self._picker.expire(now):
            self._answers.refuse(request, error, RequestOutcome.TIMED_OUT)

    def _cancelled(self, request: InferenceRequest) -> None:
        withdrawn = self._withdraw(request)
        if request not in withdrawn:
            for instance in self._instances:
                instance.cancel(request)
        if withdrawn:
            self._check_drained()
            self.check_soon()  # the remaining requests may be a batch that need not wait

    def _withdraw(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Answer and return the requests that no longer wait because ``request`` was cancelled."""
        withdrawn: Sequence[InferenceRequest]
        try:
            if request.queue is not None and request.queued_ns < self._picker_since_ns:  # queued in a replaced picker
                request.queue, withdrawn = None, (request,)
            else:
                withdrawn = self._picker.withdraw(request)
        except Exception as error:
            self._replace_picker(error)
            return ()
        for each in withdrawn:
            self._answers.refuse(each, Cancelled(""), RequestOutcome.CANCELED)
        return withdrawn

    def check_soon(self) -> None:
        """Schedule a dispatch for this turn of the loop if an instance is idle."""
        if self._picker.idle and not self._dispatching:
            self._dispatching = True
            self._soon(self._turn)

    def _pause(self, request: InferenceRequest, paused: bool) -> None:
        for instance in self._instances:
            instance.pause(request, paused)
        if not paused:
            self._notify_picker(self._picker.resume, request)
            self.check_soon()

    def _check_drained(self) -> None:
        """Call the drain callbacks if nothing is in flight. To be called only after all due responses have left."""
        if self._on_drained and not self.in_flight:
            waiting, self._on_drained = self._on_drained, []
            for call in waiting:
                call()
