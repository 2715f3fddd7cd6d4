"""Turns the body of an infer request into a plan: the request header, and where each tensor is.

A body whose JSON part was seen before, under the same head, costs one dictionary look-up. Most clients that send ids
put the id first and repeat the rest: such a body costs a second look-up, without the id.

Also: the target that a head is routed to, and recorded requests, which warm models up.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nerite.core import headers
from nerite.core.byte_budget import HTTP_PLANS, Memo
from nerite.core.errors import InvalidArgument
from nerite.core.request import Caller, RequestHeader, SharedMemoryInput, with_request_id
from nerite.transports.access import SenderHeaders
from nerite.transports.http import files, large_json, request_bodies
from nerite.transports.http.handler import HTTP, HttpDialect, HttpExchange
from nerite.transports.http.head import RequestHead
from nerite.transports.http.request_bodies import Asked, HttpInferPlan

if TYPE_CHECKING:
    from nerite.core.signature import Signature
    from nerite.core.tensor import Buffer, TensorSpec
    from nerite.transports.http.reply import Reply

_MAX_ID_SEARCH = 16 * 1024
"""Largest JSON part in bytes that is searched for an id: longer ones are mostly data."""
_PLAN_SIZE = 512
_PLACE_SIZE = 160
"""Approximate bytes of memory of a plan without its header, and of each place in it."""
_ID_FIRST = re.compile(rb'\{\s*"id"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*(?=")')
"""An id that is the first member of a JSON object with more members, as plain text without escapes."""
_ID = b'"id"'


class HttpInferReader:
    """Makes plans for the requests of one head, which fixes the model, the version and the sender."""

    def __init__(
        self,
        model_name: str,
        model_version: str,
        sender: SenderHeaders,
        max_size: int,
        half: bool = False,
        most: Callable[[], int] = lambda: request_bodies.MAX_ENTRIES,
    ) -> None:
        """``half``: FP16 and BF16 are allowed in JSON. ``most`` returns the maximum number of inputs and outputs."""
        self.model_name = model_name
        self.model_version = model_version
        self._sender = sender
        self.max_size = max_size
        self.half = half
        self.most = most
        self._plans: Memo[bytes, HttpInferPlan] = Memo()
        self._headers: Memo[tuple[object, ...], tuple[RequestHeader, int]] = Memo()
        """Interned headers by their identity, each with its size in memory in bytes."""

    @property
    def caller(self) -> Caller | None:
        """The sender, as admission control sees it."""
        return self._sender.caller

    def plan(self, text: bytes) -> HttpInferPlan:
        """Return the plan for a body whose JSON part is ``text``. Raises Triton's errors."""
        plan = self._plans.get(text)
        if plan is not None:
            return plan
        found = _ID_FIRST.match(text) if len(text) <= _MAX_ID_SEARCH else None
        rest = b"{" + text[found.end() :] if found is not None else text
        if found is None or _ID in rest:  # if there are several ids, the last one counts
            return self._remembered(text, self._make(text))
        plan = self._plans.get(rest)
        if plan is None:
            made = self._make(text)
            self._remembered(rest, made.of(""))
            return made
        return plan.of(request_bodies.checked_id(found[1].decode(errors="surrogateescape")))

    def _remembered(self, text: bytes, plan: HttpInferPlan) -> HttpInferPlan:
        """Memoize a plan if the same text always leads to the same plan; return it."""
        if plan.repeats:
            HTTP_PLANS.put(self._plans, text, plan, plan.footprint + 2 * len(text))
        return plan

    def raw(self, signature: Signature, body: memoryview) -> HttpInferPlan:
        """Return the plan for a body that is the raw data of the model's only input. Raises Triton's errors."""
        try:
            spec, place = files.read_raw_body(signature, body)
        except InvalidArgument as error:
            raise with_request_id(error, "") from None
        return HttpInferPlan(self.header([spec], binary=True), "", [place], len(body), raw=True)

    def header(self, specs: Sequence[TensorSpec], *, binary: bool = False) -> RequestHeader:
        """Return the header of a request with only these inputs; ``binary``: outputs are returned as binary data."""
        return self._intern(
            RequestHeader(
                self.model_name,
                self.model_version,
                specs,
                parameters=dict(self._sender.forwarded),
                forwarded=self._sender.forwarded.keys(),
                binary_by_default=binary,
                caller=self._sender.caller,
                idempotency_key=self._sender.idempotency_key,
                sticky_fields=self._sender.sticky_fields,
            )
        )[0]

    def _intern(self, header: RequestHeader) -> tuple[RequestHeader, int]:
        """Return the interned equal of ``header``, which carries what others memoized on it, and its size in memory."""
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
        return HttpInferPlan(header, request_id, places, size, footprint=takes + _PLAN_SIZE + _PLACE_SIZE * len(places))

    def plan_of(self, read: Sequence[Any]) -> tuple[HttpInferPlan, str]:
        """Return the plan for a body that ``large_json.read_infer`` has read, and the error in its strings, if any."""
        asked, wrong = large_json.asked_of(read)
        header = self._header_of(asked)
        request_id, _, _, specs, places, size, _ = asked
        if not wrong:  # the helper has checked the sizes, so later validation need not scan the strings again
            header.sizes = [
                spec.byte_size if isinstance(place, (tuple, SharedMemoryInput)) else len(place)
                for spec, place in zip(specs, places, strict=True)
            ]
        return HttpInferPlan(header, request_id, places, size), wrong

    def _header_of(self, asked: Asked) -> RequestHeader:
        """Return the header of a parsed request."""
        _, fields, custom, specs, places, _, outputs = asked
        return RequestHeader(
            self.model_name,
            self.model_version,
            specs,
            outputs,
            parameters={**custom, **self._sender.forwarded},
            forwarded=self._sender.forwarded.keys(),
            shared=SharedMemoryInput in map(type, places),
            caller=self._sender.caller,
            idempotency_key=self._sender.idempotency_key,
            sticky_fields=self._sender.sticky_fields,
            **fields,
        )


Call = Callable[[HttpExchange, RequestHead, memoryview], None]
"""Answers one request, now or later."""


class HttpTarget(NamedTuple):
    """What a head is routed to. Computed once for each distinct head, and kept with it."""

    answer: Reply | None = None
    """A constant reply, such as not found or not allowed."""
    refusal: Reply | None = None
    """The error reply of a request that is rejected before its body is received."""
    reader: HttpInferReader | None = None
    """Set for inference."""
    json_size: int = 0
    """Size of the JSON part of an infer request; -1: the whole body; 0: none, the body is the tensor."""
    encoding: str = ""
    """Content coding of the body; empty if it is not compressed."""
    accepts: str = ""
    """Content coding of the reply; empty for none."""
    call: Call | None = None
    """Set for everything except Triton's infer requests."""
    dialect: HttpDialect = HTTP
    """For inference."""
    half: bool = False
    """Outputs of type FP16 and BF16 may be returned in JSON."""


def read_recorded_request(model: str, line: bytes) -> tuple[RequestHeader, list[Buffer]]:
    """Return the request to ``model`` in one line of a file of recorded requests: the JSON that a client posts.

    FP16 and BF16 are allowed as numbers. Raises the errors of the HTTP port.
    """
    plan = HttpInferReader(model, "", SenderHeaders({}), sys.maxsize, half=True).plan(line)
    if plan.size or plan.header.shared:
        raise InvalidArgument(
            "the data of a recorded request must be in its JSON: 'binary_data_size' and 'shared_memory_region' "
            "are not supported"
        )
    return plan.header, plan.data(memoryview(b""), 0)
