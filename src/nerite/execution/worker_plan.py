"""What it takes to make the worker of an instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.execution.arena import Arena
from nerite.execution.channel import Ask, Channel
from nerite.execution.errands import Asker
from nerite.execution.nursery import WorkerProcess
from nerite.execution.surroundings import Surroundings
from nerite.execution.worker import write_context


@dataclass(frozen=True)
class WorkerPlan:
    """Everything it takes to make the worker of one instance, again and again."""

    backend: str
    context: ModelContext
    instance: InstanceContext
    interpreter: Path | None
    environment: Mapping[str, str]
    arena: Arena
    around: Surroundings
    shared: str = ""
    """The name of a worker in which models live together; empty for one of the instance's own."""

    @property
    def process(self) -> tuple[object, ...]:
        """What has to be equal of those who live in one process."""
        instance = self.instance
        return self.shared, self.interpreter, instance.cores, instance.memory_node

    def start(self, name: str, arena: Arena, ask: Ask) -> tuple[WorkerProcess, Channel]:
        """Make a worker, without a model yet. Blocks; not for the loop's thread. Raises ``NeriteError``."""
        instance = replace(self.instance, name=name)
        process = self.around.nursery.spawn(instance, self.interpreter, self.environment)
        return process, Channel(process, arena, self.around.guests, self.around.log, ask)

    def order(self, seat: int) -> dict[str, Any]:
        """Return what a worker is told to open the model, and to make the instance, at this seat."""
        # The worker has a reporter of its own.
        instance = {name: value for name, value in asdict(self.instance).items() if name != "reporter"}
        stay_awake = self.around.stay_awake
        return write_context(self.backend, self.context, instance=instance, stay_awake=stay_awake, seat=seat)

    def asker(self, *, loading: bool) -> Asker:
        """Return who asks, where the instance does."""
        return Asker(self.context.name, self.context.version, self.instance.name, loading)
