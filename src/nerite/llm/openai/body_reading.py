"""Reads the bodies of requests: here, or in a helper process; and waits for the model that a body names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nerite.core.errors import NeriteError, NotLoaded
from nerite.core.failures import report
from nerite.llm.openai.fields import reply_of
from nerite.llm.openai.large_bodies import FILE_SECONDS, LARGE, BodyReader, PromptHelper
from nerite.transports.http.awaited_load import AwaitedLoad

if TYPE_CHECKING:
    from nerite.inference_entry import TransportEntry
    from nerite.transports.http.handler import HttpExchange
    from nerite.transports.http.reply import Reply


def read_body(
    server: TransportEntry,
    connection: HttpExchange,
    body: memoryview,
    reader: BodyReader,
    then: Callable[[Any], None],
    refusal: Callable[[NeriteError], Reply] = reply_of,
    more: Sequence[bytes] = (),
    *,
    apart: bool = False,
) -> None:
    """Parse a body and what belongs to it, in a helper process if they are large; call ``then`` with the result.

    ``apart``: in a helper process however small they are, because they hold files.
    """
    parts = [body, *more]
    if sum(map(len, parts)) < LARGE and not apart:
        then(reader.here(*parts))
        return

    def read(*parsed: Any) -> None:
        try:
            reader.resume(then, *parsed)
        except NotLoaded as absent:
            again = partial(_again, connection, refusal, partial(reader.resume, then, *parsed))
            refuse = partial(send_error, connection, refusal)
            AwaitedLoad(server.waits, connection, absent.without_frames(), None, again, refuse)

    limit = {"seconds": FILE_SECONDS} if apart else {}
    PromptHelper(server.helpers, connection, reader.there, parts, read, "reading the body", refusal, **limit)


def _again(connection: HttpExchange, refusal: Callable[[NeriteError], Reply], answer: Callable[[], None]) -> None:
    """Answer a request that has waited for its model."""
    try:
        answer()
    except NeriteError as error:
        send_error(connection, refusal, error)
    except Exception as error:
        send_error(connection, refusal, report("openai", error, "in a large request"))


def send_error(connection: HttpExchange, refusal: Callable[[NeriteError], Reply], error: NeriteError) -> None:
    """Answer a request with an error. ``refusal`` returns the reply."""
    connection.send([refusal(error).encode()])
