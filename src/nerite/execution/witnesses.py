"""Tells the sinks that are a ``Witness`` how their requests ran. What one raises does not concern the others."""

from __future__ import annotations

from collections.abc import Sequence

from nerite.core.internal_errors import report
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.witness import Witness
from nerite.execution.runner import Batch


def tell_of_batch(batch: Batch, responses: Sequence[InferenceResponse | None], marks: Marks | None) -> None:
    """Tell of an execution. Never raises."""
    if marks is not None:
        marks.requests = len(batch)
    for request, response in zip(batch, responses, strict=True):
        if isinstance(request.sink, Witness):
            again = response is not None and response.again
            try:
                (request.sink.turned if again else request.sink.ran)(request, marks)
            except Exception as error:
                report("dispatcher", error, "while a trace was written", request.id)


def tell_of_response(request: InferenceRequest, marks: Marks | None) -> None:
    """Tell of one of several responses. Never raises."""
    if isinstance(request.sink, Witness):
        try:
            request.sink.parted(request, marks)
        except Exception as error:
            report("dispatcher", error, "while a trace was written", request.id)
