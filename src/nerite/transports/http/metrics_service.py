"""Handler of the metrics port, which serves one page: ``/metrics``. The console gets its numbers from the same page."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from nerite.config.options import METRICS_CATEGORY, MetricsOptions
from nerite.core.byte_budget import BUDGETS, ByteBudget
from nerite.core.errors import Forbidden
from nerite.core.failures import InternalErrors, internal_errors
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.devices.metrics import write_device_metrics
from nerite.observability import custom_metrics, machine, model_metrics
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.observability.gpus import GpuMetrics
from nerite.observability.machine import MachineMetrics
from nerite.observability.model_metrics import version_labels
from nerite.transports import access
from nerite.transports.access import Lock
from nerite.transports.http import content_coding, reply
from nerite.transports.http.handler import BackgroundCalls, HttpExchange, HttpQuestion, LoopTurns
from nerite.transports.http.head import RequestHead
from nerite.transports.http.origins import BrowserGuard
from nerite.transports.http.reply import Reply

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_TYPE: Final = "text/plain; charset=utf-8"
_OPENMETRICS: Final = "application/openmetrics-text"
_OPENMETRICS_TYPE: Final = f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"


class MetricsSource(Protocol):
    """Part of the server that has metrics."""

    async def refresh(self) -> None:
        """Bring what other processes have counted into this one."""

    def write_metrics(self, page: Page) -> None:
        """Write the metrics."""


class MetricsService:
    """Answers ``GET /metrics``."""

    def __init__(
        self,
        server: InferenceServer,
        options: MetricsOptions,
        locks: Mapping[str, Lock],
        gpus: GpuMetrics | None,
        guard: BrowserGuard,
        ports: MetricsSource,
    ) -> None:
        """``locks`` are those of the HTTP port. Without ``gpus``, there are no GPU metrics."""
        self._server = server
        self._options = options
        self._version_tables = [table for table in model_metrics.TABLES if table.enabled(options)]
        self._locks = locks
        self._machine = MachineMetrics()
        self._gpus = gpus
        self._guard = guard
        self._ports = ports
        self._background_calls = BackgroundCalls()

    def begin(self, head: RequestHead) -> Reply | None:
        """Reject requests without the required key, and requests that a browser sends for another site's page."""
        try:
            self._guard.check(head)
        except Forbidden as error:
            return reply.error_reply(error)
        return access.key_refusal(self._locks, METRICS_CATEGORY, head)

    def receive_buffer(self, head: RequestHead) -> memoryview | None:
        """Return None: bodies are ignored on this port."""
        return None

    def handle(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> HttpQuestion | None:
        """Answer a request; the page is sent once it is complete."""
        if head.path in ("/metrics", "/metrics/") and head.method == "GET":
            self.scrape(connection, head, body)
        else:
            answer = Reply(200, b"", _TYPE) if head.method == "GET" else reply.NOT_ALLOWED
            connection.send([answer.encode()])
        return None

    def scrape(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        """Send the page to Prometheus."""
        self.send_page(connection, head, _TYPE, openmetrics=_OPENMETRICS in head.headers.get("accept", ""))

    def send_page(
        self,
        connection: HttpExchange,
        head: RequestHead,
        content_type: str,
        headers: bytes = b"",
        *,
        openmetrics: bool = False,
    ) -> None:
        """Send the page. ``openmetrics``: use OpenMetrics if there are exemplars, which the other format lacks."""
        openmetrics = openmetrics and self._server.tracing.exports
        answer = Reply(200, b"", _OPENMETRICS_TYPE if openmetrics else content_type, headers)
        coding = content_coding.accepted(head.headers.get("accept-encoding", ""))
        self._background_calls.start(connection, self._filled(answer, coding, openmetrics=openmetrics))

    async def _filled(self, answer: Reply, coding: str, *, openmetrics: bool) -> Reply:
        """Return ``answer`` with the page as its body."""
        pieces = await self._pieces(openmetrics=openmetrics)
        if coding:
            answer = answer._replace(headers=answer.headers + content_coding.coding_line(coding))
            pieces = [await asyncio.to_thread(content_coding.compress, coding, pieces)]
        return answer._replace(rest=pieces)

    async def _pieces(self, *, openmetrics: bool) -> list[bytes]:
        """Make the page, yielding to the loop in between, but never between two lines of one model version."""
        page = Page(openmetrics=openmetrics)
        await self._ports.refresh()
        for table in self._version_tables:
            page.write(table, [])
        turns = LoopTurns()
        for version in self._server.metrics():
            row = (version_labels(version), version)
            for table in self._version_tables:
                if table is not model_metrics.TOKENS:
                    page.write(table, [row])
            if version.tokens is not None:
                page.write(model_metrics.TOKENS, [(version_labels(version, vllm=True), version)])
            await turns.go_on()
        page.write(ERRORS, [ERRORS.row(internal_errors)])
        page.write(INTERNAL_CACHES, [INTERNAL_CACHES.row(budget, budget.name) for budget in BUDGETS])
        self._ports.write_metrics(page)
        self._server.write_metrics(page)
        if self._gpus is not None:
            self._gpus.write_metrics(page)
        if machine.MACHINE.enabled(self._options):
            self._machine.write_metrics(page)
        write_device_metrics(page, self._server.devices)
        custom_metrics.write(await self._server.custom_metrics(), page)
        pieces = []
        for piece in page.pieces():
            pieces.append(piece)
            await turns.go_on()
        return pieces

    def handle_again(self, connection: HttpExchange, meaning: object, data: bytearray) -> None:
        """Fail: requests on this port have no data."""
        raise AssertionError("no request on this port has data")

    def answer(self, connection: HttpExchange, request: InferenceRequest, response: InferenceResponse) -> None:
        """Fail: this port has no inferences."""
        raise AssertionError("no inferences on this port")


ERRORS: Final = MetricTable[InternalErrors]((
    Metric("nerite_internal_errors_total", "counter",
           "Unexpected exceptions in the server, by the part that caught them",
           lambda errors: dict(sorted(errors.counts.items())), "where"),
))  # fmt: skip

INTERNAL_CACHES: Final = MetricTable[ByteBudget]((
    Metric("nerite_internal_cache_bytes", "gauge",
           "Upper bound of the memory of the server's internal caches of requests, headers and replies, in bytes",
           lambda budget: budget.used + budget.elsewhere),
    Metric("nerite_internal_cache_limit_bytes", "gauge",
           "Memory limit of the server's internal caches, in bytes",
           lambda budget: budget.limit * budget.processes),
    Metric("nerite_internal_cache_evictions_total", "counter",
           "Entries evicted from the server's internal caches to make room", lambda budget: budget.evictions),
), labels=("cache",))  # fmt: skip
