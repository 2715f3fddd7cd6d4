"""How requests and executions of a model version reach its meter: a stage of the queue, and leases that are metered.

A version without a meter has neither, so a server without a ledger does nothing more for a request than before.
"""

from __future__ import annotations

from time import monotonic_ns

from nerite.core.errors import NeriteError
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.queue_stage import FrontStage, QueueStage
from nerite.core.request import InferenceRequest
from nerite.dispatch.instance_picker import Leases
from nerite.instances.instance import Batch, ModelInstance
from nerite.ledger.meter import VersionMeter


class LedgerStage(FrontStage):
    """Opens the account of each request, and passes it on."""

    held = ()

    def __init__(self, meter: VersionMeter, following: QueueStage) -> None:
        super().__init__(following)
        self._open = meter.open

    def submit(self, request: InferenceRequest) -> None:
        """Open the account of a request, and pass it on."""
        self._open(request)
        self._following.submit(request)

    def _refuse_held(self, error: NeriteError) -> None:
        """Do nothing: no request waits here."""


class MeteredLeases(Leases):
    """Leases that tell a meter when batches begin and come back."""

    __slots__ = ("_meter",)

    def __init__(self, meter: VersionMeter) -> None:
        super().__init__()
        self._meter = meter

    def begin(self, instance: ModelInstance, batch: Batch) -> None:
        """Lease ``batch`` to ``instance``."""
        super().begin(instance, batch)
        self._meter.leased(instance, batch, monotonic_ns())

    def end(self, batch: Batch, timings: ExecutionTimes | None = None) -> bool:
        """End the lease of ``batch``; return False if it has none."""
        instance = self.holder(batch)
        if not super().end(batch) or instance is None:
            return False
        self._meter.returned(instance, batch, timings, monotonic_ns())
        return True
