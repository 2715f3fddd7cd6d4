"""The one place where a model's code is called, and where what it raises becomes an answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nerite.backends.interface import Instance
from nerite.core.at_hand import at_hand
from nerite.core.errors import Internal, NeriteError
from nerite.core.failure_text import message_of, traceback_of
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.trace_context import TraceContext
from nerite.execution import current_span

_log = logging.getLogger("nerite.execution")


def run(
    instance: Instance,
    name: str,
    requests: Sequence[InferenceRequest],
    marks: Marks,
    span: TraceContext | None = None,
    *,
    contained: bool = False,
) -> list[InferenceResponse | None]:
    """Execute a batch; always returns one answer for each request, whatever the model does.

    None stands for a request that the model answers by itself. An exception fails the whole batch: a ``NeriteError``
    with its own text, anything else as ``Internal``, with the traceback in the log only. ``span`` is current while the
    model's code runs. ``contained``: the model lives in the server's process, where ``sys.exit`` fails its batch, too.
    """
    before = at_hand.set(requests)
    entered = None if span is None else current_span.enter(span)
    try:
        responses: list[InferenceResponse | None] = list(instance.execute(requests, marks))
        if len(responses) != len(requests):
            raise Internal(f"instance '{name}' gave {len(responses)} responses to {len(requests)} requests")
    except NeriteError as error:
        marks.failed = True
        responses = [InferenceResponse.failed(error.without_frames())] * len(requests)
    except BaseException as error:
        if not (contained or isinstance(error, Exception)):
            raise
        _log.error("instance '%s' failed\n%s", name, traceback_of(error))
        marks.failed = True
        failure = Internal(f"{type(error).__name__}: {message_of(error)}")
        responses = [InferenceResponse.failed(failure)] * len(requests)
    if entered is not None:
        current_span.leave(entered)
    at_hand.reset(before)
    marks.end()
    return responses
