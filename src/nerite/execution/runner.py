"""Something that runs batches of one model: an instance, wherever it lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from nerite.core.engine_report import EngineReport
from nerite.core.errors import NeriteError
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.observability.custom_metrics import ReportedMetrics

Batch: TypeAlias = list[InferenceRequest]

Done: TypeAlias = Callable[["Runner", Batch, Sequence[InferenceResponse | None], Marks | None], None]
"""Called on the loop's thread with one answer a request, None for one that is answered by ``Part``.

``Marks`` is None if the model never got to run.
"""
Part: TypeAlias = Callable[[InferenceRequest, InferenceResponse, bool, Marks | None], None]
"""Called on the loop's thread with one of several responses to a request, and whether it is the last: before ``Done``,
while other batches run, after the runner is closed.

``Marks`` has the start of the execution, when the computing of this response began (as ``inputs_ready_ns``), and when
it was computed and sent. It is None for the error of a worker that died.
"""
OnReport: TypeAlias = Callable[["Runner", EngineReport | None], None]
"""Called on the loop's thread with what an engine says of itself, before the responses that it tells of.

None: the engine is gone, and what it had will be answered with an error.
"""


class Runner(Protocol):
    """An instance of a model. Idle until ``run``, and again when it has called back.

    With ``ahead`` it takes a second batch while the first runs, and starts it when that ends.

    ``usable`` is False while it cannot take a batch, though nothing runs in it (a worker that restarts);
    ``on_usable`` is called whenever that changes, and when an attempt to restart it failed. ``failure`` says why the
    last such attempt failed, and is None if it did not. ``restarts`` counts those that succeeded.

    With ``traced`` the model is told where the requests stand in their traces.

    ``metrics`` are those that the models in its process count themselves, None where that is the server's.

    ``report`` is the last one of its engine, None where there is none, or no engine that reports.
    """

    name: str
    metrics: ReportedMetrics | None
    ahead: bool
    usable: bool
    failure: NeriteError | None
    restarts: int
    done: Done
    part: Part
    traced: bool
    report: EngineReport | None
    on_report: OnReport
    on_usable: Callable[[Runner], None]

    @property
    def busy(self) -> bool:
        """A batch or a request that gets its responses one by one is under way."""

    def run(self, batch: Batch) -> None:
        """Execute a batch, and call ``done`` once, with this very list.

        Never blocks, except where running on the loop is the idea. If it raises before ``done`` was called, nothing of
        the batch was taken: the instance is as it was before.
        """

    def cancel(self, request: InferenceRequest) -> None:
        """Tell the model, where it cannot see it, that ``request``, which it has, is cancelled."""

    def pause(self, request: InferenceRequest, paused: bool) -> None:
        """Have the model wait, or wait no more, before it sends another response to ``request``, which it has."""

    def calls(self) -> Sequence[InferenceRequest]:
        """Return the calls to other models before which the instance will not be free; none if it runs no batch."""

    def calls_for(self, request: InferenceRequest) -> Sequence[InferenceRequest] | None:
        """Return the calls before which ``request`` will not be answered; None if the instance does not have it."""

    def is_ready(self, answered: Callable[[bool], None], patience: float) -> None:
        """Ask the model itself whether it can serve; ``answered`` is called on the loop's thread.

        After ``patience`` seconds it is called with what the model said before.
        """

    def memory(self) -> int:
        """Return how many bytes its process has for itself now: 0 for an instance without a process of its own."""

    def process(self) -> tuple[int, float] | None:
        """Return the number of the process that it has now besides the server's, and when that began; None: none."""

    def close(self, closed: Callable[[], None]) -> None:
        """Finalize the model and give everything back; ``closed`` is called once, on the loop's thread."""
