"""Load reports of members (ORCA): in a header of an HTTP response, or in a trailer of a gRPC call."""

from __future__ import annotations

import math
import struct
from base64 import b64decode
from collections.abc import Mapping
from typing import Final

import orjson

from nerite.balancing.member import LoadReport
from nerite.transports.grpc.wire import MalformedMessage, read_field

BINARY: Final = b"endpoint-load-metrics-bin"
"""Trailer with a report as a message of ORCA."""
FORMAT: Final = b"endpoint-load-metrics-format"
"""Header that asks for the report."""
_WAITING: Final = ("num_requests_waiting", "waiting_queue_size", "queue_depth")
_RUNNING: Final = ("num_requests_running", "running_requests")
_KV_USED: Final = ("kv_cache_usage_perc", "kv_cache_utilization", "gpu_cache_usage_perc")
"""Names of the figures, as various servers give them."""
_MAX_REPORT: Final = 4096
_MOST_REQUESTS: Final = 1e6
"""Requests that a member may say it has. What is beyond that is no figure, and would outlast all later reports."""
_MOST_FIGURES: Final = 64
_NAMED_METRICS: Final = 8 << 3 | 2
"""Tag of an entry in ``OrcaLoadReport.named_metrics``: a message of a name and a number."""
_NAME: Final = 1 << 3 | 2
_NUMBER: Final = 2 << 3 | 1


def load_report(line: bytes) -> LoadReport | None:
    """Return what a header in text or JSON says; None if it says nothing that is known."""
    if not line or len(line) > _MAX_REPORT:
        return None
    form, _, rest = line.partition(b" ")
    figures: dict[str, float] = {}
    try:
        if form.upper() == b"JSON":
            named = orjson.loads(rest).get("named_metrics", {})
            figures = {str(name): float(value) for name, value in named.items()}
        elif form.upper() == b"TEXT":
            for part in rest.split(b","):
                name, _, value = part.strip().partition(b"=")
                figures[name.decode("latin-1").removeprefix("named_metrics.")] = float(value)
    except (ValueError, AttributeError, TypeError):
        return None
    return _report_of(figures)


def load_report_in(trailer: bytes) -> LoadReport | None:
    """Return what a binary trailer says; None if it says nothing that is known."""
    if len(trailer) > _MAX_REPORT:
        return None
    try:
        message = memoryview(b64decode(trailer + b"=" * (-len(trailer) % 4), validate=True))
        return _report_of(_named_metrics(message))
    except (ValueError, MalformedMessage):
        return None


def _named_metrics(message: memoryview) -> dict[str, float]:
    figures: dict[str, float] = {}
    at = 0
    while at < len(message) and len(figures) < _MOST_FIGURES:
        tag, start, at = read_field(message, at)
        if tag != _NAMED_METRICS:
            continue
        entry, inside, name, value = message[start:at], 0, "", math.nan
        while inside < len(entry):
            tag, start, inside = read_field(entry, inside)
            if tag == _NAME:
                name = bytes(entry[start:inside]).decode("latin-1")
            elif tag == _NUMBER:
                (value,) = struct.unpack("<d", entry[start:inside])
        figures[name] = value
    return figures


def _report_of(figures: Mapping[str, float]) -> LoadReport | None:
    def first(names: tuple[str, ...], most: float) -> float:
        found = next((figures[name] for name in names if name in figures), math.nan)
        return found if 0.0 <= found <= most else math.nan

    report = LoadReport(first(_WAITING, _MOST_REQUESTS), first(_RUNNING, _MOST_REQUESTS), first(_KV_USED, 1.0))
    return None if all(map(math.isnan, report)) else report
