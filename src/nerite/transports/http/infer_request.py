"""Reading an infer request: JSON and the bytes behind it to a plan of what is asked, and where each tensor is.

A body whose JSON part was seen before, under the same head, costs one dictionary look-up. Most clients that give ids
write them first, and go on as before: then it costs one more, without the id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nerite.core.errors import Internal, InvalidArgument
from nerite.core.request import RequestHeader, SharedPlace, labelled
from nerite.core.signature import Signature
from nerite.core.tensor import TensorSpec
from nerite.transports.callers import Sender
from nerite.transports.http import infer_document, raw_body
from nerite.transports.http.json_text import parse
from nerite.transports.http.plan import Plan

_MAX_PLANS = 256
_MAX_PLAN_JSON = 16 * 1024
_ID_FIRST = re.compile(rb'\{\s*"id"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*(?=")')
"""An id at the beginning of a JSON object that goes on: plain text, nothing escaped."""
_ID = b'"id"'


class Reader:
    """Makes plans for one head: the model, the version and what is said of who sends it are fixed."""

    def __init__(
        self,
        model_name: str,
        model_version: str,
        sender: Sender,
        max_size: int,
        half: bool = False,
    ) -> None:
        """``half``: FP16 and BF16 are taken in the JSON."""
        self.model_name = model_name
        self.model_version = model_version
        self._sender = sender
        self._max_size = max_size
        self._half = half
        self._plans: dict[bytes, Plan] = {}
        self._headers: dict[tuple[object, ...], RequestHeader] = {}

    def plan(self, text: bytes) -> Plan:
        """Return how to read a body whose JSON part is ``text``. Raises Triton's errors."""
        plan = self._plans.get(text)
        if plan is not None:
            return plan
        # A long one is mostly data, and not worth another look.
        found = _ID_FIRST.match(text) if len(text) <= _MAX_PLAN_JSON else None
        rest = b"{" + text[found.end() :] if found is not None else text
        if found is None or _ID in rest:  # of several, the last one counts
            return self._remembered(text, self._make(text))
        plan = self._plans.get(rest)
        if plan is None:
            made = self._make(text)
            self._remembered(rest, made.of(""))
            return made
        return plan.of(found[1].decode(errors="surrogateescape"))

    def _remembered(self, text: bytes, plan: Plan) -> Plan:
        """Keep a plan for the next time, if the same text always means the same."""
        if len(text) <= _MAX_PLAN_JSON and plan.repeats:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[text] = plan
        return plan

    def raw(self, signature: Signature, body: memoryview) -> Plan:
        """Return how to read a body that is the bytes of the model's only input. Raises Triton's errors."""
        try:
            spec, place = raw_body.read(signature, body)
        except InvalidArgument as error:
            raise labelled(error, "") from None
        return Plan(self.header([spec], binary=True), "", [place], len(body), raw=True)

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
        )

    def _intern(self, header: RequestHeader) -> RequestHeader:
        """Return the one header that says this, so that what others note on it is found again."""
        identity = header.identity()
        known = self._headers.get(identity)
        if known is None:
            if len(self._headers) >= _MAX_PLANS:
                self._headers.clear()
            known = self._headers[identity] = header
        return known

    def _make(self, text: bytes) -> Plan:
        document = parse(text)
        if not isinstance(document, dict):
            raise Internal("Unable to parse 'inputs': attempt to access non-existing object member 'inputs'")
        request_id = infer_document.read_id(document)
        fields, custom = infer_document.read_parameters(document.get("parameters", {}))
        specs, places, size = infer_document.read_inputs(document, self._max_size, self._half)
        header = RequestHeader(
            self.model_name,
            self.model_version,
            specs,
            infer_document.read_outputs(document),
            parameters={**custom, **self._sender.forwarded},
            shared=any(isinstance(place, SharedPlace) for place in places),
            caller=self._sender.caller,
            idempotency_key=self._sender.idempotency_key,
            **fields,
        )
        return Plan(self._intern(header), request_id, places, size)
