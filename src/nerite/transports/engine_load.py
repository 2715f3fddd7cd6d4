"""Load reports of engines (ORCA), for load balancers that ask for them with a header of a request.

Over HTTP the report is a header of the reply, in text or JSON: the format and the first two figures are Triton's, the
others vLLM's. Over gRPC it is a trailer, for which ORCA has a message of its own, or the answers of a service to which
clients subscribe.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import orjson

from nerite.core.engine_report import EngineReport
from nerite.http2 import encode_headers
from nerite.observability.machine import CpuUtilization
from nerite.observability.token_statistics import kv_utilization
from nerite.wire.fields import nested_field, varint

FORMAT: Final = "endpoint-load-metrics-format"
"""Header of a request that asks for the report, and says in which format."""
_HEADER: Final = b"endpoint-load-metrics"
_TRAILER: Final = b"endpoint-load-metrics-bin"
_BINARY: Final = b"bin"
_CPU_UTILIZATION: Final = 1
"""Field of ``xds.data.orca.v3.OrcaLoadReport``, as the next three."""
_RATE: Final = 6
_NAMED_METRICS: Final = 8
"""A map from names to numbers."""
_APPLICATION_UTILIZATION: Final = 9
_DOUBLE: Final = b"\x11"
"""Tag of the value in an entry of that map."""
ReadReports: TypeAlias = Callable[[str], Sequence[EngineReport]]
"""Returns the current reports of the engines of a model, or of all engines if its name is empty."""


def _figures(reports: Sequence[EngineReport]) -> Mapping[str, float]:
    return {
        "kv_cache_utilization": kv_utilization(reports),
        "max_token_capacity": sum(each.total_blocks * each.block_size for each in reports),
        "num_requests_running": sum(each.running for each in reports),
        "num_requests_waiting": sum(each.waiting for each in reports),
    }


def load_line_of(form: str, reports: Callable[[], Sequence[EngineReport]]) -> Callable[[], bytes] | None:
    """Return a function that makes the header line of an HTTP reply, empty without engines.

    None if ``form``, the value of the request's header, asks for no report.
    """
    write = _FORMS.get(form)
    if write is None:
        return None

    def line() -> bytes:
        latest = reports()
        return b"%b: %b" % (_HEADER, write(_figures(latest))) if latest else b""

    return line


def load_trailer_of(form: bytes | None, reports: ReadReports | None) -> Callable[[str], bytes] | None:
    """Return a function that makes the encoded trailer of a gRPC reply for a model, empty without engines.

    None if ``form``, the value of the call's metadata, asks for no report.
    """
    if form != _BINARY or reports is None:
        return None

    def trailer(model: str) -> bytes:
        latest = reports(model)
        if not latest:
            return b""
        return encode_headers([(_TRAILER, b64encode(_entries(latest)).rstrip(b"="))])

    return trailer


def _entries(reports: Sequence[EngineReport]) -> bytes:
    """Return the figures as fields of a message of ORCA."""
    return b"".join(
        nested_field(_NAMED_METRICS, nested_field(1, name.encode()) + _DOUBLE + struct.pack("<d", value))
        for name, value in _figures(reports).items()
    )


class LoadSource(NamedTuple):
    """Where the load of a server is read."""

    reports: ReadReports
    succeeded: Callable[[], int]
    """Returns the number of requests that have succeeded since the start."""


class PeriodicLoad:
    """Makes the reports for one client that gets them periodically, whether it sends requests or not.

    Beside the figures of engines they say what a weighted round robin needs: the requests per second, and how utilized
    the server is: its engines' KV cache, or without engines the processors.
    """

    def __init__(self, source: LoadSource, now: float) -> None:
        """``now`` and ``at`` are in seconds, of any clock."""
        self._source = source
        self._processors = CpuUtilization()
        self._succeeded = source.succeeded()
        self._told_at = now

    def report(self, at: float) -> bytes:
        """Return the report of the time since the last one."""
        succeeded, reports = self._source.succeeded(), self._source.reports("")
        seconds = at - self._told_at
        rate = max(succeeded - self._succeeded, 0) / seconds if seconds > 0 else 0.0  # models may be unloaded
        self._succeeded, self._told_at = succeeded, at
        processors = self._processors.since_last()
        fields = {
            _CPU_UTILIZATION: processors,
            _RATE: rate,
            _APPLICATION_UTILIZATION: kv_utilization(reports) if reports else processors,
        }
        written = (varint(field << 3 | 1) + struct.pack("<d", value) for field, value in fields.items() if value)
        return b"".join(written) + (_entries(reports) if reports else b"")


def _json(figures: Mapping[str, float]) -> bytes:
    return b"JSON " + orjson.dumps({"named_metrics": figures})


def _text(figures: Mapping[str, float]) -> bytes:
    parts = (
        f"named_metrics.{name}={value:{'d' if isinstance(value, int) else 'f'}}" for name, value in figures.items()
    )
    return b"TEXT " + ", ".join(parts).encode()


_FORMS: Final[Mapping[str, Callable[[Mapping[str, float]], bytes]]] = {"json": _json, "text": _text}
