"""Reading an infer request: JSON and the bytes behind it to a plan of what is asked, and where each tensor is.

A body whose JSON part was seen before, under the same head, costs one dictionary look-up. Most clients that give ids
write them first, and go on as before: then it costs one more, without the id.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nerite.core import headers
from nerite.core.byte_budget import HTTP_PLANS, Memo
from nerite.core.errors import InvalidArgument
from nerite.core.request import RequestHeader, SharedMemoryInput, with_request_id
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec
from nerite.transports.access import SenderHeaders
from nerite.transports.http import files, large_json, request_bodies
from nerite.transports.http.handler import HTTP, HttpDialect, HttpExchange
from nerite.transports.http.head import RequestHead
from nerite.transports.http.reply import Reply
from nerite.transports.http.request_bodies import Asked, HttpInferPlan

_MAX_SEARCHED = 16 * 1024
"""Bytes of a JSON part in which an id is looked for: what is longer is mostly data."""
_PLAN = 512
_PLACE = 160
"""Bytes that a plan takes in memory beside its header, and each place in it."""
_ID_FIRST = re.compile(rb'\{\s*"id"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*(?=")')
"""An id at the beginning of a JSON object that goes on: plain text, nothing escaped."""
_ID = b'"id"'


class HttpInferReader:
    """Makes plans for one head: the model, the version and what is said of who sends it are fixed."""

    def __init__(
        self,
        model_name: str,
        model_version: str,
        sender: SenderHeaders,
        max_size: int,
        half: bool = False,
        most: Callable[[], int] = lambda: request_bodies.MOST,
    ) -> None:
        """``half``: FP16 and BF16 are taken in the JSON. ``most``: how many inputs, and outputs, there may be."""
        self.model_name = model_name
        self.model_version = model_version
        self._sender = sender
        self.max_size = max_size
        self.half = half
        self.most = most
        self._plans: Memo[bytes, HttpInferPlan] = Memo()
        self._headers: Memo[tuple[object, ...], tuple[RequestHeader, int]] = Memo()
        """By what they say; each with the bytes that it takes in memory."""

    def plan(self, text: bytes) -> HttpInferPlan:
        """Return how to read a body whose JSON part is ``text``. Raises Triton's errors."""
        plan = self._plans.get(text)
        if plan is not None:
            return plan
        found = _ID_FIRST.match(text) if len(text) <= _MAX_SEARCHED else None
        rest = b"{" + text[found.end() :] if found is not None else text
        if found is None or _ID in rest:  # of several, the last one counts
            return self._remembered(text, self._make(text))
        plan = self._plans.get(rest)
        if plan is None:
            made = self._make(text)
            self._remembered(rest, made.of(""))
            return made
        return plan.of(request_bodies.checked_id(found[1].decode(errors="surrogateescape")))

    def _remembered(self, text: bytes, plan: HttpInferPlan) -> HttpInferPlan:
        """Keep a plan for the next time, if the same text always means the same."""
        if plan.repeats:
            HTTP_PLANS.put(self._plans, text, plan, plan.footprint + 2 * len(text))
        return plan

    def raw(self, signature: Signature, body: memoryview) -> HttpInferPlan:
        """Return how to read a body that is the bytes of the model's only input. Raises Triton's errors."""
        try:
            spec, place = files.read_raw_body(signature, body)
        except InvalidArgument as error:
            raise with_request_id(error, "") from None
        return HttpInferPlan(self.header([spec], binary=True), "", [place], len(body), raw=True)

    def header(self, specs: Sequence[TensorSpec], *, binary: bool = False) -> RequestHeader:
        """Return the header of a request that has these inputs and says no more; ``binary``: it wants bytes back."""
        return self._intern(
            RequestHeader(
                self.model_name,
                self.model_version,
                specs,
                parameters=dict(self._sender.forwarded),
                binary_by_default=binary,
                caller=self._sender.caller,
                idempotency_key=self._sender.idempotency_key,
            )
        )[0]

    def _intern(self, header: RequestHeader) -> tuple[RequestHeader, int]:
        """Return the header that says this, so that what others note on it is found again, and the bytes it takes."""
        identity = header.identity()
        known = self._headers.get(identity)
        if known is None:
            known = header, headers.request_header_bytes(header)
            HTTP_PLANS.put(self._headers, identity, known, known[1])
        return known

    def _make(self, text: bytes) -> HttpInferPlan:
        asked = request_bodies.read_infer_document(text, self.max_size, self.half, self.most)
        header, takes = self._intern(self._header_of(asked))
        request_id, _, _, _, places, size, _ = asked
        return HttpInferPlan(header, request_id, places, size, footprint=takes + _PLAN + _PLACE * len(places))

    def plan_of(self, read: Sequence[Any]) -> tuple[HttpInferPlan, str]:
        """Return how to read a body that ``json_calls.read_infer`` has read, and what is wrong with its strings."""
        asked, wrong = large_json.asked_of(read)
        header = self._header_of(asked)
        request_id, _, _, specs, places, size, _ = asked
        if not wrong:  # nor is there any need to look at all of them again
            header.sizes = [
                spec.byte_size if isinstance(place, (tuple, SharedMemoryInput)) else len(place)
                for spec, place in zip(specs, places, strict=True)
            ]
        return HttpInferPlan(header, request_id, places, size), wrong

    def _header_of(self, asked: Asked) -> RequestHeader:
        """Return the header of a request that says this."""
        _, fields, custom, specs, places, _, outputs = asked
        return RequestHeader(
            self.model_name,
            self.model_version,
            specs,
            outputs,
            parameters={**custom, **self._sender.forwarded},
            shared=SharedMemoryInput in map(type, places),
            caller=self._sender.caller,
            idempotency_key=self._sender.idempotency_key,
            **fields,
        )


# What the head of a request leads to.

Call = Callable[[HttpExchange, RequestHead, memoryview], None]
"""Answers one request, now or later."""


class HttpTarget(NamedTuple):
    """Worked out once for each distinct head; the head keeps it."""

    answer: Reply | None = None
    """Known without asking anybody: not found, not allowed."""
    refusal: Reply | None = None
    reader: HttpInferReader | None = None
    """For inference."""
    json_size: int = 0
    """Bytes of the JSON part of an infer request; -1: all of it; 0: none, the body is the tensor."""
    encoding: str = ""
    """How the body is compressed, and empty if it is not."""
    accepts: str = ""
    """How the reply is to be compressed."""
    call: Call | None = None
    """For everything but an infer request of Triton's kinds."""
    dialect: HttpDialect = HTTP
    """For inference."""
    half: bool = False
    """FP16 and BF16 are given in JSON."""


# Recorded requests: lines of a file, each the JSON that a client posts. They warm models up.


def read_recorded_request(model: str, line: bytes) -> tuple[RequestHeader, list[Buffer]]:
    """Return the request to ``model`` that a line is, with FP16 and BF16 as numbers. Raises the errors of the port."""
    plan = HttpInferReader(model, "", SenderHeaders({}), sys.maxsize, half=True).plan(line)
    if plan.size or plan.header.shared:
        raise InvalidArgument(
            "the data of a recorded request has to be in its JSON: 'binary_data_size' and 'shared_memory_region' "
            "say that it is elsewhere"
        )
    return plan.header, plan.data(memoryview(b""), 0)
