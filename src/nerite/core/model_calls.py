"""What a model may ask of the server that it runs in: to call other models, to load and unload them.

Whoever runs models says what ``current`` is: a worker, the tools for tests. In the server's own process there is
nobody: a model there runs on the loop, and would wait for what only the loop can bring.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

from nerite.core.errors import NeriteError, Unsupported
from nerite.core.request import InferenceRequest, ReplySink, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer


class BlsCall(Protocol):
    """A request to another model that is under way."""

    final: bool
    """The last answer was taken."""

    def next(self) -> tuple[InferenceResponse, bool]:
        """Wait for the next answer; return it, and whether it is the last."""

    def when_next(self, loop: AbstractEventLoop, call: Callable[[], None]) -> None:
        """Have ``call`` called on ``loop``, from which this is called, once ``next`` need not wait."""

    def cancel(self) -> None:
        """Have the request cancelled. The called model decides how it ends: there are answers until the last."""

    def give_up(self) -> None:
        """Have the request cancelled, and take no more answers."""


class ServerApi(Protocol):
    """The server, for a model. For any thread of the model."""

    def call(
        self,
        header: RequestHeader,
        data: Sequence[Buffer],
        name: str,
        parent: InferenceRequest | None,
        *,
        decoupled: bool,
    ) -> BlsCall:
        """Send a request with the id ``name`` to another model.

        It is for ``parent``, if that is known; ``decoupled`` if any number of answers will do. Raises ``Unsupported``
        where that cannot be done.
        """

    def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Have a model loaded or reloaded. Raises ``NeriteError``."""

    def unload(self, model: str, *, dependents: bool) -> None:
        """Have a model unloaded. Raises ``NeriteError``."""

    def is_ready(self, model: str, version: str) -> bool:
        """Return whether a model can answer; an empty version means the latest. Raises ``NeriteError``."""


class _Nobody:
    def call(
        self,
        header: RequestHeader,
        data: Sequence[Buffer],
        name: str,
        parent: InferenceRequest | None,
        *,
        decoupled: bool,
    ) -> NoReturn:
        raise _alone()

    def load(self, model: str, parameters: Mapping[str, str | bytes]) -> NoReturn:
        raise _alone()

    def unload(self, model: str, *, dependents: bool) -> NoReturn:
        raise _alone()

    def is_ready(self, model: str, version: str) -> NoReturn:
        raise _alone()


def _alone() -> Unsupported:
    return Unsupported(
        "A model can ask something of the server only from a worker: leave EXECUTION_MODE in_process out of its "
        "configuration. To a process that a model starts, pass the results. In a test, say what other models answer: "
        "load_model(…, calls={name: function})."
    )


current: ServerApi = _Nobody()
"""The host of the models in this process."""

# A request that another request causes: a step of an ensemble, a call that a model makes.


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
