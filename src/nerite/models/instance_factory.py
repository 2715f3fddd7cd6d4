"""Making the instances of one model version: in workers, in threads, on the loop; at its load and later on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from nerite.backends.interface import Instance, InstanceContext, Model
from nerite.dispatch.rate_limited import InstanceResources
from nerite.instances.in_process import LoopInstance, ThreadInstance
from nerite.instances.instance import ModelInstance
from nerite.instances.placement import InstancePlan, bind_to_place
from nerite.observability.load_times import stage
from nerite.workers.host.instance import RemoteInstance
from nerite.workers.host.process import WorkerPlan, WorkerPool

_log = logging.getLogger("nerite.execution")

_AT_ONCE = 8
"""Instances of a model that are loaded at the same time."""


class InstanceFactory(Protocol):
    """One for a model version. For the loop; what blocks is done by the loader."""

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Make instances side by side, all or none, given the configuration. Raises ``NeriteError``."""

    def close(self) -> None:
        """Give back what the instances shared. Called once, when every one of them is closed."""


class NoInstances:
    """For what is put together from other models."""

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Return nothing: nothing is ever asked for."""
        return []

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


class WorkerFactory:
    """A process for each instance, or a place in one for each."""

    def __init__(self, plan_of: Callable[[InstanceContext], WorkerPlan], households: WorkerPool) -> None:
        self._plan_of = plan_of
        self._households = households
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Start the processes, and have the model opened in each."""

        async def start(context: InstanceContext) -> RemoteInstance:
            plan = self._plan_of(context)
            plan = replace(plan, context=replace(plan.context, config=config))
            async with self._slots:
                runner = RemoteInstance(plan, self, self._households.home(plan, self))
                await runner.move_in()
            return runner

        made = await asyncio.gather(*(start(each.context) for each in plans), return_exceptions=True)
        runners: list[ModelInstance] = [item for item in made if not isinstance(item, BaseException)]
        if len(runners) < len(made):
            for runner in runners:
                runner.close(lambda: None)
            raise next(item for item in made if isinstance(item, BaseException))
        return runners

    def close(self) -> None:
        """Do nothing: the last one to leave a process takes it along."""


class InProcessFactory:
    """Instances of a backend that runs in this process."""

    def __init__(self, model: Model, loop: asyncio.AbstractEventLoop, loader: Executor, *, on_loop_only: bool) -> None:
        """``on_loop_only``: they have no threads of their own."""
        self._model = model
        self._loop = loop
        self._loader = loader
        self._on_loop_only = on_loop_only

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Make the instances, one after the other. The model knows its configuration already."""
        made: list[tuple[InstanceContext, Instance]] = []
        try:
            with stage("initialize"):
                for context in (plan.context for plan in plans):
                    made.append((context, await self._loop.run_in_executor(self._loader, self._instance, context)))
        except BaseException:  # whatever it was: nothing may be left behind
            for _, instance in made:
                instance.close()
            raise
        return [self._runner(each, instance) for each, instance in made]

    def _instance(self, context: InstanceContext) -> Instance:
        if not context.cores:
            return self._model.instance(context)
        # The threads that a framework starts run where the thread does that makes the instance.
        with ThreadPoolExecutor(1, context.name, _settle, (context,)) as settled:
            return settled.submit(self._model.instance, context).result()

    def _runner(self, context: InstanceContext, instance: Instance) -> ModelInstance:
        if self._on_loop_only:
            if context.cores:
                _log.warning("'%s' runs on the server's loop: its host policy does not count there", context.name)
            return LoopInstance(context.name, instance)
        settling = partial(_settle, context) if context.cores else None
        # What a framework keeps for an accelerator often belongs to one thread.
        return ThreadInstance(
            context.name, instance, self._loop, on_loop=context.kind != "GPU" and not settling, settle=settling
        )

    def close(self) -> None:
        """Close the model."""
        self._model.close()


def _settle(context: InstanceContext) -> None:
    """Have this thread run where an instance belongs."""
    if refusal := bind_to_place(context.cores, context.memory_node):
        _log.warning("'%s': %s", context.name, refusal)


class RateLimitedFactory:
    """Makes instances by another maker, once it is known that they could execute. A ``InstanceFactory``."""

    def __init__(self, maker: InstanceFactory, rations: InstanceResources) -> None:
        self._maker = maker
        self._rations = rations

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Make instances. Raises ``InvalidArgument`` where there will never be what one of them needs."""
        seats = self._rations.enter(plans)
        try:
            runners = await self._maker.make(plans, config)
        except BaseException:  # whatever it was: nothing may be left behind
            self._rations.give_up(seats)
            raise
        for runner, seat in zip(runners, seats, strict=True):
            if seat is not None:
                self._rations.seat(runner, seat)
        return runners

    def close(self) -> None:
        """Give back what the instances shared, and their seats."""
        self._rations.close()
        self._maker.close()
