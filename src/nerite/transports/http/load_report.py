"""The load of engines, told with a reply to a balancer that asks for it (ORCA): a header for a header.

What is told, and in which words, is Triton's. Of a path without a model it is that of all engines of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import orjson

from nerite.core.engine_report import EngineReport
from nerite.observability.token_metrics import utilization
from nerite.transports.http.head import RequestHead

_WANTED: Final = "endpoint-load-metrics-format"
_LINE: Final = b"endpoint-load-metrics: "


def of(head: RequestHead, reports: Callable[[], Sequence[EngineReport]]) -> Callable[[], bytes] | None:
    """Return what makes the header line of a reply, empty where there is no engine; None if nobody asks.

    ``reports`` are those of the engines that are meant, as they are at the time.
    """
    form = _FORMS.get(head.headers.get(_WANTED, ""))
    if form is None:
        return None

    def line() -> bytes:
        latest = reports()
        if not latest:
            return b""
        return _LINE + form(utilization(latest), sum(each.total_blocks * each.block_size for each in latest))

    return line


def _json(used: float, capacity: int) -> bytes:
    return b"JSON " + orjson.dumps({"named_metrics": {"kv_cache_utilization": used, "max_token_capacity": capacity}})


def _text(used: float, capacity: int) -> bytes:
    return b"TEXT named_metrics.kv_cache_utilization=%f, named_metrics.max_token_capacity=%d" % (used, capacity)


_FORMS: Final[dict[str, Callable[[float, int], bytes]]] = {"json": _json, "text": _text}
