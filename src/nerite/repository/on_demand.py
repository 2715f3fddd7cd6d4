"""Loads models when requests ask for them, and unloads the least recently used when memory is short.

``ModelResidency`` decides; this follows its orders through the model manager, measures what models take, and tells
whoever waits that a load has failed. For the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from typing import Any, Final

from nerite.config.model_parameters import DemandMode
from nerite.config.options import RepositoryOptions
from nerite.core.errors import NeriteError, NotFound, Unavailable
from nerite.core.failures import report
from nerite.core.sizes import size_text
from nerite.core.work_loop import STALL_SECONDS, WorkLoop
from nerite.models.running_version import RunningVersion
from nerite.repository.demand_figures import DemandFigures
from nerite.repository.demand_survey import DemandSurvey, SurveyedModel, demanded
from nerite.repository.load_waits import Claims, retry_seconds
from nerite.repository.manager import ModelManager
from nerite.repository.memory_use import (
    MeasuredLoad,
    MeasuredLoads,
    MemoryGauge,
    MemoryUse,
    ModelMemory,
    expected_rest,
    grown,
)
from nerite.repository.version_state import ModelState, VersionState
from nerite.scheduling.model_residency import Activity, ModelResidency, ResidencyOrder, Step
from nerite.scheduling.residency_table import HOST, Amounts, Residence

_log = logging.getLogger("nerite.repository")
_POLL_SECONDS: Final = 0.05
"""Between two looks whether a busy model has become idle, while another waits for its memory."""
_MEASURE_SECONDS: Final = 10.0
_NS: Final = 1_000_000_000


class OnDemandModels:
    """The models of a server that requests have loaded."""

    def __init__(
        self,
        manager: ModelManager,
        survey: DemandSurvey,
        gauge: MemoryGauge,
        measured: MeasuredLoads,
        options: RepositoryOptions,
        loader: Executor,
    ) -> None:
        self._manager = manager
        self._survey = survey
        self._gauge = gauge
        self._measured = measured
        self._options = options
        self._loader = loader
        self.loop = WorkLoop("demand", stall_seconds=STALL_SECONDS + 3 * _MEASURE_SECONDS)
        self.residency = ModelResidency(gauge.budget(options.host_budget, options.gpu_budget), options.load_threads)
        """Which models are in memory, and which are wanted."""
        self.figures = DemandFigures(self.residency)
        """Counters for the metrics."""
        self.on_failed: Callable[[str, NeriteError], None] = lambda model, error: None
        """Called when a model that requests wait for could not be loaded."""
        self.on_loaded: Callable[[str], None] = lambda model: None
        """Told that a model was loaded."""
        self._models: dict[str, SurveyedModel] = {}
        self._wants: dict[str, dict[object, Claims]] = {}
        """What waits for each model, by process."""
        self._awaited: dict[str, list[asyncio.Future[None]]] = {}
        """Loads that were ordered rather than wanted by requests."""
        self._loading: dict[object, list[str]] = {}
        """The models of each load in progress; none once they are loaded and only have to be measured."""
        self._overlapped: dict[object, set[str]] = {}
        """The models that were loaded by others during each load in progress."""
        self._memory = ModelMemory(gauge, lambda: [*manager.running(), *manager.sleeping.all()], loader)
        self._wake_seconds: dict[str, float] = {}
        """How long models took to wake."""
        self._trimming = False
        self._strangers = 0
        """Memory of the workers of models that clients have loaded."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._unwritten = False
        self._stopped = False

    # What is asked for.

    def want(self, source: object, model: str, claims: Claims) -> None:
        """Take note of the tenants whose requests wait for a model in a process; empty: none does."""
        wants = self._wants.setdefault(model, {})
        if claims:
            wants[source] = claims
        else:
            wants.pop(source, None)
        if not wants:
            del self._wants[model]
            if not self._awaited.get(model):
                self.residency.leave(model)
            return
        now = time.monotonic_ns()
        if model not in self.residency:
            self._in_vain(model, NotFound(f"Request for unknown model: '{model}' is not found"))
            return
        why, until_ns = self.residency.obstacle(model, now)
        if until_ns:
            error = Unavailable(f"model '{model}' could not be loaded: {why}", math.ceil((until_ns - now) / _NS))
            self._in_vain(model, error)
            return
        order = min(min(each.values()) for each in wants.values())
        self.residency.want(model, order, now, tenants={tenant for each in wants.values() for tenant in each})
        self._act_soon()

    def gone(self, source: object) -> None:
        """Forget what a process has waited for."""
        for model in [model for model, wants in self._wants.items() if source in wants]:
            self.want(source, model, {})

    async def load(self, model: str) -> None:
        """Load a model within the budget, or again if it is loaded. Raises ``NeriteError``."""
        if self.residency.residence(model) is Residence.RESIDENT:
            await self._manager.load(model)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(model, []).append(done)
        self.residency.want(model, 0, time.monotonic_ns(), ordered=True)
        self._act_soon()
        try:
            await done
        finally:
            if done in (waiting := self._awaited.get(model, [])):
                waiting.remove(done)

    def manages(self, model: str) -> bool:
        """Return whether a model is loaded on demand, or pinned."""
        return model in self.residency

    def can_load(self, model: str) -> bool:
        """Return whether a request for a model is likely to be answered after a load."""
        known = self._models.get(model)
        if known is None or known.mistake:
            return False
        return not self.residency.obstacle(model, time.monotonic_ns())[1]

    def obstacle_to(self, model: str) -> str:
        """Return why a model that requests wait for is not loaded yet."""
        if self.residency.residence(model) is Residence.LOADING:
            return "its load has not ended"
        return self.residency.shortage(model, self._activity)

    # The repositories.

    async def start(self) -> list[tuple[str, NeriteError]]:
        """Read the repositories, and load the pinned models; return the failures."""
        self._gauge.return_large_blocks()
        await self._in_loader(self._measured.read)
        found = await self._in_loader(self._survey.read)
        self._follow(found)
        failures = await self._manager.load_all(sorted(each.name for each in found.values() if each.routed))
        pinned = sorted(name for name, each in self._models.items() if each.mode is DemandMode.PINNED)
        outcomes = await asyncio.gather(*map(self.load, pinned), return_exceptions=True)
        for name, outcome in zip(pinned, outcomes, strict=True):
            if isinstance(outcome, NeriteError):
                failures.append((name, outcome.without_frames()))
            elif outcome is not None:
                raise outcome
        if not self._models:
            return failures
        budget = ", ".join(f"{size_text(size)} of {place}" for place, size in self.residency.budget.items())
        _log.info(
            "%d models are loaded on demand, %d are pinned, within a budget of %s memory",
            len(self._models) - len(pinned),
            len(pinned),
            budget,
        )
        return failures

    async def run(self) -> None:
        """Measure, and follow changes of the repositories, until cancelled."""
        read_at = time.monotonic() + self._options.poll_secs
        while True:
            await asyncio.sleep(min(_MEASURE_SECONDS, self._options.poll_secs or _MEASURE_SECONDS))
            with self.loop.step("measurements"):
                await self._measure_all()
            if self._options.poll_secs and time.monotonic() >= read_at:
                read_at = time.monotonic() + self._options.poll_secs
                with self.loop.step("repositories"):
                    self._follow(await self._in_loader(self._survey.read))

    async def close(self) -> None:
        """Begin nothing more, and keep the measurements."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._unwritten:
            self._measured.write(self._measured.encoded())

    def _follow(self, found: dict[str, SurveyedModel]) -> None:
        """Take over what the survey has found."""
        now = {each.name: each for each in demanded(found)}
        for name, each in now.items():
            if self._models.get(name) != each:
                self._describe(each)
                if self.residency.residence(name) is Residence.ASLEEP:
                    self._run(self._end_sleep(name))
        self.adopt()
        for name in self._models.keys() - now.keys():
            for record in self._manager.records.all_named(name):
                record.on_demand = False
                if not (record.running or record.asleep):
                    self._manager.records.forget(record)
            if self.residency.residence(name) is Residence.ABSENT:
                self.residency.forget(name)
            elif self.residency.residence(name) is Residence.ASLEEP:
                self._run(self._end_sleep(name))
        if self._models or now:
            self._models = now
            self._manager.changed()
            self._act_soon()

    def _describe(self, model: SurveyedModel) -> None:
        known = self._measured.get(model.name, model.digest) if model.digest else None
        self.residency.describe(
            model.name,
            model.estimate if known is None else known.size,
            model.needs,
            pinned=model.mode is DemandMode.PINNED,
            keep_alive_ns=round(model.keep_alive * _NS),
        )
        if known is not None:
            self.residency.expect_seconds(model.name, known.seconds)
        record = self._manager.records.open(model.namespace, model.name)
        record.on_demand = True
        record.text_task = model.text_task
        record.retry_after = retry_seconds(self.residency.seconds(model.name))
        if record.running or record.lock.locked():
            return
        record.states = {version: record.unloaded() for version in model.versions}
        if model.mistake or not record.states:
            why = model.mistake or record.unloaded().reason
            record.states = {-1: VersionState(ModelState.UNAVAILABLE, why)}

    # Orders.

    def _act_soon(self) -> None:
        if not self._scheduled and not self._stopped:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._act)

    def _act(self) -> None:
        self._scheduled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stopped:
            return
        now = time.monotonic_ns()
        self._reconcile(now)
        leaving: list[ResidencyOrder] = []
        for order in self.residency.decide(now, self._activity):
            if order.step is Step.LOAD:
                self._run(self._load(order.model))
            elif order.step is Step.REFUSE:
                self.figures.loads["refused"] += 1
                text = f"model '{order.model}' cannot be loaded: {order.reason}"
                _log.warning("%s", text)
                self._in_vain(order.model, Unavailable(text))
            else:
                leaving.append(order)
        if leaving:
            self._run(self._dismiss(leaving))
        self._set_timer(now)

    def _set_timer(self, now_ns: int) -> None:
        """Look again when a model that is in the way may have become idle, or has not been used for long enough."""
        seconds = []
        if any(self.residency.residence(name) is Residence.ABSENT for name in self.residency.wanted):
            seconds.append(_POLL_SECONDS)
        next_ns = self.residency.next_change_ns(now_ns)
        if next_ns is not None:
            seconds.append(max((next_ns - now_ns) / _NS, _POLL_SECONDS))
        if seconds:
            self._timer = asyncio.get_running_loop().call_later(min(seconds), self._act)

    def _reconcile(self, now_ns: int) -> None:
        """Note when models were used, and which were unloaded by clients."""
        wall_ns = time.time_ns()
        for name in self.residency.asleep():
            if not self._manager.sleeping.of(name):
                self.residency.unloaded(name)
        for name in self.residency.in_memory():
            versions = self._versions(name)
            if not versions:
                self.residency.unloaded(name)
                self._memory.here.pop(name, None)
            for version in versions:
                if version.in_flight:
                    self.residency.used(name, now_ns)
                elif last := version.statistics.last_inference_ms:
                    self.residency.used(name, now_ns - max(wall_ns - last * 1_000_000, 0))

    def adopt(self) -> None:
        """Take note of models that clients have loaded."""
        now = time.monotonic_ns()
        for name in {version.name for version in self._manager.running()}:
            if name in self.residency and self.residency.residence(name) is Residence.ABSENT:
                self.residency.loaded(name, self.residency.size(name), self.residency.seconds(name), now)
                self._settle(name)

    def _versions(self, name: str) -> list[RunningVersion]:
        return [version for record in self._manager.records.all_named(name) for version in record.running.values()]

    def _activity(self, name: str) -> Activity:
        versions = self._versions(name)
        if any(version.holds_sequences for version in versions):
            return Activity.HOLDS
        return Activity.WORKS if any(version.in_flight for version in versions) else Activity.IDLE

    async def _load(self, name: str) -> None:
        """Load a model, and measure it."""
        members = [name, *(each for each in self.residency.closure(name) if not self._versions(each) and each != name)]
        load = object()
        overlapped = self._overlapped[load] = {each for others in self._loading.values() for each in others}
        for others in self._overlapped.values():
            others.update(members)
        overlapped.difference_update(members)
        self._loading[load] = members
        before = await self._in_loader(self._gauge.use)
        began = time.monotonic()
        try:
            woken = {each for each in members if await self._manager.sleeping.wake(each)}
            if name not in woken:
                await self._manager.load(name)
        except NeriteError as error:
            self._failed(name, error.without_frames())
            return
        except Exception as error:
            self._failed(name, report("admission", error, f"during the load of model '{name}'"))
            return
        else:
            seconds, ended_ns = time.monotonic() - began, time.monotonic_ns()
            self.figures.wakes += len(woken)
            if name in woken:
                self._wake_seconds[name] = seconds
                self._loaded(name, members, self.residency.seconds(name), ended_ns)
                _log.info("woke '%s' in %.2f s", name, seconds)
                return
            self._loaded(name, members, seconds, ended_ns)
            self.figures.loads["loaded"] += 1
            self.figures.load_seconds.note(seconds)
            # A load that begins while this one is measured finds its memory in use: they do not overlap.
            del self._overlapped[load]
            self._loading[load] = []
            after = await self._in_loader(self._gauge.use)
            growth = grown(before, after)
            members = [each for each in members if each not in woken]
            await self._measure_load(members, sorted(overlapped), growth)
            self._tell(name, seconds)
        finally:
            del self._loading[load]
            self._overlapped.pop(load, None)
            self._act_soon()

    def _loaded(self, name: str, members: list[str], seconds: float, ended_ns: int) -> None:
        """Take note of a load that has succeeded; what the models take is measured afterwards."""
        for each in members:
            if self._versions(each):
                took = seconds if each == name else self.residency.seconds(each)
                self.residency.loaded(each, self.residency.size(each), took, ended_ns)
                self.on_loaded(each)
            else:  # a client has unloaded it meanwhile
                self.residency.unloaded(each)
            self._settle(each)
        for record in self._manager.records.all_named(name):
            record.retry_after = retry_seconds(seconds)

    async def _measure_load(self, members: list[str], others: list[str], growth: Amounts) -> None:
        weights = {each: sum(self.residency.size(each).values()) + 1 for each in (*members, *others)}
        whole = sum(weights.values())
        for each in members:
            share = weights[each] / whole
            amounts = {place: round(n * share) for place, n in growth.items()}
            versions, files = self._versions(each), self._files(each)
            size = await self._memory.loaded(each, versions, amounts, files)
            if versions := self._versions(each):
                self.residency.measured(each, size)
                self._keep(each, size, self.residency.seconds(each))
                rest = expected_rest(size, files) if all(version.can_sleep for version in versions) else None
                self.residency.can_sleep(each, rest)
            else:
                self._memory.here.pop(each, None)

    def _files(self, name: str) -> int:
        """Return what the files of a model take, by which it is estimated before it is measured."""
        known = self._models.get(name)
        return 0 if known is None else known.estimate.get(HOST, 0)

    def _keep(self, name: str, size: Amounts, seconds: float) -> None:
        known = self._models.get(name)
        if known is not None and known.digest:
            self._measured.put(name, MeasuredLoad(known.digest, dict(size), seconds))
            self._unwritten = True

    def _tell(self, name: str, seconds: float) -> None:
        took = " and ".join(f"{size_text(size)} of {place}" for place, size in self.residency.size(name).items())
        used = self.residency.used_bytes()
        rest = ", ".join(
            f"{size_text(used.get(place, 0))} of {size_text(limit)} of {place} memory are used"
            for place, limit in self.residency.budget.items()
        )
        _log.info("loaded '%s' on demand in %.2f s; it takes %s memory; %s", name, seconds, took or "no", rest)

    def _failed(self, name: str, error: NeriteError) -> None:
        self.figures.loads["failed"] += 1
        now = time.monotonic_ns()
        self.residency.failed(name, error.message, now)
        _, until_ns = self.residency.obstacle(name, now)
        wait = math.ceil((until_ns - now) / _NS)
        self._settle(name, error)
        self.on_failed(name, Unavailable(f"model '{name}' could not be loaded: {error.message}", wait))

    def _in_vain(self, model: str, error: NeriteError) -> None:
        self._settle(model, error)
        self.on_failed(model, error)

    def _settle(self, model: str, error: NeriteError | None = None) -> None:
        """End the calls of ``load`` for a model."""
        for done in self._awaited.pop(model, ()):
            if not done.done() and error is None:
                done.set_result(None)
            elif not done.done() and error is not None:
                done.set_exception(error)

    async def _dismiss(self, orders: Iterable[ResidencyOrder]) -> None:
        """Unload models in this order, or put them to sleep; one that has got a request meanwhile stays."""
        for order in orders:
            idle = order.step is not Step.DRAIN

            def stays(model: str = order.model, worst: Activity = Activity.IDLE if idle else Activity.WORKS) -> bool:
                return any(self._activity(each) > worst for each in self.residency.needed_by(model))

            if order.step is Step.SLEEP and await self._put_to_sleep(order.model, stays):
                continue
            closing: list[asyncio.Task[None]] = []
            kept = False
            for record in self._manager.records.all_named(order.model):
                if record.running:
                    tasks = await self._manager.unload_one(record, unless=stays)
                    kept = kept or bool(record.running and not record.going)
                    closing += tasks
            if kept:
                self.residency.kept(order.model, time.monotonic_ns())
                continue
            await self._manager.sleeping.unload(order.model)
            reason = "drained" if order.step is Step.DRAIN else order.reason
            self.figures.evictions[reason] += 1
            _log.info("evicted '%s': %s", order.model, _REASONS[reason])
            if not idle and closing and self.residency.closure(order.model) != [order.model]:
                await asyncio.wait(closing)  # its requests still need the models behind it
            self._run(self._closed(order.model, closing))

    async def _put_to_sleep(self, name: str, stays: Callable[[], bool]) -> bool:
        """Have a model sleep; return False if it is still there, because it works or an ensemble needs it."""
        before, began = await self._in_loader(self._gauge.use), time.monotonic()
        closing = await self._manager.sleeping.put_to_sleep(name, stays)
        versions = self._manager.sleeping.of(name)
        if closing:
            self.residency.can_sleep(name, None)
            self._run(self._closed(name, closing))
        elif versions:
            after = await self._in_loader(self._gauge.use)
            size, freed = self.residency.size(name), grown(after, before)
            rest = {place: max(amount - freed.get(place, 0), 0) for place, amount in size.items()}
            measured = await self._memory.asleep(versions, self._files(name))
            self.residency.fell_asleep(name, {**rest, **measured})
            self.figures.sleeps += 1
            for record in self._manager.records.all_named(name):
                record.retry_after = retry_seconds(self._wake_seconds.get(name, 1.0))
            _log.info("put '%s' to sleep in %.2f s: another model needs its memory", name, time.monotonic() - began)
        self._act_soon()
        return bool(closing or versions)

    async def _end_sleep(self, name: str) -> None:
        """Unload a model that sleeps: it has changed, is gone from the repository, or its process has ended."""
        await self._manager.sleeping.unload(name)
        if self.residency.residence(name) is Residence.ASLEEP:
            self.residency.unloaded(name)
            self._forgotten(name)
        for record in self._manager.records.all_named(name) if name not in self._models else ():
            if not record.running:
                self._manager.records.forget(record)
        self._act_soon()

    def _forgotten(self, name: str) -> None:
        """Forget a model that is no longer in memory if it is gone from the repository."""
        if name not in self._models and name in self.residency:
            self.residency.forget(name)
        for record in self._manager.records.all_named(name):
            record.retry_after = retry_seconds(self.residency.seconds(name))

    async def _closed(self, name: str, closing: list[asyncio.Task[None]]) -> None:
        if closing:
            await asyncio.wait(closing)
        self._memory.here.pop(name, None)
        self._measure_overhead(await self._in_loader(self._gauge.use))
        self.residency.unloaded(name)
        self._forgotten(name)
        self._act_soon()

    async def _give_back(self) -> None:
        """Give freed memory back to the system, and measure what the server's process still has of it."""
        use = await self._memory.trim()
        self._trimming = False
        self._measure_overhead(use)
        self._act_soon()

    # Measurements.

    async def _measure_all(self) -> None:
        """Measure the workers of the models in memory again: they grow with use."""
        self.adopt()
        for name in self.residency.in_memory():
            versions = self._versions(name)
            now = await self._memory.of_workers(versions)
            if not now:
                continue
            size = {**self.residency.size(name), **now}
            size[HOST] = now.get(HOST, 0) + self._memory.here.get(name, 0)
            self.residency.measured(name, size)
            self._keep(name, size, self.residency.seconds(name))
        for name in self.residency.asleep():
            versions = self._manager.sleeping.of(name)
            if not all(instance.usable for version in versions for instance in version.instances):
                await self._end_sleep(name)  # a new process would take the memory of the GPU again
                continue
            measured = await self._memory.asleep(versions, self._files(name))
            if self.residency.residence(name) is Residence.ASLEEP:
                self.residency.fell_asleep(name, {**self.residency.taken(name), **measured})
        strangers = [each for each in self._manager.running() if each.name not in self.residency]
        amounts = await self._memory.of_workers(strangers)
        self._strangers = amounts.get(HOST, 0)
        self._measure_overhead(await self._in_loader(self._gauge.use))
        if self._unwritten:
            self._unwritten = False
            await self._in_loader(self._measured.write, self._measured.encoded())
        self._act_soon()

    def _measure_overhead(self, use: MemoryUse) -> None:
        """Find out what is used by the server itself, and on GPUs by other processes. Not while a load changes it."""
        if self._loading:
            return
        if not self._trimming and self._memory.is_trim_due(use, self.residency.budget[HOST]):
            self._trimming = True
            self._run(self._give_back())
        overhead = {HOST: self._memory.of_server(use) + self._strangers}
        sizes = [self.residency.taken(name) for name in (*self.residency.in_memory(), *self.residency.asleep())]
        for place, amount in use.gpus.items():
            overhead[place] = max(amount - sum(size.get(place, 0) for size in sizes), 0)
        self.residency.measured_overhead(overhead)

    async def _in_loader(self, call: Callable[..., Any], *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._loader, call, *arguments)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._reported(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reported(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            report("admission", error, "while a model was loaded or unloaded on demand")


_REASONS: Final = {
    "memory": "another model needs its memory, and it was the least recently used",
    "drained": "another model needs its memory, and no other was idle; its requests have been answered",
    "keep-alive": "it had no request for as long as its keep-alive",
}
