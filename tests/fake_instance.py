"""An instance that runs as long as a test wants, dies, and comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from nerite.core.engine_report import EngineReport
from nerite.core.errors import Internal, NeriteError
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import NOBODY, InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.instances.instance import Batch, Done, ModelInstance, OnReport, Part

_starts = itertools.count()
OK = InferenceResponse(ResponseHeader("model", "1", ()))


class FakeInstance:
    """An instance that runs as long as the test wants."""

    def __init__(self, name: str = "model_0", *, ahead: bool = False) -> None:
        self.name = name
        self.ahead = ahead
        self.usable = True
        self.failure: NeriteError | None = None
        self.restarts = 0
        self.done: Done
        self.part: Part
        self.report: EngineReport | None = None
        self.on_report: OnReport
        self.told: list[tuple[str, InferenceRequest]] = []
        self.on_usable: Callable[[ModelInstance], None]
        self.on_lost: Callable[[Sequence[InferenceRequest]], None]
        self.batch: Batch | None = None
        self.next: Batch | None = None
        self.batches: list[Batch] = []
        self.started: list[tuple[int, Batch]] = []
        """Batches with a number that grows from start to start, over all instances."""
        self.awaited: list[InferenceRequest] = []
        """Calls that the batch waits for."""

    @property
    def busy(self) -> bool:
        requests = [request for batch in self.batches for request in batch if request.sink is not NOBODY]
        return self.batch is not None or not all(request.finished for request in requests)

    def run(self, batch: Batch) -> None:
        assert self.usable
        assert self.next is None, "one batch at a time, and one ahead"
        if self.batch is None:
            self.batch = batch
        else:
            assert self.ahead
            self.next = batch
        self.batches.append(batch)
        self.started.append((next(_starts), batch))

    def finish(self, answers: Sequence[InferenceResponse | None] | None = None, took_ns: int = 0) -> None:
        assert self.batch is not None
        batch, self.batch, self.next = self.batch, self.next, None
        timings = ExecutionTimes()
        timings.end()
        timings.ended_ns = timings.started_ns + took_ns
        self.done(self, batch, answers or [OK] * len(batch), timings)

    def die(self) -> None:
        self.usable = False
        self.on_usable(self)
        batch, self.batch = self.batch, None
        self.on_lost(batch or ())
        if batch is not None:
            self.done(self, batch, [InferenceResponse.failed(Internal("died"))] * len(batch), None)

    def come_back(self) -> None:
        self.failure = None
        self.usable = True
        self.on_usable(self)

    def fail_to_come_back(self, why: str = "no such file") -> None:
        self.failure = Internal(why)
        self.on_usable(self)

    def cancel(self, request: InferenceRequest) -> None:
        self.told.append(("cancel", request))

    def pause(self, request: InferenceRequest, paused: bool) -> None:
        self.told.append(("pause" if paused else "resume", request))

    def calls(self) -> Sequence[InferenceRequest]:
        return self.awaited if self.batch is not None else ()

    def calls_for(self, request: InferenceRequest) -> Sequence[InferenceRequest] | None:
        return self.awaited if any(request in batch for batch in self.batches) else None

    def is_ready(self, answered: Callable[[bool], None], patience: float) -> None:
        answered(True)

    def process(self) -> None:
        pass

    def memory(self) -> int:
        return 0

    def close(self, closed: Callable[[], None]) -> None:
        closed()
