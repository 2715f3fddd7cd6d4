"""A request that another request causes: a step of an ensemble, a call that a model makes."""

from __future__ import annotations

from collections.abc import Sequence

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest, ReplySink, RequestHeader
from nerite.core.tensor import Buffer


class ChildRequest(InferenceRequest):
    """Has the id of its parent, and is cancelled with it by whoever made it."""

    __slots__ = ("parent",)

    caused = True

    def __init__(
        self,
        parent: InferenceRequest,
        header: RequestHeader,
        data: Sequence[Buffer],
        sink: ReplySink,
        arrived_ns: int,
        id: str = "",
    ) -> None:
        super().__init__(header, data, sink, arrived_ns, id or parent.id)
        self.parent = parent


def first_of(request: InferenceRequest) -> InferenceRequest:
    """Return the request of a client that ``request`` is part of: itself, if nothing else causes it."""
    while isinstance(request, ChildRequest):
        request = request.parent.origin
    return request


class CallRequest(ChildRequest):
    """A call that a model makes."""

    __slots__ = ("refusal",)

    def __init__(
        self,
        parent: InferenceRequest,
        header: RequestHeader,
        data: Sequence[Buffer],
        sink: ReplySink,
        arrived_ns: int,
        id: str = "",
    ) -> None:
        super().__init__(parent, header, data, sink, arrived_ns, id)
        self.refusal: NeriteError | None = None
        """Why the server has cancelled it; None if it has not."""

    def refuse(self, refusal: NeriteError) -> None:
        """Cancel the call, which no instance has begun, and have the model told why."""
        self.refusal = refusal
        self.cancel()
