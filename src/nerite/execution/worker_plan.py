"""What it takes to make the worker of an instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import NeriteError
from nerite.execution import messages
from nerite.execution.arena import Arena
from nerite.execution.channel import Channel
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

    def start(self) -> tuple[WorkerProcess, Channel]:
        """Make a worker, without a model yet. Blocks; not for the loop's thread. Raises ``NeriteError``."""
        process = self.around.nursery.spawn(self.instance, self.interpreter, self.environment)
        return process, Channel(process, self.arena, self.around.guests, self.around.log, self._ask)

    def load(self, process: WorkerProcess, channel: Channel) -> None:
        """Open the model in a worker. Blocks. Raises ``NeriteError``, and the worker is gone then."""
        try:
            context = write_context(
                self.backend, self.context, instance=asdict(self.instance), stay_awake=self.around.stay_awake
            )
            channel.ask(messages.LOAD, context)
        except NeriteError:
            channel.close()
            process.kill()
            raise

    def _ask(self, question: dict[str, Any], loading: bool, reply: Callable[[bytes], None]) -> None:
        context = self.context
        self.around.errands.take(question, Asker(context.name, context.version, self.instance.name, loading), reply)
