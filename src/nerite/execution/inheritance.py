"""What a call inherits from the requests that it is made for.

Where a model works on one request, or says by ``trace`` which one a call is for, that is the parent. Where it works on
a batch, a call is for all of them: it has the highest of their priorities and the longest of their timeouts, and is
cancelled when all of them are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nerite.core.request import InferenceRequest, RequestHeader

_MOST: Final = 1024


class Inheritance:
    """The headers of the calls of one worker, with what they inherit. Repeated ones are the same object."""

    def __init__(self) -> None:
        self._headers: dict[tuple[RequestHeader, int, int], RequestHeader] = {}

    def header(self, own: RequestHeader, parents: Sequence[InferenceRequest], now: int) -> RequestHeader:
        """Return the header of a call: what it says itself counts more than what it inherits."""
        priority, timeout_us = own.priority, own.timeout_us
        headers = [each.header for each in parents]
        if not priority and any(header.priority for header in headers):
            priority = min(header.priority for header in headers if header.priority)
        if not timeout_us and all(header.timeout_us for header in headers):
            timeout_us = max(_left(each, now) for each in parents)
        if priority == own.priority and timeout_us == own.timeout_us:
            return own
        header = self._headers.get((own, priority, timeout_us))
        if header is None:
            if len(self._headers) >= _MOST:
                self._headers.clear()
            header = self._headers[own, priority, timeout_us] = _with(own, priority, timeout_us)
        return header


def _left(parent: InferenceRequest, now: int) -> int:
    """Return how many microseconds are left of a request's timeout, at least one."""
    return max(1, parent.header.timeout_us - (now - parent.arrived_ns) // 1000)


def _with(own: RequestHeader, priority: int, timeout_us: int) -> RequestHeader:
    return RequestHeader(
        own.model_name,
        own.model_version,
        own.inputs,
        own.outputs,
        parameters=own.parameters,
        priority=priority,
        timeout_us=timeout_us,
        sequence_id=own.sequence_id,
        sequence_start=own.sequence_start,
        sequence_end=own.sequence_end,
    )
