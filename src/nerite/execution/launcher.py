"""Makes model versions run: decides where instances live, starts them, and puts a queue before them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nerite.backends import registry
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.python.environment import find_interpreter
from nerite.config.json_form import to_json
from nerite.config.model_config import ModelConfig
from nerite.config.queue_bounds import bounds_of
from nerite.core.errors import InvalidArgument
from nerite.core.signature import Signature
from nerite.execution import households, messages, recorded_requests, warm_up_data
from nerite.execution.arena import Arena
from nerite.execution.dispatcher import Dispatcher
from nerite.execution.ensemble import Ensemble
from nerite.execution.households import Households
from nerite.execution.instance_plan import instance_plans
from nerite.execution.rationed_roster import RationedRoster
from nerite.execution.rations import Rations
from nerite.execution.rehearsal import Rehearsal
from nerite.execution.runner_makers import NativeMaker, NoInstances, RationedMaker, RunnerMaker, WorkerMaker
from nerite.execution.running_version import RunningVersion
from nerite.execution.scheduling_choice import preserves_ordering, roster
from nerite.execution.sequence_dress import SequenceDress
from nerite.execution.surroundings import Surroundings
from nerite.execution.thread_counts import thread_variables
from nerite.execution.warm_up import WarmMaker
from nerite.execution.warm_up_data import Sample
from nerite.execution.worker import write_context
from nerite.execution.worker_plan import WorkerPlan
from nerite.observability import counting
from nerite.observability.load_times import stage
from nerite.scheduling.admission import Admission
from nerite.scheduling.ensemble.graph import Graph, Part

_log = logging.getLogger("nerite.execution")


class Launcher:
    """One for the server. Its coroutines are for the loop; the blocking work is done by the loader."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._households = Households()

    def complete(self, backend: str, context: ModelContext) -> Mapping[str, Any]:
        """Have a backend complete a configuration. Blocks. Raises ``NeriteError``."""
        if not is_isolated(context):
            return registry.backend_of(context).complete(context)
        instance = InstanceContext(f"{context.name}_auto_complete")
        arena = Arena()
        plan = self._plan(backend, context, instance, arena, _interpreter(context))
        ask = partial(self._around.errands.take, asker=plan.asker(loading=True))
        process, channel = plan.start(instance.name, arena, ask)
        try:
            completed: Mapping[str, Any] = channel.ask(messages.COMPLETE, write_context(backend, context))
        finally:
            channel.close()
            process.kill()
        return completed

    async def launch(self, config: ModelConfig, context: ModelContext, signature: Signature) -> RunningVersion:
        """Load a model version and all its instances. Raises ``NeriteError``; nothing is left behind then."""
        began = time.monotonic()
        scheduler = await self._around.blocking(roster, config, context.directory)
        bounds = bounds_of(config, self._around.queue)
        admission = Admission(bounds, context.name)
        plans = instance_plans(config, self._around.policies)
        arena = Arena()
        self._around.guests.host(arena)
        warm_up = await self._around.blocking(self._samples, config, context, signature)
        maker = await self._maker(config, context, arena)
        if warm_up:
            rehearsal = await self._around.blocking(_rehearsal, config, context.directory)
            maker = WarmMaker(maker, context.name, warm_up, rehearsal)
        rations = None if self._around.limiter is None else Rations(self._around.limiter, context.name)
        if rations is not None:
            maker = RationedMaker(maker, rations)
        elif any(group.rate_limiter is not None for group in config.instance_group):
            _log.info(
                "'%s': 'instance_group.rate_limiter' has no effect: start the server with --rate-limit=execution_count",
                context.name,
            )
        config_json = to_json(config)
        try:
            runners = await maker.make(plans, config_json)
        except BaseException:  # whatever it was: nothing may be left behind
            maker.close()
            arena.close()
            raise
        statistics = counting.begin(self._around.metrics, config)
        instances = dict(zip(plans, runners, strict=True))
        dispatcher = Dispatcher(
            scheduler if rations is None else RationedRoster(scheduler, rations),
            [runner for plan, runner in instances.items() if not plan.passive],
            statistics,
            self._around.loop,
            self._around.sentry,
            admission,
            preserve_ordering=preserves_ordering(config),
        )
        if rations is not None:
            rations.granted = dispatcher.look_soon
        running = RunningVersion(
            context.name,
            context.version,
            config,
            config_json,
            signature,
            statistics,
            dispatcher,
            instances,
            maker,
            arena,
            self._around.loop,
        )
        running.let_in_by(self._around.reception, bounds)
        # Whoever has to be let in, or may be answered from elsewhere, does not go on in the worker.
        alone = running.decoupled or running.cached or config.backend in registry.GENERATING
        if rations is None and config.sequence_batching is None and not alone:
            running.worker = households.shared_by(context)
        running.load_seconds = time.monotonic() - began
        return running

    def assemble(
        self, name: str, version: int, config: ModelConfig, signature: Signature, parts: Sequence[Part]
    ) -> RunningVersion:
        """Make a version of an ensemble run. ``parts`` are the models of its steps, which it was checked against."""
        assert config.ensemble_scheduling is not None
        arena = Arena()
        self._around.guests.host(arena)
        statistics = counting.begin(self._around.metrics, config)
        limit = config.ensemble_scheduling.max_inflight_requests
        if limit:
            _log.info("Ensemble model '%s' configured with max_inflight_requests: %d", name, limit)
        graph = Graph(signature, str(version), config.ensemble_scheduling.step, parts)
        decoupled = any(part.decoupled for part in parts)
        bounds = bounds_of(config, self._around.queue)
        admission = Admission(bounds, name)
        scheduler = Ensemble(
            graph, self._around.door, statistics, self._around.loop, admission, decoupled=decoupled, most_inflight=limit
        )
        running = RunningVersion(
            name,
            version,
            config,
            to_json(config),
            signature,
            statistics,
            scheduler,
            {},
            NoInstances(),
            arena,
            self._around.loop,
        )
        running.let_in_by(self._around.reception, bounds)
        return running

    async def resize(self, running: RunningVersion, config: ModelConfig) -> None:
        """Give a running version the instances that ``config`` asks for. Raises as ``launch``; it is as before then."""
        await running.resize(config, to_json(config), instance_plans(config, self._around.policies))

    async def _maker(self, config: ModelConfig, context: ModelContext, arena: Arena) -> RunnerMaker:
        run = self._around.blocking
        if await run(is_isolated, context):
            # Not on the loop: an environment may have to be made.
            with stage("environment"):
                interpreter = await run(_interpreter, context)

            def plan(instance: InstanceContext) -> WorkerPlan:
                return self._plan(config.backend, context, instance, arena, interpreter)

            return WorkerMaker(plan, self._households)
        with stage("initialize"):
            found = await run(registry.backend_of, context)
            model = await run(found.open, context)
        return NativeMaker(model, self._around.loop, self._around.loader, on_loop_only=_mode(context) == "in_process")

    def _samples(self, config: ModelConfig, context: ModelContext, signature: Signature) -> list[Sample]:
        """Return what each instance has to answer before it is ready. Blocks. Raises ``NeriteError``."""
        directory = context.directory
        return [
            *warm_up_data.samples(config, signature, directory, _skipped),
            *recorded_requests.samples(config, signature, directory, self._around.read_request),
        ]

    def _plan(
        self,
        backend: str,
        context: ModelContext,
        instance: InstanceContext,
        arena: Arena,
        interpreter: Path | None,
    ) -> WorkerPlan:
        return WorkerPlan(
            backend,
            context,
            instance,
            interpreter,
            thread_variables(context, instance, os.environ),
            arena,
            self._around,
            households.shared_by(context),
        )


def _rehearsal(config: ModelConfig, directory: Path) -> Callable[[], Rehearsal] | None:
    """Return what makes samples requests of sequences, if the model has any. Blocks. Raises as ``SequenceDress``."""
    batching = config.sequence_batching
    if batching is None:
        return None
    return partial(Rehearsal, SequenceDress(config, directory), iterative=batching.iterative_sequence)


def _skipped(name: str) -> None:
    _log.debug("Skipping batch 0 warmup sample '%s'", name)


def is_isolated(context: ModelContext) -> bool:
    """Return whether the instances of a model live in worker processes: as it says itself, else as its backend does.

    May import the backend, so it blocks. Raises as ``registry.backend_of``, and ``InvalidArgument`` for parameters that
    cannot go together.
    """
    mode, worker = _mode(context), households.shared_by(context)
    if mode == "in_process":
        if worker:
            raise _contradiction(context.name, f"in the worker '{worker}' (WORKER)")
        if context.environment:
            raise _contradiction(context.name, "in an environment of its own (EXECUTION_ENV_PATH)")
    if context.environment:
        # The framework may be there alone, so that the backend is not looked for here.
        return True
    found = registry.backend_of(context)
    return bool(worker) or mode == "worker" or (not mode and registry.is_isolated(found, context))


def _interpreter(context: ModelContext) -> Path | None:
    """Return the Python of a model's workers: that which it brings, or its backend has for it; None for the server's.

    May take minutes. Raises ``NeriteError``.
    """
    return find_interpreter(context) if context.environment else registry.prepared(context)


def _contradiction(model: str, elsewhere: str) -> InvalidArgument:
    return InvalidArgument(
        f"model '{model}' cannot run in the server (EXECUTION_MODE in_process) and {elsewhere}: leave one of the two "
        "parameters out"
    )


def _mode(context: ModelContext) -> str:
    mode = context.parameter("EXECUTION_MODE")
    if mode not in ("", "worker", "in_process"):
        raise InvalidArgument(
            f"parameter 'EXECUTION_MODE' of model '{context.name}' is '{mode}'; it may be 'worker' or 'in_process'"
        )
    return mode
