"""A request that another request causes: a step of an ensemble, a call that a model makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nerite.core.request import InferenceRequest, ReplySink, RequestHeader
from nerite.core.tensor import Buffer


class ChildRequest(InferenceRequest):
    """Has the id of its parent, and is cancelled with it by whoever made it."""

    __slots__ = ("parent",)

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


def ancestors(request: InferenceRequest) -> Iterator[InferenceRequest]:
    """Give the parent of a request, the parent's parent and so on: nothing for one that a client sent."""
    while isinstance(request, ChildRequest):
        request = request.parent
        yield request
