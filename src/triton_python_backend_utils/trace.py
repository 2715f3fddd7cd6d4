"""The trace that a request belongs to."""

from __future__ import annotations

import json

from nerite.core.request import InferenceRequest as CoreRequest
from nerite.core.trace_context import context_of


class InferenceTrace:
    """A handle on the trace of a request, to be passed on to the requests that it causes."""

    __slots__ = ("_context", "request")

    def __init__(self, context: str | None = None, /, request: CoreRequest | None = None) -> None:
        self._context = context
        self.request = request
        """The request that it is of. For the server: no part of Triton's interface."""

    def get_context(self) -> str | None:
        """Return the context for OpenTelemetry's propagator as JSON, or None where the request is not traced."""
        if self._context is None and self.request is not None:
            context = context_of(self.request)
            self._context = None if context is None else json.dumps(context.carrier)
        return self._context
