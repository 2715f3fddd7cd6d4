"""A dispatcher with everything around it, for its tests."""

from __future__ import annotations

from typing import Any

from doubles import Caller, FakeLoop, request
from fake_instance import FakeInstance
from nerite.config.options import QueueOptions
from nerite.core.request import InferenceRequest
from nerite.dispatch.busy_poll import BusyPoll
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.instance_picker import AnyInstancePicker
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.decider import BatchingRules
from nerite.scheduling.dynamic_batcher import DynamicBatcher
from nerite.scheduling.load_shedding import LoadShedder

US = 1000
MS = 1_000_000
UNBOUNDED = QueueOptions(max_requests=0, max_seconds=0)


class Bench:
    """The dispatcher, its callers and its instances."""

    def __init__(self, loop: FakeLoop) -> None:
        self.loop = loop
        self.caller = Caller()
        self.statistics = VersionStatistics()
        self.instances: list[FakeInstance] = []

    def dispatcher(
        self,
        *,
        instances: int = 1,
        ahead: bool = False,
        preserve_ordering: bool = False,
        max_batch_size: int = 8,
        bounds: QueueOptions = UNBOUNDED,
        **rules: Any,
    ) -> Dispatcher:
        self.instances = [FakeInstance(f"model_{number}", ahead=ahead) for number in range(instances)]
        batcher = DynamicBatcher(BatchingRules(max_batch_size, **rules))
        loop: Any = self.loop
        return Dispatcher(
            AnyInstancePicker(batcher),
            self.instances,
            self.statistics,
            loop,
            BusyPoll(loop, 0.0),
            LoadShedder(bounds, "model"),
            preserve_ordering=preserve_ordering,
        )

    def ask(self, of: Dispatcher, *rows: int, **fields: Any) -> list[InferenceRequest]:
        asked = [request(each, sink=self.caller, **fields) for each in rows or (1,)]
        for each in asked:
            of.submit(each)
        return asked

    def answer(self, asked: InferenceRequest) -> str:
        """``ok``, the text of the error, or nothing yet. At most one answer, or the test fails."""
        answers = self.caller.of(asked)
        assert len(answers) <= 1
        if not answers:
            return "nothing yet"
        error = answers[0].error
        return "ok" if error is None else f"{type(error).__name__}: {error.message}"

    def drained(self, of: Dispatcher) -> list[int]:
        """How many answers had left when the dispatcher said that it was drained."""
        calls: list[int] = []
        of.when_drained(lambda: calls.append(len(self.caller.answers)))
        assert calls == []
        return calls
