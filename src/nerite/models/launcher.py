"""Launches model versions: chooses scheduler and placement, starts the instances and builds the queue pipeline.

``InstanceFactory`` creates the instances, ``RunningVersion`` owns the result; the repository decides when to launch.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nerite.backends import registry
from nerite.backends.configuration import pins
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.python.environments import find_interpreter, progress_reported
from nerite.config.json_form import to_json
from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelQueuePolicy, ModelSequenceBatching
from nerite.config.model_parameters import bounds_of
from nerite.core.errors import InvalidArgument
from nerite.core.queue_stage import QueueStage
from nerite.core.signature import Signature
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.instance_picker import AnyInstancePicker
from nerite.dispatch.interface import SelectivePicker, VersionScheduler
from nerite.dispatch.rate_limited import InstanceResources, RateLimitedPicker
from nerite.dispatch.sequence_inputs import SequenceInputs
from nerite.dispatch.sequence_picker import SequenceDispatcher, SequencePicker
from nerite.ensembles.ensemble import Ensemble
from nerite.instances.placement import instance_plans, thread_variables
from nerite.ledger.meter import VersionMeter
from nerite.ledger.stage import MeteredLeases
from nerite.models.device_inputs import DeviceInputStage, device_placement
from nerite.models.instance_factory import (
    InProcessFactory,
    InstanceFactory,
    NoInstances,
    RateLimitedFactory,
    WorkerFactory,
)
from nerite.models.queue_pipeline import QueuePipeline
from nerite.models.running_version import RunningVersion
from nerite.models.warm_up import WarmUpFactory, WarmUpRun, WarmUpSample, configured_samples, recorded_samples
from nerite.observability.load_times import stage
from nerite.observability.statistics import VersionStatistics, new_statistics
from nerite.scheduling.decider import BatchingRules, QueuePolicy
from nerite.scheduling.dynamic_batcher import DefaultScheduler, DynamicBatcher
from nerite.scheduling.ensemble import EnsembleGraph, StepModel
from nerite.scheduling.load_shedding import LoadShedder
from nerite.scheduling.sequence import SequenceRules
from nerite.workers.child.worker import write_context
from nerite.workers.host.instance import RemoteInstance
from nerite.workers.host.process import WorkerPlan, WorkerPool, sharing_models
from nerite.workers.host.server_context import ServerContext
from nerite.workers.ipc import messages
from nerite.workers.ipc.shared_memory import Arena

# Translates a model configuration into the rules of its scheduler.


def picker_for(config: ModelConfig, directory: Path, share_of: Callable[[str], float] | None = None) -> SelectivePicker:
    """Return the scheduler for the model in ``directory``. Blocks.

    ``share_of`` is that of ``SequenceRules``. Raises ``NeriteError`` if the scheduler is not supported or a file that
    it needs is invalid.
    """
    hold = _hold_count("TRITONSERVER_DELAY_SCHEDULER")
    if config.ensemble_scheduling is not None:
        raise InvalidArgument(
            f"model '{config.name}' uses 'ensemble_scheduling', which this version of the server does not support"
        )
    if config.sequence_batching is not None:
        attach = SequenceInputs(config, directory)
        return SequencePicker(config, attach, _sequence_rules(config, config.sequence_batching, hold, share_of))
    if config.dynamic_batching is not None:
        return AnyInstancePicker(DynamicBatcher(_batching_rules(config, config.dynamic_batching, hold)))
    return AnyInstancePicker(DefaultScheduler(hold))


def preserves_ordering(config: ModelConfig) -> bool:
    """Return whether responses must be sent in the order of the executions."""
    batching = config.sequence_batching.oldest if config.sequence_batching is not None else config.dynamic_batching
    return batching is not None and batching.preserve_ordering


def _batching_rules(config: ModelConfig, batching: ModelDynamicBatching, hold: int) -> BatchingRules:
    default = batching.default_queue_policy
    return BatchingRules(
        max_batch_size=config.max_batch_size,
        preferred_sizes=tuple(batching.preferred_batch_size),
        max_delay_us=batching.max_queue_delay_microseconds,
        levels=batching.priority_levels,
        default_level=batching.default_priority_level,
        default_policy=_policy(default) if default else QueuePolicy(),
        policies={level: _policy(policy) for level, policy in batching.priority_queue_policy.items()},
        hold_until=hold,
    )


def _sequence_rules(
    config: ModelConfig, batching: ModelSequenceBatching, hold: int, share_of: Callable[[str], float] | None
) -> SequenceRules:
    oldest, direct = batching.oldest, batching.direct
    return SequenceRules(
        model=config.name,
        slots=max(1, config.max_batch_size if oldest is None else oldest.max_candidate_sequences),
        max_idle_us=batching.max_sequence_idle_microseconds,
        batching=None
        if oldest is None
        else BatchingRules(
            max_batch_size=config.max_batch_size,
            preferred_sizes=tuple(oldest.preferred_batch_size),
            max_delay_us=oldest.max_queue_delay_microseconds,
            hold_until=hold,
        ),
        max_delay_us=direct.max_queue_delay_microseconds if direct else 0,
        min_utilization=direct.minimum_slot_utilization if direct else 0.0,
        hold_until=0 if oldest else hold,
        hold_until_backlog=_hold_count("TRITONSERVER_BACKLOG_DELAY_SCHEDULER"),
        share_of=share_of,
    )


def _hold_count(variable: str) -> int:
    """Return how many requests must be queued before a scheduler starts: a hook that Triton's tests rely on."""
    return int(os.environ.get(variable, "0") or 0)


def _policy(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        timeout_us=policy.default_timeout_microseconds,
        allow_override=policy.allow_timeout_override,
        delay_on_timeout=policy.timeout_action == "DELAY",
        max_size=policy.max_queue_size,
    )


_log = logging.getLogger("nerite.execution")


class Launcher:
    """Launches model versions; one per server. Coroutines run on the loop, blocking work on the loader's threads."""

    def __init__(self, server_context: ServerContext) -> None:
        self._server_context = server_context
        self._worker_pool = WorkerPool()

    def complete(self, backend: str, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration as completed by the backend. Blocks. Raises ``NeriteError``."""
        if not is_isolated(context):
            return registry.backend_of(context).complete(context)
        instance = InstanceContext(f"{context.name}_auto_complete")
        arena = Arena()
        plan = self._plan(backend, context, instance, arena, _interpreter(context))
        ask = partial(self._server_context.control_calls.take, control_caller=plan.control_caller(loading=True))
        process, channel = plan.start(instance.name, arena, ask)
        try:
            completed: Mapping[str, Any] = channel.ask(messages.COMPLETE, write_context(backend, context))
        finally:
            channel.close()
            process.kill()
        return completed

    def prepare(self, context: ModelContext) -> None:
        """Import the framework of a model, or make the environment of its workers and start what forks them. Blocks.

        Raises ``NeriteError``.
        """
        if not self.import_here(context):
            _interpreter(context)
            self._server_context.fork_server.start()

    def import_here(self, context: ModelContext) -> bool:
        """Import the framework of a model that runs in this process; return whether it does. Blocks.

        Raises ``NeriteError``.
        """
        if is_isolated(context):
            return False
        registry.import_framework(context)
        return True

    async def launch(self, config: ModelConfig, context: ModelContext, signature: Signature) -> RunningVersion:
        """Load a model version and all its instances. Raises ``NeriteError`` after releasing everything it created."""
        began = time.monotonic()
        admission = self._server_context.tenant_admission
        share_of = admission.sequence_share if admission.identifies else None
        scheduler = await self._server_context.blocking(picker_for, config, context.directory, share_of)
        isolated = await self._server_context.blocking(is_isolated, context)
        placement = device_placement(config, isolated=isolated)
        load_shedder = LoadShedder(bounds_of(config, self._server_context.queue), context.name)
        plans = instance_plans(config, self._server_context.policies)
        arena = Arena()
        self._server_context.foreign_segments.host(arena)
        maker, resources = await self._instance_maker(config, context, signature, arena)
        config_json = to_json(config)
        try:
            instances = await maker.make(plans, config_json)
        except BaseException:  # cancellation included: nothing may leak
            maker.close()
            arena.close()
            raise
        statistics = new_statistics(self._server_context.metrics, config)
        meter = self._meter(context.name, context.version)
        by_plan = dict(zip(plans, instances, strict=True))
        dispatcher_type = Dispatcher if config.sequence_batching is None else SequenceDispatcher
        dispatcher = dispatcher_type(
            scheduler if resources is None else RateLimitedPicker(scheduler, resources),
            [instance for plan, instance in by_plan.items() if not plan.passive],
            statistics,
            self._server_context.loop,
            self._server_context.busy_poll,
            load_shedder,
            preserve_ordering=preserves_ordering(config),
            leases=None if meter is None else MeteredLeases(meter),
        )
        if resources is not None:
            resources.granted = dispatcher.check_soon

        def device_inputs(following: QueueStage) -> QueueStage:
            on_gpus = self._server_context.devices
            if on_gpus is None:
                return following
            return DeviceInputStage(
                following, on_gpus, lambda: running.device_placement, arena.allocate, signature, statistics
            )

        running = RunningVersion(
            context.name,
            context.version,
            config,
            config_json,
            signature,
            statistics,
            self._pipeline(config, signature, dispatcher, statistics, meter, device_inputs),
            by_plan,
            maker,
            arena,
            self._server_context.loop,
            meter,
        )
        running.device_placement = placement
        devices = self._server_context.devices
        if devices is not None and placement is not None and not placement.pooled and pins(config_json, "input"):
            running.pinned = devices.pinned
        # Fused steps pass neither the rate limiter nor admission control, the response cache or a sequence batcher.
        alone = running.decoupled or running.cached or config.backend in registry.GENERATING
        running.fusible = resources is None and config.sequence_batching is None and not alone
        running.load_seconds = time.monotonic() - began
        return running

    async def _instance_maker(
        self, config: ModelConfig, context: ModelContext, signature: Signature, arena: Arena
    ) -> tuple[InstanceFactory, InstanceResources | None]:
        """Return what makes the instances, and the resources that the rate limiter grants them if there is one."""
        warm_up = await self._server_context.blocking(self._samples, config, context, signature)
        maker = await self._instance_factory(config, context, arena)
        if warm_up:
            warm_up_run = await self._server_context.blocking(_warm_up_run, config, context.directory)
            maker = WarmUpFactory(maker, context.name, warm_up, warm_up_run)
        limiter = self._server_context.limiter
        if limiter is not None:
            resources = InstanceResources(limiter, context.name)
            return RateLimitedFactory(maker, resources), resources
        if any(group.rate_limiter is not None for group in config.instance_group):
            _log.info(
                "'%s': 'instance_group.rate_limiter' has no effect: start the server with --rate-limit=execution_count",
                context.name,
            )
        return maker, None

    def assemble(
        self, name: str, version: int, config: ModelConfig, signature: Signature, parts: Sequence[StepModel]
    ) -> RunningVersion:
        """Launch a version of an ensemble. ``parts`` are the models of its steps, already validated against it."""
        assert config.ensemble_scheduling is not None
        arena = Arena()
        self._server_context.foreign_segments.host(arena)
        statistics = new_statistics(self._server_context.metrics, config)
        limit = config.ensemble_scheduling.max_inflight_requests
        if limit:
            _log.info("Ensemble model '%s' configured with max_inflight_requests: %d", name, limit)
        meter = self._meter(name, version)
        graph = EnsembleGraph(signature, str(version), config.ensemble_scheduling.step, parts)
        decoupled = any(part.decoupled for part in parts)
        scheduler = Ensemble(
            graph,
            self._server_context.server,
            statistics,
            self._server_context.loop,
            LoadShedder(bounds_of(config, self._server_context.queue), name),
            decoupled=decoupled,
            max_inflight=limit,
        )
        return RunningVersion(
            name,
            version,
            config,
            to_json(config),
            signature,
            statistics,
            self._pipeline(config, signature, scheduler, statistics, meter),
            {},
            NoInstances(),
            arena,
            self._server_context.loop,
            meter,
        )

    def _meter(self, model: str, version: int) -> VersionMeter | None:
        ledger = self._server_context.ledger
        return None if ledger is None else ledger.meter(model, str(version))

    def _pipeline(
        self,
        config: ModelConfig,
        signature: Signature,
        scheduler: VersionScheduler,
        statistics: VersionStatistics,
        meter: VersionMeter | None,
        device_inputs: Callable[[QueueStage], QueueStage] | None = None,
    ) -> QueuePipeline:
        context = self._server_context
        bounds = bounds_of(config, context.queue)
        return QueuePipeline(
            *(config, signature, scheduler, statistics, context.tenant_admission, context.cache, bounds, meter),
            device_inputs,
        )

    async def resize(self, running: RunningVersion, config: ModelConfig) -> None:
        """Resize a version to the instances in ``config``. Raises as ``launch``, and changes nothing then."""
        await running.resize(config, to_json(config), instance_plans(config, self._server_context.policies))
        isolated = any(isinstance(each, RemoteInstance) for each in running.instances)
        running.device_placement = device_placement(config, isolated=isolated)

    async def _instance_factory(self, config: ModelConfig, context: ModelContext, arena: Arena) -> InstanceFactory:
        run = self._server_context.blocking
        if await run(is_isolated, context):
            # Not on the loop: a Python environment may have to be created.
            with stage("environment"):
                interpreter = await run(_interpreter, context)

            def plan(instance: InstanceContext) -> WorkerPlan:
                return self._plan(config.backend, context, instance, arena, interpreter)

            return WorkerFactory(plan, self._worker_pool)
        with stage("initialize"):
            found = await run(registry.backend_of, context)
            model = await run(found.open, context)
        return InProcessFactory(
            *(model, self._server_context.loop, self._server_context.loader, self._server_context.devices),
            on_loop_only=_mode(context) == "in_process",
        )

    def _samples(self, config: ModelConfig, context: ModelContext, signature: Signature) -> list[WarmUpSample]:
        """Return the requests that warm an instance up before it is ready. Blocks. Raises ``NeriteError``."""
        directory = context.directory
        return [
            *configured_samples(config, signature, directory, _log_skipped),
            *recorded_samples(config, signature, directory, self._server_context.read_request),
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
            self._server_context,
            sharing_models(context),
            threaded=_mode(context) == "thread",
        )


def _warm_up_run(config: ModelConfig, directory: Path) -> Callable[[], WarmUpRun] | None:
    """Return a factory for warm-up runs of a sequence model; None for other models.

    Blocks. Raises as ``SequenceInputs``.
    """
    batching = config.sequence_batching
    if batching is None:
        return None
    return partial(WarmUpRun, SequenceInputs(config, directory), iterative=batching.iterative_sequence)


def _log_skipped(name: str) -> None:
    _log.debug("Skipping batch 0 warmup sample '%s'", name)


def is_isolated(context: ModelContext) -> bool:
    """Return whether the instances of a model run in worker processes; its parameters override the backend's default.

    Blocks, because it may import the backend. Raises as ``registry.backend_of``, and ``InvalidArgument`` for parameters
    that exclude each other.
    """
    mode, worker = _mode(context), sharing_models(context)
    if mode in ("in_process", "thread"):
        if worker:
            raise _conflict(context.name, mode, f"in the worker '{worker}' (WORKER)")
        if context.environment:
            raise _conflict(context.name, mode, "in an environment of its own (EXECUTION_ENV_PATH)")
        if mode == "thread" and context.config.get("backend") != "python":
            raise InvalidArgument(
                f"parameter 'EXECUTION_MODE' of model '{context.name}' is 'thread', which only models of the backend "
                "'python' can have: remove it"
            )
    if context.environment:
        # The framework may be installed in that environment only, so the backend is not imported here.
        return True
    found = registry.backend_of(context)
    return bool(worker) or mode in ("worker", "thread") or (not mode and registry.is_isolated(found, context))


def _interpreter(context: ModelContext) -> Path | None:
    """Return the interpreter of a model's workers: its own or its backend's environment; None for the server's.

    May take minutes. Raises ``NeriteError``.
    """
    with progress_reported(context.progress):
        return find_interpreter(context) if context.environment else registry.prepared(context)


def _conflict(model: str, mode: str, elsewhere: str) -> InvalidArgument:
    return InvalidArgument(
        f"model '{model}' cannot run both in the server process (EXECUTION_MODE {mode}) and {elsewhere}: remove "
        "one of the two parameters"
    )


def _mode(context: ModelContext) -> str:
    mode = context.parameter("EXECUTION_MODE")
    if mode not in ("", "worker", "in_process", "thread"):
        raise InvalidArgument(
            f"parameter 'EXECUTION_MODE' of model '{context.name}' is '{mode}'; it must be 'worker', 'in_process' or "
            "'thread'"
        )
    return mode
