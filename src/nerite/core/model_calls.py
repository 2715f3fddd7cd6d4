"""API of the server for models (BLS): call, load and unload other models. Also the requests that requests cause.

The process that runs models sets ``current``: a worker, or the testing tools. In the server's own process it is not
available, because a model there runs on the event loop and would block on a result that only the loop can deliver.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

from nerite.core.errors import NeriteError, Unsupported
from nerite.core.request import InferenceRequest, ReplySink, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import TensorData


class BlsCall(Protocol):
    """A call to another model that is in flight."""

    final: bool
    """The last response was taken."""

    def next(self) -> tuple[InferenceResponse, bool]:
        """Wait for the next response; return it and whether it is the last."""

    def when_next(self, loop: AbstractEventLoop, call: Callable[[], None]) -> None:
        """Schedule ``call`` on ``loop`` once ``next`` would not block. Call this from ``loop``."""

    def cancel(self) -> None:
        """Cancel the request. The called model decides how it ends, so responses arrive until the last."""

    def give_up(self) -> None:
        """Cancel the request and discard its remaining responses."""


class ServerApi(Protocol):
    """The server as models see it. Thread-safe."""

    def call(
        self,
        header: RequestHeader,
        data: Sequence[TensorData],
        name: str,
        parent: InferenceRequest | None,
        *,
        decoupled: bool,
    ) -> BlsCall:
        """Send a request with the id ``name`` to another model.

        ``parent`` is the request that causes the call, if known; ``decoupled`` accepts any number of responses. Raises
        ``Unsupported`` if calls are not possible here.
        """

    def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model. Raises ``NeriteError``."""

    def unload(self, model: str, *, dependents: bool) -> None:
        """Unload a model. Raises ``NeriteError``."""

    def is_ready(self, model: str, version: str) -> bool:
        """Return whether a model is ready; an empty version means the latest. Raises ``NeriteError``."""


class _NoServer:
    """Placeholder outside workers: every call raises ``Unsupported``."""

    def call(
        self,
        header: RequestHeader,
        data: Sequence[TensorData],
        name: str,
        parent: InferenceRequest | None,
        *,
        decoupled: bool,
    ) -> NoReturn:
        raise _unsupported()

    def load(self, model: str, parameters: Mapping[str, str | bytes]) -> NoReturn:
        raise _unsupported()

    def unload(self, model: str, *, dependents: bool) -> NoReturn:
        raise _unsupported()

    def is_ready(self, model: str, version: str) -> NoReturn:
        raise _unsupported()


def _unsupported() -> Unsupported:
    return Unsupported(
        "A model can call the server only from a worker: leave EXECUTION_MODE in_process out of its configuration. "
        "A process that a model starts cannot call it either: pass the results to that process. In a test, define the "
        "responses of other models: load_model(…, calls={name: function})."
    )


current: ServerApi = _NoServer()
"""The server API of the models in this process."""


class ChildRequest(InferenceRequest):
    """A request that another request causes: a step of an ensemble or a BLS call.

    It has its parent's id unless it is given one, and its creator cancels it together with its parent.
    """

    __slots__ = ("parent",)

    caused = True

    def __init__(
        self,
        parent: InferenceRequest,
        header: RequestHeader,
        data: Sequence[TensorData],
        sink: ReplySink,
        arrived_ns: int,
        id: str = "",
    ) -> None:
        super().__init__(header, data, sink, arrived_ns, id or parent.id)
        self.parent = parent


def first_of(request: InferenceRequest) -> InferenceRequest:
    """Return the client's request that ``request`` is part of, which is ``request`` itself if it has no parent."""
    while isinstance(request, ChildRequest):
        request = request.parent.origin
    return request


class CallRequest(ChildRequest):
    """A BLS call: a request from a model to another model."""

    __slots__ = ("refusal",)

    def __init__(
        self,
        parent: InferenceRequest,
        header: RequestHeader,
        data: Sequence[TensorData],
        sink: ReplySink,
        arrived_ns: int,
        id: str = "",
    ) -> None:
        super().__init__(parent, header, data, sink, arrived_ns, id)
        self.refusal: NeriteError | None = None
        """Error with which the server rejected the call, or None."""

    def refuse(self, refusal: NeriteError) -> None:
        """Cancel the call, which no instance has started, and report ``refusal`` to the calling model."""
        self.refusal = refusal
        self.cancel()
