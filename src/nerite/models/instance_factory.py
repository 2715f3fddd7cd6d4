"""Factories that create the instances of a model version in workers, in threads or on the loop.

They are used when the version is loaded, and later when it is resized.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from nerite.backends.interface import Instance, InstanceContext, Model
from nerite.core.thread_binding import bind_to_place
from nerite.devices.devices import Devices
from nerite.dispatch.rate_limited import InstanceResources
from nerite.instances.in_process import LoopInstance, OverlappedInstance, ThreadInstance
from nerite.instances.instance import ModelInstance, OverlappingInstance
from nerite.instances.placement import InstancePlan
from nerite.observability.load_times import stage
from nerite.workers.host.instance import RemoteInstance
from nerite.workers.host.process import WorkerPlan, WorkerPool

_log = logging.getLogger("nerite.execution")

_MAX_CONCURRENT = 8
"""Maximum number of instances of a model that are loaded concurrently."""


class InstanceFactory(Protocol):
    """Creates the instances of one model version. Used on the loop; blocking work runs on the loader's threads."""

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Create all instances concurrently with the given configuration, or none. Raises ``NeriteError``."""

    def close(self) -> None:
        """Release resources that the instances share. Called once, after all instances are closed."""


class NoInstances:
    """Factory of ensembles, which have no instances."""

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Return no instances: none is ever requested."""
        return []

    def close(self) -> None:
        """Do nothing: no resources are shared."""


class WorkerFactory:
    """Creates instances in worker processes, each in its own or in one shared with other instances."""

    def __init__(self, plan_of: Callable[[InstanceContext], WorkerPlan], worker_pool: WorkerPool) -> None:
        self._plan_of = plan_of
        self._worker_pool = worker_pool
        self._load_slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Start the processes, and open the model in each."""

        async def start(context: InstanceContext) -> RemoteInstance:
            plan = self._plan_of(context)
            plan = replace(plan, context=replace(plan.context, config=config))
            async with self._load_slots:
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
        """Do nothing: a worker exits with its last instance."""


class InProcessFactory:
    """Creates instances of a backend that runs in the server process."""

    def __init__(
        self,
        model: Model,
        loop: asyncio.AbstractEventLoop,
        loader: Executor,
        devices: Devices | None,
        *,
        on_loop_only: bool,
    ) -> None:
        """``on_loop_only``: the instances execute on the loop and have no threads."""
        self._devices = devices
        self._model = model
        self._loop = loop
        self._loader = loader
        self._on_loop_only = on_loop_only

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Create the instances one after the other. ``config`` is ignored: the model already has it."""
        made: list[tuple[InstanceContext, Instance]] = []
        try:
            with stage("initialize"):
                for context in (plan.context for plan in plans):
                    made.append(
                        (context, await self._loop.run_in_executor(self._loader, self._backend_instance, context))
                    )
        except BaseException:  # cancellation included: nothing may leak
            for _, backend_instance in made:
                backend_instance.close()
            raise
        return [self._instance(context, backend_instance) for context, backend_instance in made]

    def _backend_instance(self, context: InstanceContext) -> Instance:
        if context.kind == "GPU" and self._devices is not None:
            context = replace(context, pinned=self._devices.open_pinned())
        if not context.cores:
            return self._model.instance(context)
        # Threads that a framework starts inherit the CPU affinity of the thread that creates the instance.
        with ThreadPoolExecutor(1, context.name, _bind_thread, (context,)) as pinned:
            return pinned.submit(self._model.instance, context).result()

    def _instance(self, context: InstanceContext, backend_instance: Instance) -> ModelInstance:
        if self._on_loop_only:
            if context.cores:
                _log.warning("'%s' runs on the server's loop: its host policy is ignored", context.name)
            return LoopInstance(context.name, backend_instance)
        bind = partial(_bind_thread, context) if context.cores else None
        if isinstance(backend_instance, OverlappingInstance):
            return OverlappedInstance(context.name, backend_instance, self._loop, settle=bind)
        # Frameworks often bind the state of an accelerator to one thread.
        return ThreadInstance(
            context.name, backend_instance, self._loop, on_loop=context.kind != "GPU" and not bind, settle=bind
        )

    def close(self) -> None:
        """Close the model, which all instances share."""
        self._model.close()


def _bind_thread(context: InstanceContext) -> None:
    """Bind this thread to the cores and the memory node of an instance."""
    if refusal := bind_to_place(context.cores, context.memory_node):
        _log.warning("'%s': %s", context.name, refusal)


class RateLimitedFactory:
    """``InstanceFactory`` decorator that registers the instances with the rate limiter before they are created."""

    def __init__(self, factory: InstanceFactory, resources: InstanceResources) -> None:
        self._factory = factory
        self._resources = resources

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Create instances. Raises ``InvalidArgument`` if the resources that one needs will never be available."""
        seats = self._resources.enter(plans)
        try:
            instances = await self._factory.make(plans, config)
        except BaseException:  # cancellation included: nothing may leak
            self._resources.give_up(seats)
            raise
        for instance, seat in zip(instances, seats, strict=True):
            if seat is not None:
                self._resources.seat(instance, seat)
        return instances

    def close(self) -> None:
        """Unregister the instances from the rate limiter, and release what they share."""
        self._resources.close()
        self._factory.close()
