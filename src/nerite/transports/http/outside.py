"""What would hold up the event loop, done in a helper process while the connection waits: large JSON, both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from nerite.core.errors import NeriteError
from nerite.core.internal_errors import report
from nerite.core.request import GaveUp, RequestHeader
from nerite.execution.helper_pool import Answered, Call, HelperPool
from nerite.transports.http.handler import HttpExchange

_SECONDS: Final = 10.0
"""For any piece of work, and more for each byte of it."""
_SECONDS_PER_BYTE: Final = 1 / 1_000_000
"""Several times as long as it takes on a slow processor."""


class Reading:
    """A request that a helper reads. To its connection it is what runs, though nothing is known of it yet."""

    id = ""
    header = RequestHeader("", "", ())

    def __init__(
        self,
        helpers: HelperPool,
        connection: HttpExchange,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        done: Callable[[list[Any]], None],
        refuse: Callable[[NeriteError], None],
    ) -> None:
        """Begin. ``done`` takes what ``function`` returns, ``refuse`` the refusals of both."""
        self._connection = connection
        self._done = done
        self._refuse = refuse
        connection.request = self
        self._call = _call(helpers, function, arguments, "reading the request", self._answered)

    def cancel(self, why: GaveUp = GaveUp.CANCELLED) -> None:
        """Stop: nobody waits for it."""
        self._call.cancel()

    def pause(self, paused: bool) -> None:
        """Go on: there are no responses yet."""

    def _answered(self, values: list[Any], error: NeriteError | None) -> None:
        if error is not None:  # not raised: what knows its own traceback waits for the collector, and the body with it
            self._refuse(error)
            return
        try:
            self._done(values)
        except NeriteError as refusal:
            self._refuse(refusal)
        except Exception as failure:
            self._refuse(report("http", failure, "in a request that was read by a helper"))


def write(
    helpers: HelperPool,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    done: Answered,
) -> None:
    """Have a function write an answer."""
    _call(helpers, function, arguments, "writing the answer", done)


def _call(
    helpers: HelperPool, function: Callable[..., Any], arguments: Sequence[Any], what: str, answered: Answered
) -> Call:
    name = f"{function.__module__}:{function.__name__}"
    size = sum(len(each) for each in arguments if isinstance(each, bytes | bytearray | memoryview))
    return helpers.call(name, arguments, answered, what, seconds=_SECONDS + size * _SECONDS_PER_BYTE)
