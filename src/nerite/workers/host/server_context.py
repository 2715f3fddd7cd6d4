"""Server context: what all models of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from nerite.admission.tenants import TenantAdmission
from nerite.cache.interface import ResponseCache
from nerite.config.options import MetricsOptions, QueueOptions
from nerite.core.request import RequestHeader
from nerite.core.tensor import Buffer
from nerite.devices.devices import Devices
from nerite.dispatch.busy_poll import BusyPoll
from nerite.dispatch.interface import ServerEntry
from nerite.instances.placement import HostPolicies
from nerite.ledger.ledger import Ledger
from nerite.scheduling.rate_limiter import RateLimiter
from nerite.workers.host.bls import ModelControlCalls
from nerite.workers.host.channel import Log
from nerite.workers.host.fork_server import ForkServer
from nerite.workers.ipc.shared_memory import ForeignSegments

_T = TypeVar("_T")
ReadRequest: TypeAlias = Callable[[str, bytes], tuple[RequestHeader, Sequence[Buffer]]]
"""Converts a recorded request to a model from a line of text. Raises ``NeriteError``."""


@dataclass(frozen=True)
class ServerContext:
    """Objects and settings of one server that its models and workers need."""

    loop: asyncio.AbstractEventLoop
    loader: Executor
    """Executor for blocking steps of loading a model."""
    loading: asyncio.Semaphore
    """Held by each model that is being loaded."""
    fork_server: ForkServer
    foreign_segments: ForeignSegments
    server: ServerEntry
    """Entry for requests from within: steps of ensembles, and models that call other models."""
    log: Log
    """Receives the log lines of workers."""
    stay_awake: float
    """Seconds that the loop and each worker may busy-poll for the next message."""
    queue: QueueOptions
    """Queue limits of models that do not configure their own."""
    policies: HostPolicies
    limiter: RateLimiter | None
    """For all models, if executions are limited; else None."""
    read_request: ReadRequest
    tenant_admission: TenantAdmission
    cache: ResponseCache | None
    metrics: MetricsOptions
    ledger: Ledger | None = None
    """Records what requests cost, if the server has one."""
    devices: Devices | None = None
    """The GPUs, if tensors can be on them."""

    def blocking(self, work: Callable[..., _T], *arguments: Any) -> Awaitable[_T]:
        """Run a blocking function on the loader."""
        return self.loop.run_in_executor(self.loader, work, *arguments)

    @cached_property
    def control_calls(self) -> ModelControlCalls:
        """Executes the control calls of models."""
        return ModelControlCalls(self.server, self.loop, self.loading)

    @cached_property
    def busy_poll(self) -> BusyPoll:
        """Busy poll of the loop."""
        return BusyPoll(self.loop, self.stay_awake)
