"""What two requests must have in common to be answered alike, as 32 bytes.

A key stands for everything of a request that its model can see and that may matter to the answer: each input's name,
datatype, shape and bytes, whatever their order; the outputs that are wanted; custom parameters; the correlation id; the
tenant, unless tenants share answers; and for the model itself, see ``renew``. Not the id, the priority, the timeout and
the idempotency key, which are the caller's own.

What a header says is worked out once for each header. A request then costs one pass over its tensors: their number
and sizes follow from the header (those of strings from their own lengths, which were checked), so nothing has to stand
between them; and the tenant stands behind its own length. SHA-256, because processors have instructions for it: twice
as fast as anything else in ``hashlib``, and no two inputs with one key can be found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from nerite.core import footprint
from nerite.core.byte_budget import CACHE_KEYS, Memo
from nerite.core.caller import MIXED
from nerite.core.idempotency_key import NAME
from nerite.core.request import InferenceRequest, RequestHeader

_HASH: Final = 640
"""Bytes that a hash takes in memory with its list of inputs."""


class Keys:
    """The keys of the requests to one model version."""

    __slots__ = ("_known", "_outputs", "_shared", "origin")

    def __init__(self, outputs: Iterable[str], *, shared: bool = False) -> None:
        """``outputs`` are all that the version has: a request that names none wants all.

        ``shared``: tenants share answers. If not, the time of an answer does not reveal what another tenant has asked.
        """
        self._shared = shared
        self._outputs = frozenset(outputs)
        self.origin = ""
        """What the answers come from: model, version, and what it was made from. Empty: not known, so no keys."""
        self._known: Memo[RequestHeader, tuple[hashlib._Hash, list[int]]] = Memo()
        """The hash as far as the header goes, and the inputs in the order of their names."""

    def renew(self, origin: str) -> None:
        """Have other keys than before."""
        self.origin = origin
        self._known.clear()

    def of(self, request: InferenceRequest) -> bytes:
        """Return the key of a request; nothing if it is ``MIXED`` and tenants do not share answers."""
        header = request.header
        caller = None if self._shared else header.caller
        if caller is MIXED:
            return b""
        beginning, order = self._known.get(header) or self._begin(header)
        digest = beginning.copy()
        digest.update(b"0:" if caller is None else b"%d:%b" % (len(tenant := caller.tenant.encode()), tenant))
        data = request.data
        for place in order:
            digest.update(data[place])
        return digest.digest()

    def _begin(self, header: RequestHeader) -> tuple[hashlib._Hash, list[int]]:
        order = sorted(range(len(header.inputs)), key=lambda place: header.inputs[place].name)
        said = (
            self.origin,
            [(spec.name, spec.datatype.name, spec.shape) for spec in map(header.inputs.__getitem__, order)],
            sorted(header.wanted or self._outputs),
            # By their ``repr``: 1, 1.0 and True are equal to Python, but need not be to a model.
            sorted((name, repr(value)) for name, value in header.parameters.items() if name != NAME),
            (header.sequence_id, header.sequence_start, header.sequence_end),
        )
        known = (hashlib.sha256(repr(said).encode()), order)
        if self.origin:
            CACHE_KEYS.put(self._known, header, known, _HASH + footprint.of_request_header(header))
        return known
