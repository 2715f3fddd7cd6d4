"""What all models of a server run in, and share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from nerite.admission.tenants import TenantAdmission
from nerite.config.options import MetricsOptions, QueueOptions
from nerite.core.request import RequestHeader
from nerite.core.tensor import Buffer
from nerite.dispatch.busy_poll import BusyPoll
from nerite.dispatch.interface import ServerEntry
from nerite.instances.placement import HostPolicies
from nerite.scheduling.rate_limiter import RateLimiter
from nerite.workers.host.bls import ModelControlCalls
from nerite.workers.host.channel import Log
from nerite.workers.host.fork_server import ForkServer
from nerite.workers.ipc.shared_memory import ForeignSegments

_T = TypeVar("_T")
ReadRequest: TypeAlias = Callable[[str, bytes], tuple[RequestHeader, Sequence[Buffer]]]
"""Makes a request to a model of a line. Raises ``NeriteError``."""


@dataclass(frozen=True)
class ServerContext:
    """One for the server."""

    loop: asyncio.AbstractEventLoop
    loader: Executor
    """For what blocks while a model is loaded."""
    loading: asyncio.Semaphore
    """Held by each model that is being loaded."""
    fork_server: ForkServer
    foreign_segments: ForeignSegments
    server: ServerEntry
    """For what runs inside and asks the server in its turn."""
    log: Log
    """Where the lines of workers go."""
    stay_awake: float
    """Seconds that the loop, and each worker, may wait awake for what comes next."""
    queue: QueueOptions
    """The bounds of queues of models that do not say."""
    policies: HostPolicies
    limiter: RateLimiter | None
    """For all models, if executions are limited."""
    read_request: ReadRequest
    """Reads a recorded request."""
    tenant_admission: TenantAdmission
    metrics: MetricsOptions

    def blocking(self, work: Callable[..., _T], *arguments: Any) -> Awaitable[_T]:
        """Have the loader do something that blocks."""
        return self.loop.run_in_executor(self.loader, work, *arguments)

    @cached_property
    def control_calls(self) -> ModelControlCalls:
        """What models ask of the server besides inference."""
        return ModelControlCalls(self.server, self.loop, self.loading)

    @cached_property
    def busy_poll(self) -> BusyPoll:
        """Keeps the loop awake."""
        return BusyPoll(self.loop, self.stay_awake)
