"""Load reports of engines (ORCA), for load balancers that ask for them with a header of a request.

Over HTTP the report is a header of the reply, in text or JSON: the format and the first two figures are Triton's, the
others vLLM's. Over gRPC it is a trailer, for which ORCA has a message of its own.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import orjson

from nerite.core.engine_report import EngineReport
from nerite.http2 import encode_headers
from nerite.observability.token_statistics import kv_utilization
from nerite.wire.fields import nested_field

FORMAT: Final = "endpoint-load-metrics-format"
"""Header of a request that asks for the report, and says in which format."""
_HEADER: Final = b"endpoint-load-metrics"
_TRAILER: Final = b"endpoint-load-metrics-bin"
_BINARY: Final = b"bin"
_NAMED_METRICS: Final = 8
"""Field of ``xds.data.orca.v3.OrcaLoadReport``: a map from names to numbers."""
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
        entries = (
            nested_field(_NAMED_METRICS, nested_field(1, name.encode()) + _DOUBLE + struct.pack("<d", value))
            for name, value in _figures(latest).items()
        )
        return encode_headers([(_TRAILER, b64encode(b"".join(entries)).rstrip(b"="))])

    return trailer


def _json(figures: Mapping[str, float]) -> bytes:
    return b"JSON " + orjson.dumps({"named_metrics": figures})


def _text(figures: Mapping[str, float]) -> bytes:
    parts = (
        f"named_metrics.{name}={value:{'d' if isinstance(value, int) else 'f'}}" for name, value in figures.items()
    )
    return b"TEXT " + ", ".join(parts).encode()


_FORMS: Final[Mapping[str, Callable[[Mapping[str, float]], bytes]]] = {"json": _json, "text": _text}
