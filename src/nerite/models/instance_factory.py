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

    def __init__(self, plan_of: Callable[[InstanceContext], WorkerPlan], worker_pool: WorkerPool) -> None:
        self._plan_of = plan_of
        self._worker_pool = worker_pool
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Start the processes, and have the model opened in each."""

        async def start(context: InstanceContext) -> RemoteInstance:
            plan = self._plan_of(context)
            plan = replace(plan, context=replace(plan.context, config=config))
            async with self._slots:
                instance = RemoteInstance(plan, self, self._worker_pool.home(plan, self))
                await instance.move_in()
            return instance

        made = await asyncio.gather(*(start(each.context) for each in plans), return_exceptions=True)
        instances: list[ModelInstance] = [item for item in made if not isinstance(item, BaseException)]
        if len(instances) < len(made):
            for instance in instances:
                instance.close(lambda: None)
            raise next(item for item in made if isinstance(item, BaseException))
        return instances

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
                    made.append(
                        (context, await self._loop.run_in_executor(self._loader, self._backend_instance, context))
                    )
        except BaseException:  # whatever it was: nothing may be left behind
            for _, backend_instance in made:
                backend_instance.close()
            raise
        return [self._instance(each, backend_instance) for each, instance in made]

    def _backend_instance(self, context: InstanceContext) -> Instance:
        if not context.cores:
            return self._model.instance(context)
        # The threads that a framework starts run where the thread does that makes the instance.
        with ThreadPoolExecutor(1, context.name, _settle, (context,)) as settled:
            return settled.submit(self._model.instance, context).result()

    def _instance(self, context: InstanceContext, backend_instance: Instance) -> ModelInstance:
        if self._on_loop_only:
            if context.cores:
                _log.warning("'%s' runs on the server's loop: its host policy does not count there", context.name)
            return LoopInstance(context.name, backend_instance)
        settling = partial(_settle, context) if context.cores else None
        # What a framework keeps for an accelerator often belongs to one thread.
        return ThreadInstance(
            context.name, backend_instance, self._loop, on_loop=context.kind != "GPU" and not settling, settle=settling
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

    def __init__(self, maker: InstanceFactory, resources: InstanceResources) -> None:
        self._maker = maker
        self._resources = resources

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Make instances. Raises ``InvalidArgument`` where there will never be what one of them needs."""
        seats = self._resources.enter(plans)
        try:
            instances = await self._maker.make(plans, config)
        except BaseException:  # whatever it was: nothing may be left behind
            self._resources.give_up(seats)
            raise
        for instance, seat in zip(instances, seats, strict=True):
            if seat is not None:
                self._resources.seat(instance, seat)
        return instances

    def close(self) -> None:
        """Give back what the instances shared, and their seats."""
        self._resources.close()
        self._maker.close()
