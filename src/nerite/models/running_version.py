"""A loaded model version: its signature, queue pipeline, instances and statistics, from launch to close.

Also contains the auditor that checks the running versions of a server once a second.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from nerite.backends.registry import GENERATING, STREAM_INPUT
from nerite.config.model_config import ModelConfig
from nerite.core.engine_report import EngineReport
from nerite.core.errors import NeriteError, Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.failures import internal_errors, report
from nerite.core.memory import OwnMemory
from nerite.core.request import CancelReason, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.core.work_loop import WorkLoop
from nerite.devices.pools import PinnedPool
from nerite.dispatch.dispatcher import Dispatcher
from nerite.instances.instance import PROBE_PATIENCE, ModelInstance, OnReport, all_ready
from nerite.instances.placement import InstancePlan
from nerite.ledger.meter import VersionMeter
from nerite.models.adapters import VersionAdapters
from nerite.models.device_inputs import DevicePlacement
from nerite.models.instance_factory import InstanceFactory
from nerite.models.queue_pipeline import QueuePipeline
from nerite.observability.statistics import VersionStatistics
from nerite.observability.token_statistics import TokenStatistics
from nerite.observability.tracing import Tracing
from nerite.scheduling.decider import BatchReason
from nerite.workers.host.instance import RemoteInstance
from nerite.workers.ipc.shared_memory import TRIM_EVERY, TRIM_STEP, Arena, Segment

_serial_numbers = itertools.count(1)
_LEAVE_SECONDS: Final = 10.0


class RunningVersion:
    """Loaded model version that accepts requests until it is closed. Used from the loop's thread only."""

    __slots__ = (
        "__weakref__",
        "_arena",
        "_begin_trace",
        "_closing",
        "_factory",
        "_instances",
        "_listeners",
        "_loop",
        "_meter",
        "_on_closed",
        "_pipeline",
        "_scheduler",
        "_submit",
        "_trim_timer",
        "_unclosed",
        "adapters",
        "cached",
        "config",
        "config_json",
        "content",
        "decoupled",
        "device_placement",
        "fusible",
        "label",
        "load_seconds",
        "name",
        "number",
        "own_memory",
        "pinned",
        "routed",
        "signature",
        "statistics",
        "tokens",
        "traced",
        "version",
    )

    def __init__(
        self,
        name: str,
        version: int,
        config: ModelConfig,
        config_json: dict[str, Any],
        signature: Signature,
        statistics: VersionStatistics,
        pipeline: QueuePipeline,
        instances: Mapping[InstancePlan, ModelInstance],
        maker: InstanceFactory,
        arena: Arena,
        loop: asyncio.AbstractEventLoop,
        meter: VersionMeter | None = None,
    ) -> None:
        """``pipeline`` updates ``statistics``; ``maker`` creates further instances and is closed with the version.

        ``meter`` charges requests, if the server has a ledger.
        """
        self.name = name
        self.version = version
        self.label = str(version)
        self.config = config
        self.config_json = config_json
        self.signature = signature
        self.statistics = statistics
        self._instances = dict(instances)
        self.decoupled = bool(config.model_transaction_policy and config.model_transaction_policy.decoupled)
        self.adapters = VersionAdapters(name, lambda: self._active)
        """LoRA adapters that were loaded since the version was."""
        self.number = next(_serial_numbers)
        """Unique among all versions that this process loads."""
        self.content = ""
        """Hash of the files and configuration it was loaded from; empty until it has been computed."""
        self.tokens: TokenStatistics | None = None
        """Statistics reported by the engines; None before the first report."""
        self.traced = False
        self.routed = False
        """A route decides which version answers requests that name none."""
        self.device_placement: DevicePlacement | None = None
        """Where it takes tensors that are on a GPU; set by the launcher."""
        self.pinned: PinnedPool | None = None
        """Pinned memory that requests are received in; set by the launcher."""
        self.fusible = False
        """See ``VersionHandle``; set by the launcher."""
        self.cached = bool(config.response_cache and config.response_cache.enable)
        """The model has the response cache enabled."""
        self.load_seconds = 0.0
        """Duration of the load; set by the launcher."""
        self.own_memory = OwnMemory()
        """What it takes of the server's own process; set when it has been loaded there."""
        self._arena = arena
        self._loop = loop
        self._factory = maker
        self._unclosed = set(instances.values())
        """Instances that are not closed yet, including those that are being removed."""
        self._closing = False
        self._on_closed: Callable[[], None] = lambda: None
        self._listeners: list[OnReport] = []
        self._meter = meter
        if meter is not None:
            for instance in instances.values():
                meter.opened(instance, time.monotonic_ns())
            self._listeners.append(self._charge)
        for plan, instance in instances.items():
            self._subscribe(instance)
            if plan.passive:
                instance.on_usable = _ignored
        self._pipeline = pipeline
        self._scheduler = pipeline.scheduler
        self._submit = pipeline.first.submit
        self._begin_trace: Callable[[InferenceRequest], None] | None = None
        engine_admission = pipeline.engine_admission
        if engine_admission is not None:
            engine_admission.on_late = self._record_deadline_missed
            self.listen(engine_admission.reported)
        self._trim_timer: asyncio.TimerHandle | None = None
        arena.on_segment.append(self._start_trimming)
        if arena.segments:  # the warm-up has allocated some
            self._trim()

    @property
    def instances(self) -> tuple[ModelInstance, ...]:
        """All instances, including passive ones."""
        return tuple(self._instances.values())

    @property
    def _active(self) -> tuple[ModelInstance, ...]:
        """The instances that execute batches."""
        return tuple(instance for plan, instance in self._instances.items() if not plan.passive)

    @property
    def usable(self) -> bool:
        """Whether an instance can run requests, now or after what it runs. An ensemble has none, and always can."""
        active = self._active
        return not active or any(instance.usable for instance in active)

    @property
    def pending(self) -> int:
        """Number of requests that wait for an instance."""
        return self._pipeline.first.pending

    @property
    def lowest_priority(self) -> int:
        """Priority of the least important requests; 0 if the model has no priorities."""
        batching = self.config.dynamic_batching
        return 0 if batching is None else batching.priority_levels

    @property
    def waiting(self) -> Mapping[int, int]:
        """Number of requests in the scheduler's queue, by priority."""
        return self._scheduler.waiting

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Number of batches started for each reason; empty unless the model batches requests."""
        return self._scheduler.releases

    @property
    def in_flight(self) -> int:
        """Number of requests that wait or run."""
        return self._pipeline.first.in_flight

    @property
    def holds_sequences(self) -> bool:
        """Whether it has the state of a sequence that goes on."""
        return isinstance(self._scheduler, Dispatcher) and self._scheduler.holds_sequences

    @property
    def progress(self) -> tuple[int, int]:
        """Changes whenever a request ends or gets one of several responses, as long as no new ones come."""
        return self.in_flight, sum(each.compute_infer.count for each in self.statistics.responses)

    @property
    def max_rows(self) -> int:
        """Maximum number of rows in a batch; 0 if each request runs alone."""
        return self.config.max_batch_size if self.config.dynamic_batching is not None else 0

    @property
    def generates(self) -> bool:
        """Whether the model runs on an LLM engine."""
        return self.config.backend in GENERATING

    @property
    def stream_input(self) -> str:
        """Name of the input that a request for several responses sets; empty if any request may get several."""
        return STREAM_INPUT if self.generates and STREAM_INPUT in self.signature.inputs else ""

    @property
    def runtime_adapters(self) -> Collection[str]:
        """Names of the LoRA adapters that were loaded since the version was."""
        return self.adapters.paths.keys()

    def parameter(self, name: str) -> str:
        """Return a parameter of the configuration; empty if it has none of that name."""
        return str(self.config_json.get("parameters", {}).get(name, {}).get("string_value", ""))

    @property
    def restarts(self) -> int:
        """Number of times an instance was restarted."""
        return sum(instance.restarts for instance in self.instances)

    @property
    def memory(self) -> int:
        """Bytes of private memory that the workers use now; 0 if there are no workers."""
        return sum(instance.memory() for instance in self.instances)

    @property
    def can_sleep(self) -> bool:
        """Whether all its instances can give the memory of their GPUs back while they have no requests."""
        found = self.instances
        return bool(found) and all(isinstance(each, RemoteInstance) and each.can_sleep for each in found)

    async def sleep(self, asleep: bool) -> None:
        """Have all instances sleep, or wake. No request may be running, or come until it is awake.

        Raises ``NeriteError``; then some may sleep.
        """
        workers = [each for each in self.instances if isinstance(each, RemoteInstance)]
        outcomes = await asyncio.gather(*(each.sleep(asleep) for each in workers), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def submit(self, request: InferenceRequest) -> None:
        """Enqueue a request whose header is bound to this version's signature; answer through ``respond``."""
        if [*map(len, request.data)] != request.header.sizes:
            wrong = self.signature.check_data(request)
            if wrong is not None:
                request.respond(InferenceResponse.failed(wrong))
                return
        if self._begin_trace is not None:
            self._begin_trace(request)
        self._submit(request)

    def enqueue(self, requests: Iterable[InferenceRequest]) -> None:
        """Enqueue requests whose data were already checked. What is unforeseen ends only the request concerned."""
        begin_trace, submit = self._begin_trace, self._submit
        for request in requests:
            try:
                if begin_trace is not None:
                    begin_trace(request)
                submit(request)
            except Exception as error:
                failure = internal_errors.report("admission", error, f"of a request to model '{self.name}'", request.id)
                request.respond(InferenceResponse.failed(failure))

    def traced_one(self, whole_ns: int, trace_id: int, at: int) -> None:
        """Record the trace of a request to this version that was answered at ``at``. Thread-safe."""
        if self.statistics.stages is not None:
            self.statistics.stages.traced(whole_ns, trace_id, at)

    def given_up(self, why: CancelReason) -> None:
        """Count a request to this version whose caller no longer waits for the answer."""
        self.statistics.given_up[why] += 1

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return the calls to other models that block ``request``: one must be answered before it can be."""
        return self._scheduler.waits_for(request)

    def begun(self, request: InferenceRequest) -> bool:
        """Return whether an instance already executes ``request``, so that only this instance can answer it."""
        return self._scheduler.begun(request)

    def trace(self, tracing: Tracing | None) -> None:
        """Pass each request to ``tracing`` before it is queued; disable tracing if ``tracing`` is None.

        Call again whenever the trace settings change.
        """
        self.traced = tracing is not None
        if tracing is None:
            self._begin_trace = None
            return
        sampler = tracing.settings.sampler(self.name)
        self._begin_trace = partial(tracing.begin, version=self.version, sampler=sampler)
        self.notify_observers()

    def listen(self, listener: OnReport) -> None:
        """Call ``listener`` with each report of an engine, starting with the latest report of each instance."""
        self._listeners.append(listener)
        for instance in self.instances:
            if instance.report is not None:
                listener(instance, instance.report)

    def renew_origin(self, origin_of: Callable[[RunningVersion], str]) -> None:
        """Make the response cache, if enabled, query the origin of responses again."""
        if self._pipeline.cache_frontend is not None:
            self._pipeline.cache_frontend.renew(lambda: origin_of(self))

    def notify_observers(self) -> None:
        """Notify sinks that observe executions how their requests ran, from now on."""
        self._scheduler.notify_observers()

    def receive_buffer(self, size: int) -> memoryview | None:
        """Return writable memory that instances can read without a copy; None if none is left.

        For instances on GPUs in this process it is pinned, as long as there is room; for others, shared memory.
        """
        pinned = None if self.pinned is None else self.pinned.allocate(size)
        return self._arena.allocate(size) if pinned is None else pinned

    def _subscribe(self, instance: ModelInstance) -> None:
        """Subscribe to the reports of an instance, and process the one it may already have sent."""
        instance.on_report = self._reported
        if instance.report is not None:
            self._reported(instance, instance.report)

    def _reported(self, instance: ModelInstance, report: EngineReport | None) -> None:
        if self.tokens is None:
            self.tokens = TokenStatistics(0 if report is None else report.context_length)
        self.tokens.reported(instance, report, time.monotonic_ns())
        for listener in self._listeners:
            try:
                listener(instance, report)
            except Exception as error:
                internal_errors.report("admission", error, f"of model '{self.name}'")

    def _charge(self, instance: ModelInstance, report: EngineReport | None) -> None:
        assert self._meter is not None
        self._meter.reported(instance, report, time.monotonic_ns())

    def followed(self, requests: Sequence[InferenceRequest], rows: int, timings: ExecutionTimes) -> None:
        """Count a batch that followed another model in the same worker, without queueing."""
        self.statistics.followed(len(requests), rows, timings)
        if self._meter is not None:
            self._meter.followed(requests, timings, time.monotonic_ns())

    def _record_deadline_missed(self, request: InferenceRequest) -> None:
        if self.tokens is not None:
            self.tokens.too_late(request)

    def ask_ready(self, answered: Callable[[bool], None], patience: float = PROBE_PATIENCE) -> None:
        """Call ``answered`` with True if all active instances are ready. False if the last audit had findings.

        An instance that does not answer within ``patience`` seconds keeps its previous state.
        """
        if not self._scheduler.sound:
            answered(False)
            return
        all_ready([partial(instance.is_ready, patience=patience) for instance in self._active], answered)

    def audit(self) -> list[str]:
        """Repair inconsistencies between the queue and the instances; return a description of each for the log."""
        return self._scheduler.audit()

    async def resize(self, config: ModelConfig, config_json: dict[str, Any], plans: Sequence[InstancePlan]) -> None:
        """Change the set of instances: create new ones, keep those still planned, and drain and close the others.

        Return when these are closed, or after ``_LEAVE_SECONDS`` if their requests or ``finalize`` take longer.
        ``config`` may differ from the current one in its instance groups only. Raises ``NeriteError`` if an instance
        cannot be created; nothing has changed then.
        """
        new = [plan for plan in plans if plan not in self._instances]
        dispatcher = self._scheduler
        assert isinstance(dispatcher, Dispatcher)  # only dispatchers have instances
        made = await self._factory.make(new, config_json)
        self._unclosed.update(made)
        if self._meter is not None:
            for instance in made:
                self._meter.opened(instance, time.monotonic_ns())
        try:
            await self.adapters.equip(made)
        except NeriteError:
            for instance in made:
                self._close_one(instance)
            raise
        if self._closing:
            for instance in made:
                self._close_one(instance)
            raise Unavailable(f"model '{self.name}' is being unloaded")
        for plan, instance in zip(new, made, strict=True):
            self._instances[plan] = instance
            self._subscribe(instance)
            if plan.passive:
                instance.on_usable = _ignored
            else:
                dispatcher.add(instance)
        closed: list[asyncio.Future[None]] = []
        for plan in self._instances.keys() - set(plans):
            leaving = self._instances.pop(plan)
            closed.append(self._loop.create_future())
            close = partial(self._close_one, then=closed[-1].set_result)
            if plan.passive:
                close(leaving)
            else:
                dispatcher.remove(leaving, close)
        self.config, self.config_json = config, config_json
        if closed:
            await asyncio.wait(closed, timeout=_LEAVE_SECONDS)

    def watch(self, on_usable: Callable[[RunningVersion], None], on_lost: Callable[[InferenceRequest], object]) -> None:
        """Report when an instance goes down or comes up, and each request just before it fails for want of an instance.

        To be called once.
        """
        dispatcher = self._scheduler
        if isinstance(dispatcher, Dispatcher):
            before = dispatcher.on_usable

            def report_both() -> None:
                before()
                on_usable(self)

            dispatcher.on_usable = report_both
            dispatcher.on_lost = on_lost

    def hand_back(self, take: Callable[[InferenceRequest], bool], error: NeriteError) -> None:
        """Answer with ``error`` the waiting requests that ``take`` returns True for, because they can run elsewhere."""
        self._pipeline.first.hand_back(take, error)

    def server_stops(self) -> None:
        """Prepare for graceful shutdown: reject requests that would wait without ever being served."""
        self._scheduler.server_stops()

    def drain(self, drained: Callable[[], None]) -> None:
        """Call ``drained`` once no request waits or runs."""
        self._pipeline.first.when_drained(drained)

    def kill_busy(self, reason: str) -> None:
        """Kill the workers that are busy, because they are stuck. Their requests are lost, and new workers start."""
        for instance in self.instances:
            if isinstance(instance, RemoteInstance) and instance.busy:
                instance.kill(reason)

    def abandon(self, error: NeriteError) -> None:
        """Answer all waiting requests with ``error``."""
        self._pipeline.first.abandon(error)

    def close(self, closed: Callable[[], None]) -> None:
        """Release all resources, then call ``closed``. No request may be running."""
        self._closing = True
        if self._meter is not None:
            self._meter.close()
        self._on_closed = closed
        if not self._unclosed:
            self._check_closed()
        for instance in self.instances:
            self._close_one(instance)

    def _close_one(self, instance: ModelInstance, then: Callable[[None], object] = lambda _: None) -> None:
        def closed() -> None:
            self._unclosed.discard(instance)
            then(None)
            if instance.report is not None:
                self._reported(instance, None)
            if self._meter is not None:
                self._meter.closed(instance, time.monotonic_ns())
            self._check_closed()

        instance.close(closed)

    def _check_closed(self) -> None:
        """Release the resources shared by the instances once the last one is closed."""
        if self._unclosed or not self._closing:
            return
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        self._arena.on_segment.remove(self._start_trimming)
        self._arena.close()
        self._factory.close()
        self._on_closed()

    def _start_trimming(self, _segment: Segment) -> None:
        if self._trim_timer is None:
            self._trim()

    def _trim(self) -> None:
        """Release unused memory of large tensors now, and again every few seconds."""
        self._run_trim_steps(self._arena.trim())

    def _run_trim_steps(self, steps: Iterator[None]) -> None:
        for _ in steps:
            self._trim_timer = self._loop.call_later(TRIM_STEP, self._run_trim_steps, steps)
            return
        self._trim_timer = self._loop.call_later(TRIM_EVERY, self._trim)


def _ignored(instance: ModelInstance) -> None:
    """Ignore the state of a passive instance: it restarts by itself, and no request waits for it."""


PERIOD: Final = 1.0
"""Seconds between two audits."""


class Discrepancy(Exception):
    """An inconsistency between leased and returned batches that an audit found."""


class Auditor:
    """Audits the running versions of a server once a second. An idle version costs a few microseconds.

    Each request must be waiting, running or finished, and each instance idle, busy or down. A deviation is repaired,
    reported as an internal error, and makes its model unready until the next audit. A finding is always a bug in this
    program.
    """

    def __init__(self, versions: Callable[[], Iterable[RunningVersion]]) -> None:
        """``versions`` returns the versions that run now."""
        self.loop = WorkLoop("audit")
        self._versions = versions

    async def run(self) -> None:
        """Audit all versions periodically until cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            for version in [*self._versions()]:
                self.audit(version)
            self.loop.advanced()

    def audit(self, version: RunningVersion) -> None:
        """Audit one version and report each finding."""
        try:
            for finding in version.audit():
                report("audit", Discrepancy(finding))
        except Exception as error:
            report("audit", error, f"of model '{version.name}'")
