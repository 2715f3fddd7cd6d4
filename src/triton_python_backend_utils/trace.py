"""The trace that a request belongs to."""

from __future__ import annotations


class InferenceTrace:
    """A handle on the trace of a request, to be passed on to the requests that it causes."""

    __slots__ = ("_context",)

    def __init__(self, context: str | None = None, /) -> None:
        self._context = context

    def get_context(self) -> str | None:
        """Return the context for OpenTelemetry's propagator as JSON, or None where the request is not traced."""
        return self._context
