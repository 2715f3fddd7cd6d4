"""What a call inherits from the requests that it is made for.

Where a model works on one request, or says by ``trace`` which one a call is for, that is the parent. Where it works on
a batch, a call is for all of them: it has the highest of their priorities and the longest of their timeouts, and is
cancelled when all of them are. Its caller is theirs if they have one in common. If not, or if nothing tells what a call
is for, it has no caller: what is computed for it must not answer another tenant faster.
"""

from __future__ import annotations

from collections.abc import Sequence

from nerite.core import footprint
from nerite.core.byte_budget import MODEL_CALLS, Memo
from nerite.core.caller import MIXED, Caller
from nerite.core.request import InferenceRequest, RequestHeader


class Inheritance:
    """The headers of the calls of one worker, with what they inherit. Repeated ones are mostly the same object."""

    def __init__(self, *, tenants: bool = False) -> None:
        """``tenants``: requests of clients have callers."""
        self._of_none = MIXED if tenants else None
        self._headers: Memo[tuple[RequestHeader, int, Caller | None], RequestHeader] = Memo()

    def header(self, own: RequestHeader, parents: Sequence[InferenceRequest], now: int) -> RequestHeader:
        """Return the header of a call: what it says itself counts more than what it inherits.

        Without ``parents`` it is not known what it is for.
        """
        priority, timeout_us = own.priority, own.timeout_us
        headers = [each.header for each in parents]
        if not priority and any(header.priority for header in headers):
            priority = min(header.priority for header in headers if header.priority)
        if not timeout_us and headers and all(header.timeout_us for header in headers):
            timeout_us = max(_left(each, now) for each in parents)
        caller = _common(headers) if headers else self._of_none
        if timeout_us != own.timeout_us:  # what is left of a timeout is another number each time
            return _with(own, priority, timeout_us, caller)
        if priority == own.priority and caller is None:
            return own
        key = own, priority, caller
        header = self._headers.get(key)
        if header is None:
            header = _with(own, priority, timeout_us, caller)
            MODEL_CALLS.put(self._headers, key, header, 2 * footprint.of_request_header(header))
        return header


def _common(headers: Sequence[RequestHeader]) -> Caller | None:
    """Return the tenant that all requests are of; ``MIXED`` if there are several, None if there is none."""
    callers = [header.caller for header in headers if header.caller is not None]
    if not callers:
        return None
    tenant = callers[0].tenant
    return Caller(tenant) if tenant and all(each.tenant == tenant for each in callers) else MIXED


def _left(parent: InferenceRequest, now: int) -> int:
    """Return how many microseconds are left of a request's timeout, at least one."""
    return max(1, parent.header.timeout_us - (now - parent.arrived_ns) // 1000)


def _with(own: RequestHeader, priority: int, timeout_us: int, caller: Caller | None) -> RequestHeader:
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
        caller=caller,
    )
