"""ORCA's ``OpenRcaService``: load reports that balancers get periodically, apart from any request (out of band)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from nerite.core.errors import InvalidArgument
from nerite.transports.engine_load import LoadSource, PeriodicLoad
from nerite.transports.grpc.subscription import Subscription
from nerite.transports.grpc.wire import MalformedMessage, TooManyFields, each_field, read_varint

if TYPE_CHECKING:
    from nerite.transports.grpc.stream import StreamConnection

METHOD: Final = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
SHORTEST: Final = 0.1
"""Seconds between two reports, however few a client asks for."""
LONGEST: Final = 3600.0
_DEFAULT: Final = 30.0
"""Seconds between two reports for clients that do not say."""
_MOST_FIELDS: Final = 64
_INTERVAL: Final = 1 << 3 | 2
_SECONDS: Final = 1 << 3
_NANOSECONDS: Final = 2 << 3


def interval_of(question: bytes) -> float:
    """Return the seconds between two reports that an ``OrcaLoadReportRequest`` asks for. Raises ``InvalidArgument``."""
    message, seconds = memoryview(question), 0.0
    try:
        for tag, _, at, stop in each_field(message, _MOST_FIELDS, "the message"):
            if tag == _INTERVAL:
                seconds = _duration(message[at:stop])
    except (MalformedMessage, TooManyFields):
        raise InvalidArgument(
            f"the message is not an OrcaLoadReportRequest of xds.service.orca.v3 with at most {_MOST_FIELDS} fields"
        ) from None
    return min(max(seconds, SHORTEST), LONGEST) if seconds else _DEFAULT


def _duration(message: memoryview) -> float:
    numbers = {_SECONDS: 0, _NANOSECONDS: 0}
    for tag, _, at, _ in each_field(message, _MOST_FIELDS, "report_interval"):
        if tag in numbers:
            numbers[tag], _ = read_varint(message, at)
    return numbers[_SECONDS] + numbers[_NANOSECONDS] / 1e9


class LoadReportStream(Subscription):
    """One call of ``StreamCoreMetrics``."""

    __slots__ = ("_interval", "_load", "_loop", "_source", "_timer")

    def __init__(self, connection: StreamConnection, stream_id: int, source: LoadSource) -> None:
        super().__init__(connection, stream_id)
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._load: PeriodicLoad | None = None
        self._interval = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, message: bytes) -> None:
        """Report the load now and periodically. Raises ``InvalidArgument``."""
        self._interval = interval_of(message)
        self._load = PeriodicLoad(self._source, self._loop.time())
        self._report()

    def _report(self) -> None:
        assert self._load is not None
        now = self._loop.time()
        self._timer = self._loop.call_at(now + self._interval, self._report)
        self.tell(self._load.report(now))

    def forget(self) -> None:
        """Report no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
