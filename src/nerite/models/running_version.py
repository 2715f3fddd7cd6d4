"""A model version that is loaded: its signature, its queue, its instances, its counts, and its end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from nerite.admission.idempotency import IdempotentQueue
from nerite.admission.tenants import TenantAdmission
from nerite.backends.registry import GENERATING
from nerite.cache.frontend import RequestQueueInterface, ResponseCacheFrontend
from nerite.cache.interface import ResponseCache
from nerite.config.model_config import ModelConfig
from nerite.config.model_parameters import tenants_share_cache
from nerite.config.options import QueueOptions
from nerite.core.engine_report import EngineReport
from nerite.core.errors import NeriteError, Unavailable
from nerite.core.failures import internal_errors, report
from nerite.core.request import CancelReason, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.interface import VersionScheduler
from nerite.instances.instance import PROBE_PATIENCE, ModelInstance, OnReport, all_ready
from nerite.instances.placement import InstancePlan
from nerite.models.instance_factory import InstanceFactory
from nerite.observability.statistics import VersionStatistics
from nerite.observability.token_metrics import TokenStatistics
from nerite.observability.tracing import Tracing
from nerite.scheduling.decider import BatchReason
from nerite.scheduling.load_shedding import LoadShedder
from nerite.scheduling.sequence import SequenceRequest
from nerite.workers.ipc.shared_memory import TRIM_EVERY, TRIM_STEP, Arena, Segment

_numbers = itertools.count(1)


class RunningVersion:
    """Takes requests until it is closed. For the loop's thread only."""

    __slots__ = (
        "__weakref__",
        "_arena",
        "_closing",
        "_entry",
        "_gate",
        "_instances",
        "_keyed",
        "_listeners",
        "_loop",
        "_maker",
        "_on_closed",
        "_open",
        "_queue",
        "_scheduler",
        "_submit",
        "_trim_timer",
        "cached",
        "config",
        "config_json",
        "content",
        "decoupled",
        "label",
        "load_seconds",
        "name",
        "number",
        "signature",
        "statistics",
        "tokens",
        "traced",
        "version",
        "worker",
    )

    def __init__(
        self,
        name: str,
        version: int,
        config: ModelConfig,
        config_json: dict[str, Any],
        signature: Signature,
        statistics: VersionStatistics,
        scheduler: VersionScheduler,
        instances: Mapping[InstancePlan, ModelInstance],
        maker: InstanceFactory,
        arena: Arena,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """``scheduler`` counts in ``statistics``; ``maker`` makes more instances, and is closed in the end."""
        self.name = name
        self.version = version
        self.label = str(version)
        self.config = config
        self.config_json = config_json
        self.signature = signature
        self.statistics = statistics
        self._instances = dict(instances)
        self.decoupled = bool(config.model_transaction_policy and config.model_transaction_policy.decoupled)
        self.number = next(_numbers)
        """No other version that this process loads has the same."""
        self.content = ""
        """A hash of what it was made from, once it is worked out."""
        self.tokens: TokenStatistics | None = None
        """What its engines have told; None before the first of them says anything."""
        self.traced = False
        self.worker = ""
        """The worker that it shares with other models, where a request can go on from one to the other; or nothing."""
        self.cached = bool(config.response_cache and config.response_cache.enable)
        """The model is one whose answers may come from a cache."""
        self.load_seconds = 0.0
        """How long the load took; set by whoever loaded it."""
        self._arena = arena
        self._loop = loop
        self._maker = maker
        self._open = set(instances.values())
        """Instances that are not closed yet: some may be leaving."""
        self._closing = False
        self._on_closed: Callable[[], None] = lambda: None
        self._listeners: list[OnReport] = []
        for plan, instance in instances.items():
            self._hear(instance)
            if plan.passive:
                instance.on_usable = _ignored
        self._scheduler = scheduler
        self._queue: RequestQueueInterface = scheduler
        self._gate: ResponseCacheFrontend | None = None
        self._keyed: IdempotentQueue | None = None
        self._entry = scheduler.submit if config.sequence_batching is None else self._submit_to_sequence
        self._submit = self._entry
        self._trim_timer: asyncio.TimerHandle | None = None
        arena.on_segment.append(self._has_memory)
        if arena.segments:  # a warm-up has used some
            self._trim()

    @property
    def instances(self) -> tuple[ModelInstance, ...]:
        """The instances, passive ones among them."""
        return tuple(self._instances.values())

    @property
    def _active(self) -> tuple[ModelInstance, ...]:
        """The instances that take batches."""
        return tuple(instance for plan, instance in self._instances.items() if not plan.passive)

    @property
    def pending(self) -> int:
        """Requests that wait for an instance."""
        return self._queue.pending

    @property
    def waiting(self) -> Mapping[int, int]:
        """Those of them in the queue of the instances, by priority."""
        return self._scheduler.waiting

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Why batches began, where requests make batches together."""
        return self._scheduler.releases

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        return self._queue.in_flight

    @property
    def most_rows(self) -> int:
        """Rows that may run together; 0: each request runs alone."""
        return self.config.max_batch_size if self.config.dynamic_batching is not None else 0

    @property
    def generates(self) -> bool:
        """Whether engines for language models run it."""
        return self.config.backend in GENERATING

    @property
    def restarts(self) -> int:
        """How often an instance had to be started again."""
        return sum(instance.restarts for instance in self.instances)

    @property
    def memory(self) -> int:
        """Bytes of memory that its workers have for themselves now; 0 where it has none."""
        return sum(instance.memory() for instance in self.instances)

    def submit(self, request: InferenceRequest) -> None:
        """Take a request whose header was bound to this version's signature; answer through ``respond``."""
        if [*map(len, request.data)] != request.header.sizes:
            wrong = self.signature.check_data(request)
            if wrong is not None:
                request.respond(InferenceResponse.failed(wrong))
                return
        self._submit(request)

    def traced_one(self, whole_ns: int, trace_id: int, at: int) -> None:
        """Take note of the trace of a request that went here and was answered, ``at`` this time. On any thread."""
        if self.statistics.stages is not None:
            self.statistics.stages.traced(whole_ns, trace_id, at)

    def given_up(self, why: CancelReason) -> None:
        """Take note that nobody waits any more for the answer to a request that went here."""
        self.statistics.given_up[why] += 1

    def _submit_to_sequence(self, request: InferenceRequest) -> None:
        self._scheduler.submit(SequenceRequest(request))

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return the calls to other models of which one must be answered before ``request``, which is here, can be."""
        return self._scheduler.waits_for(request)

    def begun(self, request: InferenceRequest) -> bool:
        """Return whether an instance has ``request``, which is here: it cannot be answered without that any more."""
        return self._scheduler.begun(request)

    def trace(self, tracing: Tracing | None) -> None:
        """Show ``tracing`` each request before it is queued; show none to anybody if it is None.

        Called again whenever its settings change.
        """
        entry = self._entry
        self.traced = tracing is not None
        if tracing is None:
            self._submit = entry
            return

        begin, version, sampler = tracing.begin, self.version, tracing.settings.sampler(self.name)

        def submit(request: InferenceRequest) -> None:
            begin(request, version, sampler)
            entry(request)

        self.tell_witnesses()
        self._submit = submit

    def let_in_by(self, tenant_admission: TenantAdmission, bounds: QueueOptions) -> None:
        """Have requests let in before they come to the queue, if that is called for. Called before ``put_before``.

        ``bounds`` are those of the queue.
        """
        if self.generates:
            dispatcher = self._scheduler
            assert isinstance(dispatcher, Dispatcher)
            engine = tenant_admission.engine_admission_queue(
                self.name, dispatcher, self.statistics, LoadShedder(bounds, self.name)
            )
            dispatcher.on_usable = lambda: engine.set_ready(dispatcher.able)
            engine.on_late = self._too_late
            self.listen(engine.reported)
            self._keyed = tenant_admission.keyed(engine)
            self._enter_by(self._keyed)
        else:
            admission_queue = tenant_admission.admission_queue(self.name, self._queue, self._entry, self.statistics)
            if admission_queue is not None:
                self._enter_by(admission_queue)

    def put_before(self, cache: ResponseCache) -> None:
        """Answer from a cache what was answered before. Called before there are requests."""
        queue = self._queue if self._keyed is None else self._keyed.queue
        shared = tenants_share_cache(self.config)
        self._gate = ResponseCacheFrontend(cache, queue, self.statistics, self.signature.outputs, shared=shared)
        if self._keyed is not None:
            self._keyed.queue = self._gate
        else:
            self._enter_by(self._gate)

    def _enter_by(self, queue: RequestQueueInterface) -> None:
        self._queue = queue
        self._entry = self._submit = queue.submit

    def listen(self, listener: OnReport) -> None:
        """Have ``listener`` called with what the engines of the instances report, and at once with the last of each."""
        self._listeners.append(listener)
        for instance in self.instances:
            if instance.report is not None:
                listener(instance, instance.report)

    def renew_origin(self, origin_of: Callable[[RunningVersion], str]) -> None:
        """Have the cache, if there is one before this, ask where answers come from now."""
        if self._gate is not None:
            self._gate.renew(lambda: origin_of(self))

    def tell_witnesses(self) -> None:
        """Tell sinks that want to know how their requests ran, from now on."""
        self._scheduler.tell_witnesses()

    def receive_buffer(self, size: int) -> memoryview | None:
        """Return writable memory that the instances can read as it is; None if there is none left."""
        return self._arena.allocate(size)

    def _hear(self, instance: ModelInstance) -> None:
        """Listen to what an instance reports. It may have said something before."""
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

    def _too_late(self, request: InferenceRequest) -> None:
        if self.tokens is not None:
            self.tokens.too_late(request)

    def ask_ready(self, answered: Callable[[bool], None], patience: float = PROBE_PATIENCE) -> None:
        """Ask every instance that takes requests whether it can serve; all must. False after an audit with findings.

        An instance that does not answer within ``patience`` seconds is as ready as it was.
        """
        if not self._scheduler.sound:
            answered(False)
            return
        all_ready([partial(instance.is_ready, patience=patience) for instance in self._active], answered)

    def audit(self) -> list[str]:
        """Restore what is lost between the queue and the instances; return what that was, for the log."""
        return self._scheduler.audit()

    async def resize(self, config: ModelConfig, config_json: dict[str, Any], plans: Sequence[InstancePlan]) -> None:
        """Have these instances from now on: those that there are stay, the others finish what they run.

        ``config`` differs from that of before in its instance groups only. Raises ``NeriteError`` where one cannot be
        made; nothing has changed then.
        """
        new = [plan for plan in plans if plan not in self._instances]
        dispatcher = self._scheduler
        assert isinstance(dispatcher, Dispatcher)  # nothing else has instances
        made = await self._maker.make(new, config_json)
        self._open.update(made)
        if self._closing:
            for instance in made:
                self._close_one(instance)
            raise Unavailable(f"model '{self.name}' is being unloaded")
        for plan, instance in zip(new, made, strict=True):
            self._instances[plan] = instance
            self._hear(instance)
            if plan.passive:
                instance.on_usable = _ignored
            else:
                dispatcher.add(instance)
        for plan in self._instances.keys() - set(plans):
            leaving = self._instances.pop(plan)
            if plan.passive:
                self._close_one(leaving)
            else:
                dispatcher.remove(leaving, self._close_one)
        self.config, self.config_json = config, config_json

    def server_stops(self) -> None:
        """Take note that the server stops as soon as all is answered that is here: refuse what would wait in vain."""
        self._scheduler.server_stops()

    def drain(self, drained: Callable[[], None]) -> None:
        """Call ``drained`` once nothing waits or runs any more."""
        self._queue.when_drained(drained)

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that waits with ``error``."""
        self._queue.abandon(error)

    def close(self, closed: Callable[[], None]) -> None:
        """Give everything back; ``closed`` is called when that is done. Nothing may run any more."""
        self._closing = True
        self._on_closed = closed
        if not self._open:
            self._check_closed()
        for instance in self.instances:
            self._close_one(instance)

    def _close_one(self, instance: ModelInstance) -> None:
        def closed() -> None:
            self._open.discard(instance)
            if instance.report is not None:
                self._reported(instance, None)
            self._check_closed()

        instance.close(closed)

    def _check_closed(self) -> None:
        """Give back what the instances shared, if the last of them is closed and no more may come."""
        if self._open or not self._closing:
            return
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        self._arena.on_segment.remove(self._has_memory)
        self._arena.close()
        self._maker.close()
        self._on_closed()

    def _has_memory(self, _segment: Segment) -> None:
        if self._trim_timer is None:
            self._trim()

    def _trim(self) -> None:
        """Give back memory of large tensors that is not used, from now on every few seconds."""
        self._go_on_trimming(self._arena.trim())

    def _go_on_trimming(self, steps: Iterator[None]) -> None:
        for _ in steps:
            self._trim_timer = self._loop.call_later(TRIM_STEP, self._go_on_trimming, steps)
            return
        self._trim_timer = self._loop.call_later(TRIM_EVERY, self._trim)


def _ignored(instance: ModelInstance) -> None:
    """Take no note of how a passive instance is: it comes back by itself, and nobody waits for it."""


# Audits the running model versions once a second.
#
# Each request waits, runs or has ended, and each instance is idle, at work or down. What differs is restored,
# reported as an internal error, and makes its model unready until the next audit. A finding is always a mistake in
# this program.

PERIOD: Final = 1.0
"""Seconds between two audits."""


class Discrepancy(Exception):
    """What was handed out is not what came back."""


class Auditor:
    """For the versions of a server. A version without requests costs it some microseconds."""

    def __init__(self, versions: Callable[[], Iterable[RunningVersion]]) -> None:
        """``versions`` returns those that run now."""
        self._versions = versions

    async def run(self) -> None:
        """Audit again and again, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            for version in [*self._versions()]:
                self.audit(version)

    def audit(self, version: RunningVersion) -> None:
        """Audit one version, and report each finding."""
        try:
            for finding in version.audit():
                report("audit", Discrepancy(finding))
        except Exception as error:
            report("audit", error, f"of model '{version.name}'")
