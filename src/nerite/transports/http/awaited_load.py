"""A request over HTTP that waits for its model to be loaded before it can be read: the reading needs its signature.

Requests that could be read wait in ``InferenceEntry.infer``.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

from nerite.core.errors import NeriteError, NotLoaded
from nerite.core.request import Caller, CancelReason, RequestHeader
from nerite.repository.load_waits import LoadWaits
from nerite.transports.http.handler import HttpExchange


class AwaitedLoad:
    """Stands in as the work of an exchange until the model is loaded."""

    id = ""

    def __init__(
        self,
        waits: LoadWaits,
        connection: HttpExchange,
        absent: NotLoaded,
        caller: Caller | None,
        again: Callable[[], None],
        refuse: Callable[[NeriteError], None],
    ) -> None:
        """``again`` answers the request when the model is loaded; ``refuse`` sends the error if it is not."""
        self.header = RequestHeader(absent.model, "", ())
        self._waits = waits
        self._connection = connection
        self._again = again
        self._refuse = refuse
        connection.request = self
        self._held = waits.hold(absent, caller, monotonic_ns(), self._loaded, self._failed)

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """End the wait: the client is gone."""
        if self._held is not None:
            self._waits.leave(self._held)

    def pause(self, paused: bool) -> None:
        """Do nothing: no responses exist yet."""

    def _loaded(self) -> None:
        if not self._connection.gone:
            self._connection.request = None
            self._again()

    def _failed(self, error: NeriteError) -> None:
        if not self._connection.gone:
            self._connection.request = None
            self._refuse(error)
