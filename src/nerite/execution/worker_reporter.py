"""The way of an engine's reports out of its worker."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from typing import Final

from nerite.core.engine_report import EngineReport
from nerite.core.request import InferenceRequest
from nerite.execution import engine_reports
from nerite.execution.outbox import Outbox
from nerite.execution.worker_batch import WorkerBatch

_log = logging.getLogger("nerite.worker")
_GIVEN_UP: Final = 70


class WorkerReporter:
    """Of the instance at one seat. On any thread."""

    def __init__(self, seat: int, outbox: Outbox) -> None:
        self._seat = seat
        self._outbox = outbox

    def report(self, report: EngineReport) -> None:
        """Send a report."""
        self._outbox.send(engine_reports.frame(self._seat, report, _place))

    def together(self) -> AbstractContextManager[None]:
        """Have what this thread sends in the block leave in one go."""
        return self._outbox.together()

    def give_up(self, reason: str) -> None:
        """End the process: the server makes another."""
        _log.error("%s; the worker ends", reason)
        os._exit(_GIVEN_UP)


def _place(request: InferenceRequest) -> tuple[int, int] | None:
    """Return the batch of a request, and where in it that is."""
    batch = request.sink
    assert isinstance(batch, WorkerBatch)
    index = batch.place(request)
    return None if index is None else (batch.number, index)
