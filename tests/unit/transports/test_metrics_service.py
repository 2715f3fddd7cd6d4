"""The metrics page is made in turns: requests are answered in between, and each model's lines are of one moment."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from doubles import FakeTransport, request
from nerite.config.options import MetricsOptions
from nerite.observability.exposition import Page
from nerite.observability.histogram import StageTimes
from nerite.observability.model_metrics import MeteredVersion
from nerite.observability.statistics import VersionStatistics
from nerite.transports.http import handler
from nerite.transports.http.connection import HttpConnection
from nerite.transports.http.handler import HttpShared
from nerite.transports.http.metrics_service import MetricsService
from nerite.transports.http.origins import BrowserGuard
from nerite.transports.limits import TransportLimits

MODELS = ("a", "b", "c")


class Busy:
    """A server whose models answer a request in each turn of the loop that the page leaves them."""

    def __init__(self) -> None:
        self.counted = {model: VersionStatistics(StageTimes()) for model in MODELS}
        self.turns = 0
        self.tracing = SimpleNamespace(exports=False)
        self.devices = None
        self.over = False

    def metrics(self) -> Iterator[MeteredVersion]:
        for model, counted in self.counted.items():
            yield MeteredVersion(model, "1", "", {}, counted, 0, 0.5, 0, 0, {0: 0}, {}, 1, False)

    def write_metrics(self, page: Page) -> None:
        pass

    async def custom_metrics(self) -> list[Any]:
        return []

    def work(self) -> None:
        self.turns += 1
        for counted in self.counted.values():
            counted.composed(request(), 1, 1, 1, 1, 4)
        if not self.over:
            asyncio.get_running_loop().call_soon(self.work)


class OnePort:
    """Ports of a server without fronts."""

    def __init__(self, bounds: TransportLimits) -> None:
        self.write_metrics = bounds.write_metrics

    async def refresh(self) -> None:
        """Nothing is counted elsewhere."""


async def scraped(server: Any, head: bytes, path: bytes = b"/metrics") -> tuple[bytes, bytes]:
    """Return head and body of the answer."""
    bounds = TransportLimits()
    service = MetricsService(server, MetricsOptions(cpu=False), {}, None, BrowserGuard((), None), OnePort(bounds))
    connection = HttpConnection(HttpShared(service, 0, bounds))
    transport = FakeTransport()
    connection.connection_made(transport)  # type: ignore[arg-type]  # as much of one as is needed
    raw = b"GET " + path + b" HTTP/1.1\r\n" + head + b"\r\n"
    connection.get_buffer(-1)[: len(raw)] = raw
    connection.buffer_updated(len(raw))
    (task,) = asyncio.all_tasks() - {asyncio.current_task()}
    await task
    server.over = True
    first, _, body = bytes(transport.written).partition(b"\r\n\r\n")
    return first, body


def test_models_answer_in_between_and_the_lines_of_each_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "TURN", 0.0)
    server = Busy()

    async def run() -> bytes:
        server.work()
        return (await scraped(server, b""))[1]

    page = asyncio.run(run()).decode()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.labels.keys() == {"model", "version"}:
                found.setdefault(sample.name, {})[sample.labels["model"]] = sample.value
    answered = found["nv_inference_request_success_total"]
    assert answered == found["nerite_request_duration_seconds_count"] == found["nv_inference_count_total"]
    assert 1 <= answered["a"] < answered["b"] < answered["c"] < server.turns


def lines(page: bytes) -> list[bytes]:
    """Return the lines of a page, without those that tell what asking for one takes."""
    told = re.compile(rb'nerite_internal_cache_(bytes|evictions_total){cache="http_').match
    return [line for line in page.splitlines() if not told(line)]


@pytest.mark.parametrize(("wanted", "bits"), [(b"gzip", 31), (b"deflate;q=0.5", 15)])
def test_who_wants_it_compressed(wanted: bytes, bits: int) -> None:
    _, plain = asyncio.run(scraped(Busy(), b"", b"/metrics/"))
    first, packed = asyncio.run(scraped(Busy(), b"Accept-Encoding: " + wanted + b"\r\n"))
    assert b"Content-Encoding: " + wanted.partition(b";")[0] in first.split(b"\r\n")
    assert b"Content-Length: %d" % len(packed) in first.split(b"\r\n")
    assert lines(zlib.decompress(packed, bits)) == lines(plain)
    assert len(packed) < len(plain) / 5
