"""The one place where a model's code is called, and where what it raises becomes an answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from nerite.backends.interface import Instance
from nerite.core.at_hand import at_hand
from nerite.core.errors import Internal, NeriteError
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
) -> list[InferenceResponse | None]:
    """Execute a batch; always returns one answer for each request, whatever the model does.

    None stands for a request that the model answers by itself. An exception fails the whole batch: a ``NeriteError``
    with its own text, anything else as ``Internal``, with the traceback in the log only. ``span`` is current while the
    model's code runs.
    """
    before = at_hand.set(requests)
    entered = None if span is None else current_span.enter(span)
    try:
        responses: list[InferenceResponse | None] = list(instance.execute(requests, marks))
        if len(responses) != len(requests):
            raise Internal(f"instance '{name}' gave {len(responses)} responses to {len(requests)} requests")
    except NeriteError as error:
        marks.failed = True
        responses = [InferenceResponse.failed(error)] * len(requests)
    except Exception as error:
        _log.exception("instance '%s' failed", name)
        marks.failed = True
        responses = [InferenceResponse.failed(Internal(f"{type(error).__name__}: {error}"))] * len(requests)
    if entered is not None:
        current_span.leave(entered)
    at_hand.reset(before)
    marks.end()
    return responses
