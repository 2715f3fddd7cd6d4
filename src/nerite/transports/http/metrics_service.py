"""Handler of the metrics port, which serves one page: ``/metrics``. The console gets its numbers from the same page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from nerite.config.options import METRICS_CATEGORY, MetricsOptions
from nerite.core.byte_budget import BUDGETS
from nerite.core.errors import Forbidden
from nerite.core.failures import internal_errors
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.observability import custom_metrics, machine, model_metrics
from nerite.observability.exposition import MetricFamily, Page, label
from nerite.observability.gpus import GpuGauges
from nerite.observability.machine import Machine
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


class MetricsService:
    """Answers ``GET /metrics``."""

    def __init__(
        self,
        server: InferenceServer,
        options: MetricsOptions,
        locks: Mapping[str, Lock],
        gpus: GpuGauges | None,
        guard: BrowserGuard,
        ports: Callable[[], Sequence[MetricFamily]],
    ) -> None:
        """``locks`` are those of the HTTP port. Without ``gpus``: no GPU metrics. ``ports`` returns those of ports."""
        self._server = server
        self._options = options
        self._locks = locks
        self._machine = Machine()
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
            self.send_page(connection, head, _TYPE, openly=_OPENMETRICS in head.headers.get("accept", ""))
        else:
            answer = Reply(200, b"", _TYPE) if head.method == "GET" else reply.NOT_ALLOWED
            connection.send([answer.encode()])
        return None

    def send_page(
        self,
        connection: HttpExchange,
        head: RequestHead,
        content_type: str,
        headers: bytes = b"",
        *,
        openly: bool = False,
    ) -> None:
        """Send the page. ``openly``: use OpenMetrics if there are exemplars, which the other format lacks."""
        openly = openly and self._server.tracing.exports
        answer = Reply(200, b"", _OPENMETRICS_TYPE if openly else content_type, headers)
        coding = content_coding.accepted(head.headers.get("accept-encoding", ""))
        self._background_calls.start(connection, self._filled(answer, coding, openly=openly))

    async def _filled(self, answer: Reply, coding: str, *, openly: bool) -> Reply:
        """Return ``answer`` with the page as its body."""
        pieces = await self._pieces(openly=openly)
        if coding:
            answer = answer._replace(headers=answer.headers + content_coding.coding_line(coding))
            pieces = [await asyncio.to_thread(content_coding.compress, coding, pieces)]
        return answer._replace(rest=pieces)

    async def _pieces(self, *, openly: bool) -> list[bytes]:
        """Make the page, yielding to the loop in between, but never between two lines of one model version."""
        page = Page(openly=openly)
        latencies = self._options.counter_latencies
        page.add(model_metrics.core_families([], latencies=latencies))
        turns = LoopTurns()
        for version in self._server.metrics():
            page.add(model_metrics.core_families([version], latencies=latencies))
            await turns.go_on()
        page.add([_internal_errors(), *_internal_caches()])
        page.add(self._ports())
        page.add(self._server.cache_metrics())
        page.add(self._server.admission_metrics())
        if self._gpus is not None:
            page.add(self._gpus.families())
        if self._options.cpu:
            page.add(self._machine.families())
        page.add(machine.pinned_pool())
        page.add(custom_metrics.families(await self._server.custom_metrics(), page.names))
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


def _internal_errors() -> MetricFamily:
    return MetricFamily(
        "nerite_internal_errors_total",
        "Unexpected exceptions in the server, by the part that caught them",
        "counter",
        [(label("where", where), count) for where, count in sorted(internal_errors.counts.items())],
    )


def _internal_caches() -> list[MetricFamily]:
    labelled = [(label("cache", budget.name), budget) for budget in BUDGETS]
    return [
        MetricFamily(
            "nerite_internal_cache_bytes",
            "Upper bound of the memory of the server's internal caches of requests, headers and replies, in bytes",
            "gauge",
            [(labels, budget.used) for labels, budget in labelled],
        ),
        MetricFamily(
            "nerite_internal_cache_limit_bytes",
            "Memory limit of the server's internal caches, in bytes",
            "gauge",
            [(labels, budget.limit) for labels, budget in labelled],
        ),
        MetricFamily(
            "nerite_internal_cache_evictions_total",
            "Entries evicted from the server's internal caches to make room",
            "counter",
            [(labels, budget.evictions) for labels, budget in labelled],
        ),
    ]
