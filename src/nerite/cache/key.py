"""What two requests must have in common to be answered alike, as 32 bytes.

A key stands for everything of a request that its model can see and that may matter to the answer: each input's name,
datatype, shape and bytes, whatever their order; the outputs that are wanted; custom parameters; the correlation id; and
for the model itself, see ``renew``. Not the id, the priority, the timeout and the idempotency key, which are the
caller's own.

What a header says is worked out once for each header. A request then costs one pass over its tensors: their number
and sizes follow from the header (those of strings from their own lengths, which were checked), so nothing has to stand
between them. SHA-256, because processors have instructions for it: twice as fast as anything else in ``hashlib``, and
nobody can find two inputs of one key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from nerite.core.idempotency_key import NAME
from nerite.core.request import InferenceRequest, RequestHeader

MOST: Final = 1024
"""Headers that are remembered."""


class Keys:
    """The keys of the requests to one model version."""

    __slots__ = ("_known", "_outputs", "origin")

    def __init__(self, outputs: Iterable[str]) -> None:
        """``outputs`` are all that the version has: a request that names none wants all."""
        self._outputs = frozenset(outputs)
        self.origin = ""
        """What the answers come from: model, version, and what it was made from. Empty: not known, so no keys."""
        self._known: dict[RequestHeader, tuple[hashlib._Hash, list[int]]] = {}
        """The hash as far as the header goes, and the inputs in the order of their names."""

    def renew(self, origin: str) -> None:
        """Have other keys than before."""
        self.origin = origin
        self._known.clear()

    def of(self, request: InferenceRequest) -> bytes:
        """Return the key of a request."""
        beginning, order = self._known.get(request.header) or self._begin(request.header)
        digest = beginning.copy()
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
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[header] = known
        return known
