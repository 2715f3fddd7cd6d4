"""Recorded requests: lines of a file, each the JSON that a client posts. They warm models up."""

from __future__ import annotations

import sys

from nerite.core.errors import InvalidArgument
from nerite.core.request import RequestHeader
from nerite.core.tensor import Buffer
from nerite.transports.callers import Sender
from nerite.transports.http.infer_request import Reader


def read(model: str, line: bytes) -> tuple[RequestHeader, list[Buffer]]:
    """Return the request to ``model`` that a line is, with FP16 and BF16 as numbers. Raises the errors of the port."""
    plan = Reader(model, "", Sender({}), sys.maxsize, half=True).plan(line)
    if plan.size or plan.header.shared:
        raise InvalidArgument(
            "the data of a recorded request has to be in its JSON: 'binary_data_size' and 'shared_memory_region' "
            "say that it is elsewhere"
        )
    return plan.header, plan.data(memoryview(b""), 0)
