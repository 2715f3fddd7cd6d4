"""The metrics port: one page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from nerite.config.options import METRICS_CATEGORY, MetricsOptions
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.observability import custom_metrics, exposition, metrics
from nerite.observability.gpu_gauges import GpuGauges
from nerite.observability.machine import Machine
from nerite.transports.http import access, reply
from nerite.transports.http.connection import HttpConnection
from nerite.transports.http.handler import Question
from nerite.transports.http.head import RequestHead
from nerite.transports.http.reply import Reply
from nerite.transports.keys import Lock

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_TYPE: Final = "text/plain; charset=utf-8"
_OPEN: Final = "application/openmetrics-text"
_OPEN_TYPE: Final = f"{_OPEN}; version=1.0.0; charset=utf-8"


class MetricsService:
    """Answers ``GET /metrics``."""

    def __init__(
        self, server: InferenceServer, options: MetricsOptions, locks: Mapping[str, Lock], gpus: GpuGauges | None
    ) -> None:
        """``locks`` are those of the HTTP port. Without ``gpus`` nothing is said of GPUs."""
        self._server = server
        self._options = options
        self._locks = locks
        self._machine = Machine()
        self._gpus = gpus

    def begin(self, head: RequestHead) -> Reply | None:
        """Refuse who lacks the key, if there is one."""
        return access.refusal(self._locks, METRICS_CATEGORY, head)

    def receive_buffer(self, head: RequestHead) -> memoryview | None:
        """Offer nothing: no body matters here."""
        return None

    def handle(self, connection: HttpConnection, head: RequestHead, body: memoryview) -> Question | None:
        """Answer at once."""
        if head.method != "GET":
            answer = reply.NOT_ALLOWED
        elif head.path != "/metrics":
            answer = Reply(200, b"", _TYPE)
        else:
            answer = self.page(_TYPE, openly=_OPEN in head.headers.get("accept", ""))
        connection.send([answer.encode()])
        return None

    def page(self, content_type: str, *, openly: bool = False) -> Reply:
        """Return the page. ``openly``: with exemplars, if there are some, which only OpenMetrics can have."""
        families = metrics.families(self._server.metrics(), counters=self._options.counter_latencies)
        families += self._server.cache_metrics()
        families += self._server.admission_metrics()
        if self._gpus is not None:
            families += self._gpus.families()
        if self._options.cpu:
            families += self._machine.families()
        families += custom_metrics.families(self._server.custom_metrics(), [family.name for family in families])
        if openly and self._server.tracing.exports:
            return Reply(200, exposition.render_openly(families), _OPEN_TYPE)
        return Reply(200, exposition.render(families), content_type)

    def handle_again(self, connection: HttpConnection, meaning: object, data: bytearray) -> None:
        """Answer nothing: no request on this port has data."""
        raise AssertionError("no request on this port has data")

    def answer(self, connection: HttpConnection, request: InferenceRequest, response: InferenceResponse) -> None:
        """Answer nothing: there are no inferences on this port."""
        raise AssertionError("no inferences on this port")
